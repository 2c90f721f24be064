"""A line and a machine, as a study declares them: the world of a cell in which time counts, or the hours of one in
which it does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from decentral.lab.runs.curve import Point
from decentral.lab.swarm.world import ExchangeKind, LabWorld

__all__ = ["Line"]

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Line:
    """Every peer's, but that one may be slow and one thin."""

    rate_mbit: float  # up and down each
    latency_ms: float  # one way
    step_seconds: float  # of one inner step
    parameters: float | None = None  # of the model that the small one stands for; None: its own
    slow: float = 1.0  # times as long that one peer's steps take
    thin: float = 1.0  # times as long that one peer's bytes take

    def world(self, peers: int, numel: int) -> LabWorld:
        """As the laboratory's swarm takes it; ``numel``: parameters of the small model."""
        scale = 1.0 if self.parameters is None else self.parameters / numel
        return LabWorld(
            peers, self.step_seconds, self.rate_mbit * 1e6 / 8, self.latency_ms / 1e3, scale, self.slow, self.thin
        )

    def hours(self, point: Point, numel: int, peers: int, kind: ExchangeKind) -> float:
        """Until ``point`` of a run in which everybody waits for every round.

        Of pairs it is the same where all peers have one line and one machine: then all meet at one time.
        """
        world = self.world(peers, numel)
        trips = 2 if kind == "reduce" else 1
        training = point.step * world.step_seconds * world.slow
        sending = point.nbytes * world.scale * world.thin / world.rate + point.rounds * trips * world.latency
        return (training + sending) / _HOUR
