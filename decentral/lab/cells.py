"""A cell is one run of a study, by everything that decides its numbers: equal cells have equal bits, whoever asks for
them.

The names of studies, methods and links are not in it, so that two methods of one name and other terms are two cells,
and one method that two studies compare is one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Final, Literal

from decentral.manifest import Manifest
from decentral.manifest.table import canonical
from decentral.trial.replicas import ExchangeKind, TrialWorld

__all__ = ["FORMAT", "Cell", "Curve", "Flips", "Kind", "Line", "Looks", "Point"]

Kind = Literal["swarm", "data-parallel", "alone"]
Flips = Literal["update", "momentum"]

FORMAT: Final = 2  # raised whenever the same cell would have other numbers, or its record another form


@dataclass(frozen=True, slots=True)
class Cell:
    """A run, and all that is behind its id."""

    kind: Kind
    task: str  # by name: see decentral.lab.own
    peers: int
    terms: str  # the manifest's canonical JSON; of a reference only [run], [model], [data] and [inner] count
    steps: int  # inner ones of a peer, after which the run is over; mean over peers where they differ
    points: int  # of the curve
    windows: int  # of held-out text
    text: str  # what is trained on, by name and version
    flips: Flips | None = None  # of a control: what counts with the other sign
    line: Line | None = None  # where time decides what is merged; None: bytes take no time
    alpha: float | None = None  # of digits: how evenly peers have each of them

    @classmethod
    def of(cls, kind: Kind, task: str, peers: int, manifest: Manifest, **more: Any) -> Cell:  # Any: the fields above
        """A cell of these terms."""
        return cls(kind, task, peers, canonical(manifest).decode("ascii"), **more)

    @property
    def manifest(self) -> Manifest:
        """The terms, checked again."""
        return Manifest.of(json.loads(self.terms), "cell")

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the values that its id is made of."""
        return asdict(self) | {"terms": json.loads(self.terms), "format": FORMAT}

    @property
    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return what a reader of its record wants to know; all that decides its numbers is behind its id."""
        manifest = self.manifest
        told: dict[str, Any] = {"kind": self.kind, "task": self.task, "peers": self.peers, "steps": self.steps}
        told |= {"method": manifest.outer.method} if self.kind == "swarm" else {}
        told |= {"inner": manifest.inner.optimizer_name, "learning_rate": manifest.inner.learning_rate}
        return told | {"seed": manifest.run.seed} | ({"flips": self.flips} if self.flips else {})

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the sha256 of its canonical JSON."""
        return _id_of(self)


@cache
def _id_of(cell: Cell) -> str:
    text = json.dumps(cell.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


# ---- lines and machines, as a study declares them ----
#
# The world of a cell in which time counts, or the hours of one in which it does not.

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

    def world(self, peers: int, numel: int) -> TrialWorld:
        """As the laboratory's swarm takes it; ``numel``: parameters of the small model."""
        scale = 1.0 if self.parameters is None else self.parameters / numel
        return TrialWorld(
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


# ---- the curve of a run ----
#
# At some of its rounds, what was spent and what was reached.


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is. Bytes are of the small model."""

    step: float  # inner steps that a peer has made, mean over peers
    tokens: float  # that it has seen
    rounds: int  # exchanges so far, each of one fragment
    nbytes: float  # that it has sent
    seconds: float  # virtual: of a cell without a world those of its inner steps, a second each
    loss: float | None  # None: not finite
    loss_of_mean: float | None = None  # see HeldOut; None: all peers are alike


@dataclass(frozen=True, slots=True)
class Curve:
    """A whole run."""

    points: tuple[Point, ...]
    peak_nbytes: float  # most that one peer sent at one inner step
    numel: int  # parameters of the model

    def columns(self) -> dict[str, list[Any]]:  # Any: numbers, or None
        """Its points for JSON, name by name; what no point has is left out."""
        found = {one.name: [getattr(point, one.name) for point in self.points] for one in fields(Point)}
        return {name: column for name, column in found.items() if any(value is not None for value in column)}

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], peak_nbytes: float, numel: int) -> Curve:  # Any: as above
        """From what ``columns`` gave. ValueError where they have other lengths, TypeError for other names."""
        points = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return cls(tuple(Point(**{"loss": None} | point) for point in points), peak_nbytes, numel)

    @property
    def has_diverged(self) -> bool:
        """Return whether it ended in no number."""
        return self.points[-1].loss is None


class Looks:
    """When the loss is measured: at the first round at or behind each of ``points`` even parts of the ``steps``."""

    def __init__(self, steps: int, points: int) -> None:
        self._steps, self._points, self._made = steps, points, 0

    def due(self, step: float) -> bool:
        """Return whether to look after so many inner steps of a peer; asked in their order."""
        behind = int(step * self._points / self._steps + 1e-9)
        due, self._made = behind > self._made, max(behind, self._made)
        return due
