"""Numbers of one peer: over time in ``metrics.jsonl``, of the moment for Prometheus and for trackers of experiments.

``metrics.jsonl`` has one JSON object per inner or outer step. ``scope`` is ``inner`` (loss of a training step) or
``outer`` (state after a round: held-out bits per byte, bytes so far). ``step`` counts inner steps of this peer,
``tokens`` the tokens it has trained on, ``seconds`` the wall time since it started.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.abc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decentral.observe.diagnostics import BANDS, NAMES, WORDS
from decentral.observe.lines import JsonLines, read_json_lines
from decentral.observe.status import QUANTITIES, STATES, Status, number_of
from decentral.plugins import to_install

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


# ---- Prometheus, over HTTP ----
#
# A scraper asks a running process for its numbers at ``http://HOST:PORT/metrics``. ``/healthz`` says in one line how it
# is, with 200 while that is well and 503 else, for what restarts or alarms.
#
# One request per connection, one answer, closed. Whoever reaches the port can read the numbers and nothing else, and
# can cost us no more than a few connections of a few seconds: so it is meant for localhost. That is why the server is
# ours: prometheus_client's has a thread for each connection and waits for its request without end.

_LONGEST_HEAD = 8192  # bytes of a request's
_REQUEST_SECONDS = 5.0  # for all of it
_AT_ONCE = 16  # connections; a scraper needs one

Read = Callable[[], Iterable[Metric]]
Health = Callable[[], tuple[bool, str]]  # whether it is well, and a line for people


class _Now(Collector):
    """The numbers of the moment, read when they are asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._read()


def exposition(read: Read) -> bytes:
    """Return the numbers in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Now(read))
    return generate_latest(registry)


async def serve_metrics(listener: anyio.abc.Listener[anyio.abc.SocketStream], read: Read, health: Health) -> None:
    """Answer until cancelled; ``read`` gives the numbers of the moment, ``health`` the word."""
    room = anyio.CapacityLimiter(_AT_ONCE)

    async def attend(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if room.borrowed_tokens >= _AT_ONCE:
                return
            async with room:
                with anyio.move_on_after(_REQUEST_SECONDS):
                    await _answer(stream, read, health)

    await listener.serve(attend)


async def _answer(stream: anyio.abc.SocketStream, read: Read, health: Health) -> None:
    try:
        await stream.send(_answer_to(await _head(stream), read, health))
        await stream.send_eof()
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        return


def _answer_to(request: bytes, read: Read, health: Health) -> bytes:
    method, _, rest = request.partition(b" ")
    path, head_only = rest.partition(b" ")[0], method == b"HEAD"
    if method not in (b"GET", b"HEAD") or path not in (b"/metrics", b"/", b"/healthz"):
        return _response("404 Not Found", b"the numbers are at /metrics, one word at /healthz\n")
    if path != b"/healthz":
        return _response("200 OK", exposition(read), head_only=head_only)
    well, line = health()
    return _response("200 OK" if well else "503 Service Unavailable", f"{line}\n".encode(), head_only=head_only)


async def _head(stream: anyio.abc.SocketStream) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _LONGEST_HEAD:
        request += await stream.receive(_LONGEST_HEAD)
    return request


def _response(status: str, body: bytes, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)


# ---- trackers of experiments ----
#
# A peer's status as numbers under ``swarm/``, the same wherever they are logged.

SWARM_PREFIX = "swarm/"


def swarm_numbers(status: Status) -> dict[str, float]:
    """Return the numbers of one moment for trackers; what is not known yet is not there.

    Bytes are counted since the process began, in both directions over everything; ``contributed`` is the share of the
    last 100 rounds that carry this peer's update; the figures of docs/diagnostics.md are of the newest round.
    """
    numbers: dict[str, float | None] = {**status.diagnostics}
    for name, quantity in QUANTITIES.items():
        if quantity.tracker:
            numbers[quantity.tracker] = number_of(status, name)
    return {f"{SWARM_PREFIX}{name}": float(value) for name, value in numbers.items() if value is not None}


# ---- whether figures can be drawn here ----
#
# Their library is an extra: it takes 96 MB, and a peer draws nothing.


def no_figure() -> str:
    """Say that none was drawn, and what that takes."""
    return f"no figure was drawn: that takes matplotlib; {to_install('figures')}"


def can_draw() -> bool:
    """Tell whether matplotlib is installed, without loading it."""
    return importlib.util.find_spec("matplotlib") is not None


# ---- a peer's status as numbers ----
#
# The names are public: dashboards are built on them.

_OURS = "decentral_peer"


def peer_exposition(status: Status, *, alive: bool) -> str:
    """Return a status in Prometheus' text format; ``alive``: whether its process runs."""
    return exposition(lambda: peer_numbers(status, alive=alive)).decode()


def peer_numbers(status: Status, *, alive: bool) -> Iterator[Metric]:
    """Yield the families of one status; what it does not know is not there."""
    yield _gauge("up", "Whether the peer's process runs.", float(alive))
    for name, quantity in QUANTITIES.items():
        value = number_of(status, name)
        if quantity.gauge and value is not None:
            yield _gauge(quantity.gauge, quantity.meaning, value)
        if quantity.counter and value is not None:
            yield _counter(quantity.counter, quantity.meaning, value)
    yield _state(status)
    yield from _diagnostics(status)


def _state(status: Status) -> Metric:
    states = GaugeMetricFamily(f"{_OURS}_state", "1 for the state that it is in.", labels=["state"])
    for state in STATES:
        states.add_metric([state], float(state == status.state))
    return states


def _diagnostics(status: Status) -> Iterator[Metric]:
    known = [name for name in NAMES if name in status.diagnostics]
    for name in known:
        yield _gauge(name, WORDS[name].meaning, status.diagnostics[name])
    if known:
        yield _gauge(
            "diagnosed_round", "Outer steps made with the round that the figures are of.", status.diagnosed_round
        )
        out = GaugeMetricFamily(f"{_OURS}_out_of_band", "Whether a figure is out of its band.", labels=["figure"])
        for band in BANDS:
            if band.figure in status.diagnostics:
                out.add_metric([band.figure], float(band.figure in status.out_of_band))
        yield out


def _gauge(name: str, meaning: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_OURS}_{name}", meaning, value)


def _counter(name: str, meaning: str, value: float) -> Metric:
    """Return a counter, which Prometheus knows by this name and ``_total``."""
    return CounterMetricFamily(f"{_OURS}_{name}", meaning, value)
