"""Runs side by side as one figure: what was reached over inner steps, and over what was sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decentral.errors import DiskError
from decentral.observe.compared.runs import Point

__all__ = ["draw"]


def draw(path: Path, curves: Mapping[str, Sequence[Point]], *, kind: str) -> None:
    """Write a PNG of one line for each run; over hours where no run tells its bytes. Raises DiskError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s to import: only who draws pays
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _lines(left, curves, "inner steps of this peer", lambda point: point.steps)
    if all(point.nbytes is None for points in curves.values() for point in points):
        _lines(right, curves, "hours", lambda point: point.seconds / 3600)
    else:
        _lines(right, curves, "MB sent by this peer", lambda point: (point.nbytes or 0.0) / 1e6)
    left.set_ylabel(kind)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # a name without a picture's ending, too
        raise DiskError(f"{path}: the figure cannot be written ({error}); name another file with --figure") from error


def _lines(axes: Any, curves: Mapping[str, Sequence[Point]], label: str, spent: Callable[[Point], float]) -> None:
    for name, points in curves.items():
        axes.plot([spent(point) for point in points], [point.value for point in points], label=name, marker=".")
    axes.set_xlabel(label)
    axes.legend()
    axes.grid(alpha=0.3)
