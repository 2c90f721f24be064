"""Together or alone, setting by setting: python -m experiments.defaults.run cells.jsonl --stage whole --processes 2

Every cell is a line of the file, written whole; what is there is not run again. A cell is a problem, how many peers,
rounds and inner steps, a seed, and the terms; alone it has no terms and one peer. Seeds are other peers' data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.defaults.problems import PROBLEMS, problem

LOOKS = (0.25, 0.5, 0.75, 1.0)  # of a run, after which the held-out loss is measured
SEEDS = (0, 100, 200)  # the number of the first peer
Cell = dict[str, Any]  # Any: JSON


# ---- terms that are tried ----


def dense(rate: float, **more: Any) -> Cell:
    """DiLoCo with int8 frames that everybody gets."""
    return {"preset": "diloco", "exchange": {"kind": "gather"}, "outer": {"learning_rate": rate, **more}}


def sparse(rate: float, k: int, **more: Any) -> Cell:
    """SparseLoCo with so many of 4096 values."""
    chain = f"topk(k={k}, chunk=4096) >> signmag2"
    return {"preset": "sparseloco", "compressor": {"chain": chain}, "outer": {"learning_rate": rate, **more}}


def cells_of(
    name: str, peers: int, rounds: int, steps: int, terms: list[Cell], seeds: tuple[int, ...]
) -> Iterator[Cell]:
    """Alone and together, seed by seed."""
    base = {"problem": name, "rounds": rounds, "steps": steps}
    for seed in seeds:
        yield {**base, "peers": 1, "seed": seed, "terms": None}
        for one in terms:
            yield {**base, "peers": peers, "seed": seed, "terms": one}


DENSE = [dense(rate) for rate in (0.7, 0.9, 1.1)]
MOMENTUM = [dense(0.8, momentum=0.7), dense(0.8, momentum=0.8), dense(1.0, momentum=0.8)]
SPARSE = [sparse(rate, k) for k, rate in itertools.product((64, 160), (1.6, 2.5))]
CHOSEN = [dense(0.8, momentum=0.7), dense(0.9)]
OTHERS = ("conv", "uneven", "lora", "lstm", "gpt-0.05M")

STAGES: dict[str, list[Cell]] = {
    # A byte-level GPT of 0.12 M parameters, where one key decided between no use and better than twice the batch.
    "whole": [cell for peers in (2, 4) for cell in cells_of("gpt", peers, 100, 30, [*DENSE, *MOMENTUM], SEEDS[:1])],
    "short": [
        cell for peers in (2, 4, 8) for cell in cells_of("gpt", peers, 20, 30, [*DENSE[:2], *MOMENTUM], SEEDS[:1])
    ],
    "middle": [cell for cell in cells_of("gpt", 2, 50, 30, [*DENSE, *MOMENTUM], SEEDS[:1])],
    "long": [cell for cell in cells_of("gpt", 2, 400, 30, CHOSEN, SEEDS[:1])],
    # The best of a grid, which `decentral tune` has to come near to.
    "grid": [cell for cell in cells_of("gpt", 2, 100, 30, [dense(rate) for rate in (1.0, 1.1, 1.2)], SEEDS)],
    "again": [cell for peers in (2, 4) for cell in cells_of("gpt", peers, 100, 30, CHOSEN, SEEDS)],
    "short-again": [cell for peers in (2, 4) for cell in cells_of("gpt", peers, 20, 30, CHOSEN, SEEDS)],
    "sparse": [cell for peers in (2, 4) for cell in cells_of("gpt", peers, 100, 30, SPARSE, SEEDS[:1])],
    # Less momentum, which overshoots less, where 0.9 was chosen.
    "less": [cell for cell in cells_of("gpt", 2, 100, 30, MOMENTUM[1:2], SEEDS)],
    # One factor at a time.
    "others": [cell for name in OTHERS for cell in cells_of(name, 2, 100, 30, CHOSEN, SEEDS[:1])],
    "others-again": [cell for name in OTHERS for cell in cells_of(name, 2, 100, 30, CHOSEN[1:], SEEDS)],
    "large": [cell for cell in cells_of("gpt-0.6M", 2, 100, 30, CHOSEN, SEEDS[:1])],
    "steps": [cell for steps in (10, 100) for cell in cells_of("gpt", 2, 3000 // steps, steps, CHOSEN, SEEDS[:1])],
}


# ---- running them ----


def run(cell: Cell) -> Cell:
    """Its held-out losses at ``LOOKS``, and the seconds that it took here."""
    from decentral.manifest import preset_manifest
    from decentral.trial.own_model import OwnCourse, TrainsAlone

    torch.set_num_threads(1)
    began, build = time.monotonic(), problem(cell["problem"], **cell.get("sizes", {}))
    if cell["terms"] is None:
        course: Any = TrainsAlone(build, cell["seed"])
    else:
        given = {name: dict(table) for name, table in cell["terms"].items() if name != "preset"}
        given |= {"run": {"rounds": cell["rounds"], "salt": "0"}, "inner": {"steps": cell["steps"]}}
        course = OwnCourse(build, preset_manifest(cell["terms"]["preset"], **given), cell["peers"], cell["seed"])
    losses = [round(course.go(round(share * cell["rounds"]) * cell["steps"]), 4) for share in LOOKS]
    return {**cell, "losses": losses, "seconds": round(time.monotonic() - began, 1)}


def key_of(cell: Cell) -> str:
    """Of what decides its numbers."""
    return json.dumps(
        {name: cell.get(name) for name in ("problem", "peers", "rounds", "steps", "seed", "terms")}, sort_keys=True
    )


def told_of(found: Cell) -> str:
    """A line for people."""
    terms = found["terms"]
    told = "alone" if terms is None else f"{terms['preset']} {terms.get('outer')} {terms.get('compressor', '')}"
    length = f"{found['problem']} x{found['peers']} {found['rounds']}x{found['steps']} seed {found['seed']}"
    return f"{length} {told}: {found['losses']} {found['seconds']} s"


def main() -> None:
    """Run what is missing of a stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--stage", choices=STAGES, action="append", required=True)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    known = {key_of(json.loads(line)) for line in given.file.read_text().splitlines()} if given.file.exists() else set()
    wanted = {key_of(cell): cell for stage in given.stage for cell in STAGES[stage]}
    missing = [cell for key, cell in wanted.items() if key not in known]
    assert all(cell["problem"] in PROBLEMS for cell in missing)
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for done, found in enumerate(pool.imap_unordered(run, missing), 1):
            with given.file.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{done}/{len(missing)}", told_of(found), flush=True)


if __name__ == "__main__":
    main()
