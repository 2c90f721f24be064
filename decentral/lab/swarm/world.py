"""Machines and lines of a laboratory: how long a step takes, and how long bytes do.

A model of the laboratory is small, and stands for one that somebody would train: each of its bytes counts as ``scale``
of that one's. Every peer has the same line, but for one that may be thin, and the same machine, but for one that may be
slow: the last two, so that rank 0 is ever usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LabWorld"]

ExchangeKind = Literal["gather", "reduce", "pair"]


@dataclass(frozen=True, slots=True)
class LabWorld:
    """See the module."""

    peers: int
    step_seconds: float = 1.0  # of one inner step
    rate: float = float("inf")  # bytes a second, up and down each
    latency: float = 0.0  # seconds one way
    scale: float = 1.0  # bytes of the real model for one of the small one
    slow: float = 1.0  # times as long that the slow peer's steps take
    thin: float = 1.0  # times as long that bytes take on the thin peer's line

    def seconds_of_step(self, rank: int) -> float:
        """Of one inner step of this peer."""
        return self.step_seconds * (self.slow if rank == self.peers - 1 else 1.0)

    def sent(self, nbytes: float, kind: ExchangeKind, taking_part: int) -> float:
        """Bytes that one peer sends in a round, as often as its body of ``nbytes`` goes out."""
        others = max(0, taking_part - 1)
        times = {"gather": float(others), "reduce": 2 * others / max(1, taking_part), "pair": min(1.0, others)}
        return nbytes * self.scale * times[kind]

    def seconds_of_round(self, rank: int, nbytes: float, kind: ExchangeKind, taking_part: int) -> float:
        """From a contribution to the moment at which everybody has it; a gather takes in what it sends out."""
        if taking_part < 2:
            return 0.0
        line = self.rate / (self.thin if rank == max(0, self.peers - 2) else 1.0)
        trips = 2 if kind == "reduce" else 1
        return self.sent(nbytes, kind, taking_part) / line + trips * self.latency
