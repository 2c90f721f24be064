"""Cells of a study as real peers: does a swarm of processes end where the laboratory does?

    OMP_NUM_THREADS=1 python -m experiments.swarm_cells.run STUDY.toml --lab FOLDER

FOLDER has the study's cells, as ``decentral lab STUDY.toml --out FOLDER`` leaves them. Of every method, or those named
with --only, the cell of the first reported seed is run by as many processes as it has peers, on loopback: the same
terms but for patience, first weights, batches, and keys, so that sums are made in the same order.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from decentral.lab.cells import Cell
from decentral.lab.comparing import interval
from decentral.lab.laboratory import Store
from decentral.lab.plan import Contestant, Plan, Reported
from decentral.lab.running import HeldOut, Outcome, Reader, work_of
from decentral.lab.terms import load_study
from experiments.swarm_cells.peer import Ended, Place, take_part

__all__ = ["as_swarm", "held_out", "main"]


_END_SECONDS = 20.0  # from its last word to a process's end; then it is killed


def as_swarm(cell: Cell, folder: Path, transport: str = "daemon") -> list[Ended]:
    """Run a cell by one process for each peer; how each ended, by rank."""
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    try:
        for rank in range(cell.peers):
            mine, its = context.Pipe()
            process = context.Process(target=take_part, args=(Place(cell, rank, folder, transport), its), daemon=True)
            process.start()
            its.close()
            lines.append(mine)
            processes.append(process)
        invite = lines[0].recv()
        for line in lines[1:]:
            line.send(invite)
        ended: list[Ended] = [line.recv() for line in lines]
        for process in processes:
            process.join(_END_SECONDS)
        return ended
    finally:
        for process in processes:
            process.kill()


def held_out(cell: Cell, ended: Sequence[Ended]) -> HeldOut:
    """As the laboratory reads it: of one model where all agree, else of each and of their mean."""
    held = [[torch.from_numpy(anchor) for anchor in one.anchors] for one in ended]
    agree = all(torch.equal(a, b) for mine in held for a, b in zip(mine, held[0], strict=True))
    reader = Reader(work_of(cell), cell.manifest.outer)
    return reader.held_out(held[:1] if agree else held)


def _told(contestant: Contestant, cells: Sequence[Reported], known: dict[str, Outcome], folder: Path) -> list[str]:
    mine, points = cells[0], [known[one.cell.id].curve.points[-1] for one in cells]  # type: ignore[union-attr]
    began = time.monotonic()
    ended = as_swarm(mine.cell, folder)
    seconds, found = time.monotonic() - began, held_out(mine.cell, ended)
    of_mean = points[0].loss_of_mean is not None and found.of_mean is None  # a gossip run ends in the mean of all
    losses = [point.loss_of_mean if of_mean else point.loss for point in points]
    steps = "/".join(str(steps) for steps in sorted({one.steps for one in ended}))
    name = f"{contestant.name}, mean model" if of_mean else contestant.name
    return [name, str(mine.seed), steps, f"{found.loss:.6f}", f"{losses[0]:.6f}", spread(losses), f"{seconds:.0f}"]


def spread(losses: Sequence[float | None]) -> str:
    """Where 90 % of further runs fall by these, Student's prediction interval, and their range."""
    numbers = [loss for loss in losses if loss is not None]
    found = interval(numbers)
    half = (found.high - found.mean) * math.sqrt(len(numbers) + 1)
    return f"[{found.mean - half:.4f}, {found.mean + half:.4f}], {min(numbers):.4f} to {max(numbers):.4f}"


HEADS = ["method", "seed", "inner steps", "swarm", "laboratory", "laboratory, a further run", "s of the swarm"]


def main() -> None:
    """Print the table, a row as soon as it is there."""
    parser = argparse.ArgumentParser(description="Cells of a study as real peers.")
    parser.add_argument("study", type=Path)
    parser.add_argument("--lab", type=Path, required=True, help="the folder of its cells")
    parser.add_argument("--only", action="append", help="a method; may be given again")
    given = parser.parse_args()
    plan, known = Plan(load_study(given.study)), Store(given.lab).known()
    print(f"| {' | '.join(HEADS)} |\n| {' | '.join(['---'] * len(HEADS))} |", flush=True)
    for contestant in plan.contestants:
        cells = list(plan.report(contestant, plan.chosen(contestant, known)))
        if cells[0].cell.kind == "swarm" and (not given.only or contestant.name in given.only):
            with tempfile.TemporaryDirectory() as folder:
                print(f"| {' | '.join(_told(contestant, cells, known, Path(folder)))} |", flush=True)


if __name__ == "__main__":
    main()
