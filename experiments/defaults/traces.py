"""Losses that one peer sees of a run, beside a peer alone: python -m experiments.defaults.traces traces.jsonl [--judge]

A line is a cell of `run.py` with the trace of its first peer: for every round the outer steps made, the mean training
loss of the first quarter of its inner steps and of the last, and where it was looked at the held-out loss of the live
model before the commit and after it. A peer alone has its held-out loss twice. What is in the file is not run again.
``--judge`` runs nothing, and prints of which runs in the file a peer would have been warned, and when.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decentral.observe.diagnostics import Diagnostics, Look
from experiments.defaults.problems import problem
from experiments.defaults.run import SEEDS, Cell, dense, key_of, sparse

Row = list[float]  # outer steps made, training loss at first and at last, held out before the commit and after it


def cells() -> Iterator[Cell]:
    """Terms that end ahead of alone, and terms that end behind it; the short ones first."""
    for name, rounds, steps, seeds, terms in (
        ("gpt-0.05M", 20, 30, SEEDS, [dense(0.8, momentum=0.7), dense(0.9), sparse(2.5, 64)]),
        ("uneven", 100, 30, SEEDS, [dense(0.8, momentum=0.7), dense(0.9), dense(1.3)]),
        ("gpt-0.05M", 50, 20, SEEDS[:1], [dense(0.8, momentum=0.7), dense(0.9), sparse(2.5, 64), dense(1.5)]),
        ("gpt-0.05M", 50, 20, SEEDS[1:2], [dense(0.8, momentum=0.7), dense(0.9)]),
        ("gpt-0.05M", 100, 30, SEEDS[:1], [dense(0.9)]),
        ("gpt", 30, 30, SEEDS[:1], [dense(0.9)]),
        ("conv", 100, 30, SEEDS[:1], [dense(0.9), dense(0.8, momentum=0.7)]),
        ("lstm", 20, 30, SEEDS[:1], [dense(0.8, momentum=0.7)]),
    ):
        for seed in seeds:
            base = {"problem": name, "rounds": rounds, "steps": steps, "seed": seed}
            yield {**base, "peers": 1, "terms": None}
            for one in terms:
                yield {**base, "peers": 2, "terms": one}


class _Heard:
    """An inner step that remembers its losses."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step, self._losses = step, [0.0][:0]

    def __call__(self) -> None:
        self._losses.append(float(self._step()))

    def quarters(self) -> Row:
        """Means of the first and of the last quarter of the steps since this was asked last."""
        found, self._losses = self._losses, []
        count = -(-len(found) // 4)
        return [round(sum(some) / count, 4) for some in (found[:count], found[-count:])]


def alone(cell: Cell, every: int) -> list[Row]:
    """A single peer, looked at when those together are."""
    from decentral.trial.own_model import training_of

    torch.manual_seed(cell["seed"])
    training = training_of(problem(cell["problem"]), cell["seed"])
    step, rows = _Heard(training.step), []
    for round_ in range(1, cell["rounds"] + 1):
        for _ in range(cell["steps"]):
            step()
        heard, held_out = step.quarters(), training.held_out() if round_ % every == 0 else None
        rows.append([round_, *heard, *([] if held_out is None else [round(held_out, 4)] * 2)])
    return rows


def together(cell: Cell, every: int) -> list[Row]:
    """The first of several peers."""
    from decentral.manifest import preset_manifest
    from decentral.trial.own_model import OwnCourse, training_of

    heard, evaluations = [], []

    def build(number: int) -> tuple:
        made = training_of(problem(cell["problem"]), number)
        heard.append(_Heard(made.step))
        evaluations.append(made.held_out)
        return made.model, made.optimizers, heard[-1], made.evaluate

    given = {name: dict(table) for name, table in cell["terms"].items() if name != "preset"}
    given |= {"run": {"rounds": cell["rounds"], "salt": "0"}, "inner": {"steps": cell["steps"]}}
    course = OwnCourse(build, preset_manifest(cell["terms"]["preset"], **given), cell["peers"], cell["seed"])
    first, before = course._peers[0], [0.0][:0]
    take = first.take

    def looked_at(*args: Any) -> Any:
        if (args[1] + 1) % every == 0:
            before.append(evaluations[0]())
        return take(*args)

    first.take = looked_at  # type: ignore[method-assign]
    rows = []
    for reached in course._course:
        row = [reached.outer_step, *heard[0].quarters()]
        if reached.outer_step % every == 0:
            row += [round(before[-1], 4), round(evaluations[0](), 4)]
        rows.append(row)
    return rows


# ---- who would have been warned ----


def evaluated(rows: list[Row]) -> Iterator[Look]:
    """Looks as `join(evaluate=...)` makes them; of every second round the gains are those of two."""
    start = rows[0][1]
    for row in rows:
        if len(row) > 3:
            yield Look(int(row[0]), start, row[3], row[4])
            start = row[4]


def logged(rows: list[Row]) -> Iterator[Look]:
    """As it is seen in the losses that a loop logs."""
    for row, after in pairwise(rows):
        yield Look(int(row[0]), row[1], row[2], after[1])


def warned_at(looks: Iterator[Look], *, held_out: bool) -> list[tuple[str, int]]:
    """Figures that a warning was told of, and the outer steps after which."""
    told = list[tuple[str, int]]()

    def hear(event: str, fields: dict[str, Any]) -> None:
        if event == "out_of_band":
            told.append((fields["figure"], fields["outer_step"]))

    diagnostics = Diagnostics(hear)
    for look in looks:
        diagnostics.add_look(look, held_out=held_out)
    return told


def judge(found: list[Cell]) -> None:
    """Print them, those that end ahead of alone and those that end behind it."""
    ends = {_length(cell): cell["trace"][-1][3] for cell in found if cell["terms"] is None}
    for cell in found:
        if cell["terms"] is None:
            continue
        rows, alone = cell["trace"], ends[_length(cell)]
        told = [warned_at(evaluated(rows), held_out=True), warned_at(logged(rows), held_out=False)]
        side = "ahead " if rows[-1][4] < alone else "behind"
        ended = f"{side} {rows[-1][4]:.3f}, alone {alone:.3f}"
        print(*_length(cell), cell["terms"]["preset"], cell["terms"]["outer"], ended, "evaluated, logged:", *told)


def _length(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("problem", "rounds", "steps", "seed"))


def main() -> None:
    """Run what is missing, or judge what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--judge", action="store_true")
    given = parser.parse_args()
    found = [json.loads(line) for line in given.file.read_text().splitlines()] if given.file.exists() else []
    if given.judge:
        return judge(found)
    torch.set_num_threads(1)
    known = {key_of(cell) for cell in found}
    for cell in cells():
        if key_of(cell) in known:
            continue
        began, every = time.monotonic(), 2 if cell["rounds"] > 50 else 1
        rows = alone(cell, every) if cell["terms"] is None else together(cell, every)
        with given.file.open("a") as file:
            file.write(json.dumps({**cell, "trace": rows, "seconds": round(time.monotonic() - began, 1)}) + "\n")
        print(cell, rows[-1], f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
