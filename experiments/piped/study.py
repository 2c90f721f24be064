"""Replicas of stages beside whole ones, boundary by boundary: python -m experiments.piped.study --out FOLDER

Every row is a study of the laboratory with a task of its own; what is in the folder already is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from decentral.lab import study
from decentral.lab.comparing import compare_by_seed
from experiments.piped import tasks

Losses = Mapping[int, float]  # by seed

# Row, task, replicas, and bytes that cross a boundary for each token, each way, of a bfloat16 model's 2 * 64.
Rows = Mapping[str, tuple[type[tasks.Whole], int, int]]
ROWS: Rows = {
    "whole": (tasks.Whole, 4, 0),
    "two whole alone": (tasks.Whole, 2, 0),
    "float32": (tasks.Unrounded, 4, 256),
    "bfloat16": (tasks.Bf16, 4, 128),
    "int8": (tasks.Int8Blocks, 4, 66),
    "subspace, 4 times": (tasks.Subspace4, 4, 32),
    "subspace, 8 times": (tasks.Subspace8, 4, 16),
    "MAPL, 4 times": (tasks.Mapl4, 4, 32),
    "MAPL, 8 times": (tasks.Mapl8, 4, 16),
    "all subspace, 8 times": (tasks.AllSubspace8, 4, 16),
    "all MAPL, 8 times": (tasks.AllMapl8, 4, 16),
    "assembled": (tasks.Assembled, 4, 0),
    "control: another basis every step": (tasks.Redrawn4, 4, 32),
    "no flush, L = 2": (tasks.NoFlushNear, 4, 256),
    "no flush, L = 4": (tasks.NoFlushFar, 4, 256),
    "control: eight steps late": (tasks.EightLate, 4, 256),
}
# By a method that leaves a stage out of the mean where it stood still, and shortens nothing, as the norm of who has
# stopped says nothing.
GONE: Rows = {
    "all stages there": (tasks.Unrounded, 4, 256),
    "one of two skips a stage": (tasks.OneSkips, 4, 256),
    "one of two dissolves": (tasks.OneDissolves, 4, 256),
    "both skip a stage": (tasks.BothSkip, 4, 256),
    "both dissolve": (tasks.BothDissolve, 4, 256),
    "both skip a stage throughout": (tasks.BothSkipThroughout, 4, 256),
    "both never there": (tasks.Whole, 2, 0),
}
PAIRS = (
    ("MAPL, 4 times", "subspace, 4 times"),
    ("MAPL, 8 times", "subspace, 8 times"),
    ("subspace, 8 times", "all subspace, 8 times"),
    ("MAPL, 8 times", "all MAPL, 8 times"),
    ("subspace, 4 times", "two whole alone"),
    ("subspace, 8 times", "two whole alone"),
    ("MAPL, 4 times", "two whole alone"),
    ("assembled", "two whole alone"),
    ("subspace, 4 times", "assembled"),
    ("no flush, L = 4", "control: eight steps late"),
    ("one of two skips a stage", "one of two dissolves"),
    ("both skip a stage", "both dissolve"),
    ("both skip a stage throughout", "both never there"),
)
MARGIN = 0.005


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder of its own for each row")
    parser.add_argument("--rows", choices=[*ROWS, *GONE], nargs="*", default=[*ROWS, *GONE])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=25, help="inner steps of a round")
    parser.add_argument("--rate", type=float, default=8e-3, help="of the inner optimizer")
    return parser.parse_args()


def main() -> None:
    """Run what is missing, and print the tables."""
    given = options()
    print(tables({row: losses(given, row) for row in given.rows}))


def losses(given: argparse.Namespace, row: str) -> Losses:
    """Return the anchor's held-out loss at the end, by seed."""
    task, peers, _ = ROWS.get(row) or GONE[row]
    method: dict[str, Any] = {"name": "sparseloco", "preset": "sparseloco", "outer": {"learning_rate": 2.5}}
    if row in GONE:
        method |= {"preset": tasks.ByStages, "outer": {"learning_rate": 2.5, "norm_clip": "none"}}
    made = study(
        [method | {"compressor": {"chain": "topk(k=160, chunk=4096) >> signmag2"}}],
        task=task,
        learning_rates=[given.rate],
        rounds=given.rounds,
        peers=peers,
        seeds=range(1, given.seeds + 1),
        references=(),
        model={"hidden": 64, "layers": 8, "heads": 4, "context": 64},
        data={"batch_size": 8},
        inner={"steps": given.steps},
    ).run(out=given.out / row.replace(" ", "-").replace(",", "").replace(":", ""))
    return {int(seed): loss for seed, loss in made.rows[0]["losses"].items()}


def tables(found: Mapping[str, Losses]) -> str:
    """Return each row against replicas that are all whole, and rows against one another."""
    lines = [
        "| two whole replicas and two of four stages | bytes a token | bits per byte | over whole |",
        "|---|---|---|---|",
    ]
    whole = found.get("whole", found.get("float32", {}))  # the same bits
    for row, by_seed in found.items():
        nbytes = (ROWS.get(row) or GONE[row])[2]
        lines.append(f"| {row} | {nbytes} | {fmean(by_seed.values()):.4f} | {_over(by_seed, whole)} |")
    lines += ["", "| | against | by |", "|---|---|---|"]
    lines += [f"| {a} | {b} | {_over(found[a], found[b])} |" for a, b in PAIRS if a in found and b in found]
    return "\n".join(lines)


def _over(mine: Losses, other: Losses) -> str:
    """Return the mean difference in shares, with the interval of nine in ten, paired by seed."""
    compared = compare_by_seed(mine, other, MARGIN)
    if compared is None or mine is other:
        return ""
    share = compared.share
    return f"{100 * share.mean:+.2f} % ({100 * share.low:+.2f} to {100 * share.high:+.2f}), {compared.word}"


if __name__ == "__main__":
    main()
