"""From a cell to what it found: the one function that workers run. What goes wrong inside is a finding, too."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from decentral.errors import DecentralError, NonFiniteError
from decentral.lab.runs.cell import Cell
from decentral.lab.runs.curve import Curve
from decentral.lab.work.base import Work

__all__ = ["Outcome", "failed", "run_cell", "text_of", "work_of"]

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell."""

    status: Status  # diverged: a loss or a parameter was no number any more
    reason: str = ""  # of a failure, in one line
    curve: Curve | None = None
    seconds: float = 0.0  # of this machine
    device: str = "cpu"  # that trained: another one rounds otherwise

    @property
    def loss(self) -> float | None:
        """At the end; None where it has none."""
        return self.curve.points[-1].loss if self.curve is not None and self.status == "done" else None

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Its part of a record."""
        sent, peak = (self.curve.points[-1].nbytes, self.curve.peak_nbytes) if self.curve is not None else (0.0, 0.0)
        numel = 0 if self.curve is None else self.curve.numel
        totals = {"nbytes": sent, "peak_nbytes": peak, "numel": numel, "seconds": round(self.seconds, 3)}
        return {
            "status": self.status,
            "reason": self.reason,
            "curve": self.curve.columns() if self.curve is not None else {},
            "totals": totals,
            "made_with": _versions() | ({} if self.device == "cpu" else {"device": self.device}),
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Outcome:  # Any: JSON
        """From a record."""
        totals = told["totals"]
        curve = Curve.of(told["curve"], totals["peak_nbytes"], totals["numel"]) if told["curve"] else None
        device = told.get("made_with", {}).get("device", "cpu")
        return cls(told["status"], told["reason"], curve, totals["seconds"], device)


def failed(reason: str) -> Outcome:
    """Of a cell that could not be run to its end."""
    return Outcome("failed", " ".join(reason.split())[:300])


def run_cell(cell: Cell, device: str = "cpu") -> Outcome:
    """Run it, here and now; ``device`` as torch spells it. Digits are trained on the processor."""
    began = time.monotonic()
    try:
        curve = _curve(cell, device)
    except NonFiniteError as error:
        return Outcome("diverged", " ".join(str(error).split()), None, time.monotonic() - began, device)
    except DecentralError as error:
        return failed(str(error))
    except Exception as error:  # noqa: BLE001  one cell of many: the others have their own
        return failed(f"{type(error).__name__}: {error}")
    return Outcome("diverged" if curve.diverged else "done", "", curve, time.monotonic() - began, device)


def _curve(cell: Cell, device: str) -> Curve:
    from decentral.lab.runs.in_swarm import run_swarm
    from decentral.lab.runs.together import run_together

    work = work_of(cell, device)
    return run_swarm(cell, work) if cell.kind == "swarm" else run_together(cell, work)


def work_of(cell: Cell, device: str = "cpu") -> Work:
    """What its replicas learn, and where."""
    if cell.task == "digits":
        from decentral.lab.work.digits import Digits

        assert cell.alpha is not None, "studies of digits have one"
        return Digits(cell.manifest, cell.peers, cell.alpha)
    from decentral.lab.work.language import Language  # transformers, which digits need not wait for

    uneven = cell.task == "language-uneven"
    corpus = _corpus(cell.manifest.data.held_out)
    return Language(cell.manifest, corpus, cell.peers, uneven=uneven, windows=cell.windows, device=device)


@cache
def _corpus(held_out: float) -> Any:  # Any: a Corpus
    from decentral.tasks.corpus import load_corpus

    return load_corpus(held_out=held_out)


def text_of(task: str) -> str:
    """What is trained on, by name and version: another version is another text."""
    if task == "digits":
        return f"digits of scikit-learn {version('scikit-learn')}"
    import platform

    return f"standard library of Python {platform.python_version()}"


def _versions() -> dict[str, str]:
    return {"decentral": version("decentral"), "torch": version("torch")}
