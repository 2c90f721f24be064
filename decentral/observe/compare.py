"""The run of one peer over time, as its directory tells it, to be set beside others.

Of ``start`` and ``join`` it is read from ``metrics.jsonl``: held-out bits per byte of the anchor, bytes, steps. A loop
of one's own leaves ``events.jsonl``: there a point is what ``peer.log`` was given, at the round that it was given in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from decentral.errors import DiskError, UsageError
from decentral.manifest import Manifest, load_manifest
from decentral.observe.events import EVENTS_FILE
from decentral.observe.lines import read_json_lines
from decentral.observe.metrics import METRICS_FILE, read_metrics
from decentral.observe.status import STATUS_FILE, Status, read_status

BITS, LOSS = "held-out bits per byte", "training loss"
TERMS = "run.toml"


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a run, and what it took until there."""

    steps: float  # inner steps of this peer
    seconds: float
    nbytes: float | None  # sent by this peer; None: not known
    value: float


@dataclass(frozen=True, slots=True)
class SeenRun:
    """The run of a peer, as its folder tells it."""

    directory: Path
    manifest: Manifest
    status: Status | None  # the last one; None: none was written
    curves: Mapping[str, tuple[Point, ...]]  # of BITS and LOSS, those that there are
    steps: int
    seconds: float  # of training, over all its processes


def read_run(directory: Path) -> SeenRun:
    """Read what is left of a run in ``directory``, which may be going on. UsageError where no peer ever trained."""
    if not (directory / TERMS).is_file():
        raise UsageError(f"{directory}: no run directory of a peer; name what was given to --out")
    manifest = load_manifest(directory / TERMS)
    status = read_status(directory) if (directory / STATUS_FILE).is_file() else None
    points = _of_metrics(directory) if (directory / METRICS_FILE).is_file() else _of_events(directory, manifest)
    curves: dict[str, list[Point]] = {}
    last = Point(0, 0.0, None, 0.0)
    for kind, point in points:
        curves.setdefault(kind, []).append(point)
        last = point
    steps = int(last.steps) if status is None or not status.inner_steps else status.inner_steps
    return SeenRun(directory, manifest, status, {k: tuple(v) for k, v in curves.items()}, steps, last.seconds)


def _of_metrics(directory: Path) -> Iterator[tuple[str, Point]]:
    """Yield points of ``metrics.jsonl``; each process counts seconds and bytes anew, so what earlier ones counted is
    added.
    """
    sent = 0.0
    for row in _add_up(read_metrics(directory), ("seconds", "bytes_sent")):
        sent = float(row.get("bytes_sent", sent))  # rows of inner steps have none
        for kind, key in ((BITS, "bits_per_byte"), (LOSS, "loss")):
            if isinstance(row.get(key), int | float):
                yield kind, Point(float(row["step"]), float(row["seconds"]), sent, float(row[key]))


def _add_up(rows: Iterable[dict[str, Any]], counters: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the rows with ``counters`` that never fall: a fall is another process that began at zero."""
    before, added = dict.fromkeys(counters, 0.0), dict.fromkeys(counters, 0.0)
    for row in rows:
        for key in counters:
            if key in row:
                added[key] += before[key] if row[key] < before[key] else 0.0
                before[key] = float(row[key])
        yield row | {key: row[key] + added[key] for key in counters if key in row}


def _of_events(directory: Path, manifest: Manifest) -> Iterator[tuple[str, Point]]:
    """Yield the mean loss of each round, as a loop may log every step. Older logs do not say at which."""
    interval = manifest.inner.steps / manifest.outer.fragments
    for outer_step, told in groupby(_read_losses(directory), key=lambda one: one[0]):
        several = list(told)
        mean = sum(loss for _, _, _, loss in several) / len(several)
        _, step, seconds, _ = several[-1]
        yield LOSS, Point((outer_step + 1) * interval if step is None else step, seconds, None, mean)


def _read_losses(directory: Path) -> Iterator[tuple[int, float | None, float, float]]:
    """Yield for each loss the outer steps made before, the inner steps of this peer, the seconds of its lives, the
    loss.
    """
    outer_step, began, lived = 0, 0.0, 0.0
    for row in read_json_lines(directory / EVENTS_FILE):
        now, event = float(row.get("t", 0.0)), row.get("event")
        if event == "joined":
            outer_step, began = int(row["round"]), now - lived
        elif event == "commit":
            outer_step = int(row["outer_step"])
        elif event == "metrics" and isinstance(row.get("loss"), int | float):
            lived = now - began
            step = row.get("inner_step")
            yield outer_step, float(step) if isinstance(step, int | float) else None, lived, float(row["loss"])


def common_kind(runs: Iterable[SeenRun]) -> str:
    """Return what all runs tell: bits per byte of the anchor, or training losses. UsageError where it is neither."""
    kinds = [set(run.curves) for run in runs]
    shared = set.intersection(*kinds)
    if not shared:
        raise UsageError(
            "these runs tell no number that all of them have: a loop of your own tells peer.log(loss=...), "
            "decentral start the held-out bits per byte; compare runs of one kind, after a few rounds"
        )
    return BITS if BITS in shared else LOSS


def names_of(runs: Iterable[SeenRun]) -> list[str]:
    """Return a name for each run: its folder's, or the whole path where two folders are named alike."""
    several = list(runs)
    names = [run.directory.name for run in several]
    return [run.directory.name if names.count(run.directory.name) == 1 else str(run.directory) for run in several]


# ---- runs side by side, drawn ----
#
# Their figure: what was reached over inner steps, and over what was sent.


def draw(path: Path, curves: Mapping[str, Sequence[Point]], *, kind: str) -> None:
    """Write a PNG of one line for each run; over hours where no run tells its bytes. Raises DiskError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s to import: only who draws pays
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_lines(left, curves, "inner steps of this peer", lambda point: point.steps)
    if all(point.nbytes is None for points in curves.values() for point in points):
        _draw_lines(right, curves, "hours", lambda point: point.seconds / 3600)
    else:
        _draw_lines(right, curves, "MB sent by this peer", lambda point: (point.nbytes or 0.0) / 1e6)
    left.set_ylabel(kind)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # a name without a picture's ending, too
        raise DiskError(f"{path}: the figure cannot be written ({error}); name another file with --figure") from error


def _draw_lines(axes: Any, curves: Mapping[str, Sequence[Point]], label: str, spent: Callable[[Point], float]) -> None:
    for name, points in curves.items():
        axes.plot([spent(point) for point in points], [point.value for point in points], label=name, marker=".")
    axes.set_xlabel(label)
    axes.legend()
    axes.grid(alpha=0.3)
