"""The grid as a heat map: rules by attacks, the best worst case on top; red is chance, blue what honest peers reach."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from experiments.attacks.grid import Grid
from experiments.attacks.records import NONE
from experiments.attacks.report import label


def draw(grid: Grid, path: Path) -> None:
    """As PNG. Left of the line the worst attack of each rule."""
    rules, columns = grid.ranked(), [NONE, *grid.attacks]
    rows = [[grid.worst(rule).accuracy, *(fmean(grid.accuracies(rule, one)) for one in columns)] for rule in rules]
    value_RA = 100 * np.array(rows)  # rules, attacks
    figure, axes = plt.subplots(figsize=(9.5, 0.36 * len(rules) + 1.6), layout="constrained")
    axes.imshow(value_RA, cmap="RdBu", vmin=10, vmax=100, aspect="auto")
    for (row, column), value in np.ndenumerate(value_RA):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=_ink(value))
    axes.axvline(0.5, color="black", linewidth=2)
    heads = ["worst case", "no attack", *map(label, grid.attacks)]
    axes.set_xticks(range(len(heads)), heads, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(rules)), rules, fontsize=8)
    axes.set_title("Accuracy in %, three hostile peers of ten, SparseLoCo on digits", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _ink(value: float) -> str:
    return "black" if 30 < value < 80 else "white"
