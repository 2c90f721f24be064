"""The tables of README.md from the cells: python -m experiments.defaults.table experiments/defaults/cells.jsonl"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Cell = dict[str, Any]  # Any: JSON


def main() -> None:
    """A row for each problem, length and number of peers."""
    cells = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    alone: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    together: dict[tuple[str, int, int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        length = cell["problem"], cell["rounds"], cell["steps"]
        if cell["terms"] is None:
            alone[length].append(cell["losses"][-1])
        else:
            together[(*length, cell["peers"])][name_of(cell["terms"])].append(cell["losses"][-1])
    print("| problem | rounds x steps | peers | alone | together |\n|---|---|---|---|---|")
    for (problem, rounds, steps, peers), found in sorted(together.items()):
        told = "; ".join(f"{name}: {mean(losses)}" for name, losses in sorted(found.items()))
        print(f"| {problem} | {rounds} x {steps} | {peers} | {mean(alone[problem, rounds, steps])} | {told} |")


def name_of(terms: Cell) -> str:
    """Outer rate and momentum, and how many of 4096 values where the rest is not sent."""
    outer, chain = terms["outer"], terms.get("compressor", {}).get("chain", "")
    sparse = f"k {chain.split('k=')[1].split(',')[0]}, " if chain else ""
    momentum = "" if sparse else f", {outer.get('momentum', 0.9):g}"
    return f"{sparse}{outer['learning_rate']:g}{momentum}"


def mean(losses: list[float]) -> str:
    """With the number of seeds where there are several."""
    several = f" ({len(losses)})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.3f}{several}" if losses else "-"


if __name__ == "__main__":
    main()
