"""``metrics.jsonl``: numbers of one peer over time, one JSON object per inner or outer step.

``scope`` is ``inner`` (loss of a training step) or ``outer`` (state after a round: held-out bits per byte,
bytes so far). ``step`` counts inner steps of this peer, ``tokens`` the tokens it has trained on,
``seconds`` the wall time since it started.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from decentral.observe.jsonlines import JsonLines, read_json_lines

METRICS_FILE = "metrics.jsonl"
Scope = Literal["inner", "outer"]


class MetricsLog:
    """Append numbers to ``directory/metrics.jsonl``; safe to call from any thread."""

    def __init__(self, directory: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lines = JsonLines(directory / METRICS_FILE)
        self._monotonic = monotonic
        self._start = monotonic()

    def inner(self, step: int, **values: object) -> None:
        """Write what one inner step gave."""
        self._write("inner", step, values)

    def outer(self, step: int, **values: object) -> None:
        """Write what holds after one outer step."""
        self._write("outer", step, values)

    def _write(self, scope: Scope, step: int, values: dict[str, object]) -> None:
        seconds = round(self._monotonic() - self._start, 4)
        self._lines.append({"scope": scope, "step": step, "seconds": seconds, **values})

    def close(self) -> None:
        """Close the file; later numbers are ignored."""
        self._lines.close()


def read_metrics(directory: Path, scope: Scope | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run directory in order, only those of one scope when it is given."""
    for row in read_json_lines(directory / METRICS_FILE):
        if scope in (None, row.get("scope")):
            yield row
