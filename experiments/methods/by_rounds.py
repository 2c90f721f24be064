"""How a grid's points compare after fewer rounds than a study has: losses on the way, by the points' own curves.

``python -m experiments.methods.by_rounds outer_rate --rounds 50 100 200 300 400``

For studies of one method and a grid of one key, whose runs are at a constant inner rate: a run of N rounds is the
beginning of a longer one then. Each point is compared with the first, paired by seed, in % of its mean loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decentral.lab.comparing import Row, compare_by_seed
from decentral.lab.laboratory import Store
from decentral.lab.plan import Plan
from decentral.lab.results import collect
from decentral.lab.terms import load_study

HERE = Path(__file__).parent


def losses_after(row: Row, rounds: int) -> dict[int, float]:
    """By seed, at the point of each curve that has so many rounds behind it."""
    curves = {seed: run.outcome.curve for seed, run in row.runs.items() if run.outcome.curve is not None}
    found = {seed: [one.loss for one in curve.points if one.rounds == rounds] for seed, curve in curves.items()}
    return {seed: losses[0] for seed, losses in found.items() if losses and losses[0] is not None}


def cell(row: Row, first: Row, rounds: int) -> str:
    """Its mean loss, and how far it is from the first point's."""
    losses = losses_after(row, rounds)
    if not losses:
        raise SystemExit(f"no curve has a point after {rounds} rounds; raise `points` of the study")
    told = f"{sum(losses.values()) / len(losses):.3f}"
    found = None if row is first else compare_by_seed(losses, losses_after(first, rounds), 0.0)
    if found is None:
        return told
    share = found.share
    return f"{told}, {100 * share.mean:+.1f} % [{100 * share.low:+.1f}, {100 * share.high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", help="a folder beside this file, or a path")
    parser.add_argument("--rounds", type=int, nargs="+", required=True)
    given = parser.parse_args()
    folder = HERE / given.study if (HERE / given.study).is_dir() else Path(given.study)
    rows = [row for row in collect(Plan(load_study(folder / "study.toml")), Store(folder).known()).rows if row.point]
    print(f"| rounds | {' | '.join(', '.join(f'{k} {v}' for k, v in row.point.items()) for row in rows)} |")
    print("|---" * (1 + len(rows)) + "|")
    for rounds in given.rounds:
        print(f"| {rounds} | {' | '.join(cell(row, rows[0], rounds) for row in rows)} |")


if __name__ == "__main__":
    main()
