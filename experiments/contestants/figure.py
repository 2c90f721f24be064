"""Held-out loss over minutes and over bytes: a row for each kind of match, a line for each contestant."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.contestants.report import TITLES, groups
from experiments.contestants.results import Result

TOP = 4.6  # bits per byte: above are the first steps, in which all fall alike
COLOURS = dict(zip(TITLES, ["C0", "C1", "C2", "C4", "C3"], strict=True))


def draw(played: list[Result], path: Path) -> None:
    """As PNG."""
    rows = groups(played)
    figure, axes = plt.subplots(
        max(1, len(rows)), 2, figsize=(9, 2.7 * max(1, len(rows)) + 0.4), layout="constrained", squeeze=False
    )
    for (over_time, over_bytes), (name, group) in zip(axes, rows.items(), strict=False):
        _minutes(over_time, group)
        _bytes(over_bytes, group)
        over_time.set_title(name, fontsize=9, loc="left")
    if rows:
        axes[0][1].legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _minutes(axes: Axes, group: list[Result]) -> None:
    for result in group:
        curve = result.curve()
        axes.plot([row[0] for row in curve], [row[2] for row in curve], **_look(result))
    axes.set_ylim(top=TOP)
    axes.set_xlabel("minutes", fontsize=8)
    axes.set_ylabel("held-out bits per byte", fontsize=8)


def _bytes(axes: Axes, group: list[Result]) -> None:
    for result in group:
        curve = result.curve()[1:]  # before the first step nothing is sent that trains
        axes.plot([row[1] for row in curve], [row[2] for row in curve], **_look(result))
    axes.set_xscale("log")
    axes.set_ylim(top=TOP)
    axes.set_xlabel("MB sent by all peers together", fontsize=8)


def _look(result: Result) -> dict[str, str]:
    name = result.match.contestant
    return {"color": COLOURS[name], "label": TITLES[name].replace("`", ""), "marker": "."}
