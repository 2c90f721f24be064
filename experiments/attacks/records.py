"""Cells of the table, and the file that holds what was measured of them: a line of JSON each, in the order of runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

CELLS = Path(__file__).with_name("cells.jsonl")
NONE = "none"  # no attack: what the three hostile peers train is honest


@dataclass(frozen=True)
class Cell:
    """What is run."""

    rule: str
    attack: str
    alpha: float
    seed: int
    rounds: int


@dataclass(frozen=True)
class Result:
    """How a cell ended. ``loss`` is None where it is not finite."""

    cell: Cell
    accuracy: float
    loss: float | None


def finished(path: Path) -> list[Result]:
    """What the file holds; of a line that a crash tore, nothing."""
    if not path.exists():
        return []
    whole, _, _torn = path.read_text(encoding="utf-8").rpartition("\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return [Result(Cell(**line["cell"]), line["accuracy"], line["loss"]) for line in lines]


def append(path: Path, cell: Cell, told: dict[str, object]) -> str:
    """One more line, and what it says. A torn one before it goes, so that the file stays readable."""
    line = json.dumps({"cell": asdict(cell), **told})
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
    return line
