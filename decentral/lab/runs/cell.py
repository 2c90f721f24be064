"""One run of a study, by everything that decides its numbers: equal cells have equal bits, whoever asks for them.

The names of studies, methods and links are not in it, so that two methods of one name and other terms are two cells,
and one method that two studies compare is one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, Literal

from decentral.lab.runs.line import Line
from decentral.manifest import Manifest
from decentral.manifest.table import canonical

__all__ = ["FORMAT", "Cell", "Flips", "Kind", "Task"]

Kind = Literal["swarm", "data-parallel", "alone"]
Task = Literal["language", "language-uneven", "digits", "mixture"]
Flips = Literal["update", "momentum"]

FORMAT: Final = 2  # raised whenever the same cell would have other numbers, or its record another form


@dataclass(frozen=True, slots=True)
class Cell:
    """See the module."""

    kind: Kind
    task: Task
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
    def of(cls, kind: Kind, task: Task, peers: int, manifest: Manifest, **more: Any) -> Cell:  # Any: the fields above
        """A cell of these terms."""
        return cls(kind, task, peers, canonical(manifest).decode("ascii"), **more)

    @property
    def manifest(self) -> Manifest:
        """The terms, checked again."""
        return Manifest.of(json.loads(self.terms), "cell")

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """What its id is made of."""
        return asdict(self) | {"terms": json.loads(self.terms), "format": FORMAT}

    @property
    def told(self) -> dict[str, Any]:  # Any: JSON
        """What a reader of its record wants to know; all that decides its numbers is behind its id."""
        manifest = self.manifest
        told: dict[str, Any] = {"kind": self.kind, "task": self.task, "peers": self.peers, "steps": self.steps}
        told |= {"method": manifest.outer.method} if self.kind == "swarm" else {}
        told |= {"inner": manifest.inner.named, "learning_rate": manifest.inner.learning_rate}
        return told | {"seed": manifest.run.seed} | ({"flips": self.flips} if self.flips else {})

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of the sha256 of its canonical JSON."""
        return _id_of(self)


@cache
def _id_of(cell: Cell) -> str:
    text = json.dumps(cell.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]
