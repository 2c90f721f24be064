"""What a command serves beside its work: the page, and numbers for Prometheus."""

from __future__ import annotations

import importlib.util
import ipaddress
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import click
from anyio.abc import SocketAttribute, SocketListener
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from decentral.errors import DecentralError, ListenError, UsageError
from decentral.observe.diagnostics import BANDS
from decentral.observe.health import lost_sentence
from decentral.observe.metrics import exposition, serve_metrics
from decentral.observe.status import STATES, Status, is_lost, is_running, read_status
from decentral.replica.figures import NAMES

# ---- the page beside a command ----
#
# A thread serves it while a peer trains, where its extra is installed.

_PAGE_PACKAGES = ("starlette", "uvicorn")


def check_page_there() -> None:
    """UsageError where a package is missing."""
    missing = [name for name in _PAGE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}; pip install 'decentral[dashboard]'")


def _page_wanted(context: click.Context, parameter: click.Parameter, wanted: bool) -> bool:
    """Refused before anything is read or made."""
    if wanted:
        check_page_there()
    return wanted


with_page = click.option(
    "--dashboard",
    is_flag=True,
    callback=_page_wanted,
    help="Show this peer and its swarm in the browser, on this machine only; decentral dashboard does so, too.",
)


@contextmanager
def page_beside(directory: Path, say: Callable[[str], None], *, wanted: bool) -> Iterator[None]:
    """The page of one peer for as long as the block lasts; at another port where the usual one is taken."""
    if not wanted:
        yield
        return
    import decentral
    from decentral.dashboard.server import Place, listen

    version = decentral.__version__
    try:
        listening = listen(directory, Place(), version=version)
    except UsageError:
        listening = listen(directory, Place(port=0), version=version)
    say(f"the page: {listening.place.address}")
    with listening.beside():
        yield


# ---- the port for Prometheus ----
#
# A relay or a peer answers there, also whatever restarts it and asks how it is.

_ILL = ("attention", "stalled", "gone")  # first words of a health sentence


def _port_wanted(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """Refused before anything is read or made."""
    return None if text is None else host_and_port(text)


with_metrics = click.option(
    "--metrics",
    callback=_port_wanted,
    metavar="[HOST:]PORT",
    help="Answer Prometheus at /metrics there, and whoever asks how the peer is at /healthz; localhost when not named.",
)


def host_and_port(text: str) -> tuple[str, int]:
    """``9400`` is on localhost; ``127.0.0.1:9400`` and ``[::1]:9400`` name the address. UsageError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    try:
        if not (port.isdecimal() and 0 <= int(port) < 65536):
            raise ValueError(port)
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"--metrics {text!r}: want PORT, or HOST:PORT with an IP address, such as 9400") from None
    return ("127.0.0.1" if host == "localhost" else host), int(port)


async def metrics_socket(where: tuple[str, int], stack: AsyncExitStack, say: Callable[[str], None]) -> SocketListener:
    """Where Prometheus asks; said, because port 0 lets the system choose. ListenError when it is taken."""
    try:
        made = await anyio.create_tcp_listener(local_host=where[0], local_port=where[1])
    except OSError as error:
        reason = error.strerror or str(error)
        raise ListenError(f"--metrics {where[0]}:{where[1]}: cannot listen ({reason}); name another port") from None
    (listener,) = made.listeners
    assert isinstance(listener, SocketListener), "TCP"
    stack.push_async_callback(listener.aclose)
    port = listener.extra(SocketAttribute.local_port)
    say(f"metrics at http://{f'[{where[0]}]' if ':' in where[0] else where[0]}:{port}/metrics")
    return listener


@contextmanager
def metrics_beside(directory: Path, where: tuple[str, int] | None, say: Callable[[str], None]) -> Iterator[None]:
    """Answer for the peer that runs in ``directory``, on a thread, while the block lasts; not at all without a port."""
    if where is None:
        yield
        return
    from anyio.from_thread import start_blocking_portal

    opened: AsyncExitStack = AsyncExitStack()
    with start_blocking_portal() as portal:
        listener = portal.call(metrics_socket, where, opened, say)
        served = portal.start_task_soon(
            serve_metrics, listener, lambda: _numbers_of(directory), lambda: health_of(directory)
        )
        try:
            yield
        finally:
            served.cancel()
            portal.call(opened.aclose)


def health_of(directory: Path) -> tuple[bool, str]:
    """Whether the peer of ``directory`` is well, and its sentence. Nobody there, or nothing that can be read: not."""
    try:
        status = read_status(directory)
    except DecentralError as error:
        return False, str(error)
    if is_lost(status):
        return False, lost_sentence(status, time.time())
    return status.health.partition(":")[0] not in _ILL, status.health


def _numbers_of(directory: Path) -> Iterator[Metric]:
    try:
        status = read_status(directory)
    except DecentralError:  # none has been written yet
        return
    yield from peer_numbers(status, alive=is_running(status))


# ---- a peer's status as numbers ----
#
# The names are public: dashboards are built on them.

_OURS = "decentral_peer"
_MEANING = {
    "norm_dispersion": "Standard deviation of the contributions' norms over their mean.",
    "loss_dispersion": "Standard deviation of the peers' losses over their mean.",
    "mean_cosine": "Mean cosine over all pairs of contributions.",
    "debt_ratio": "Norm of what this peer owes over that of its newest pseudo-gradient.",
    "never_sent": "Share of parameters that nobody has sent since this process began.",
    "replica_distance": "Distance to the last partner's replica over the length of ours.",
    "replica_variance": "Half the mean square of that distance over the last pairs.",
}


def peer_exposition(status: Status, *, alive: bool) -> str:
    """In Prometheus' text format; ``alive``: whether the process of the status runs."""
    return exposition(lambda: peer_numbers(status, alive=alive)).decode()


def peer_numbers(status: Status, *, alive: bool) -> Iterator[Metric]:
    """Those of one status; what it does not know is not there."""
    yield _gauge("up", "Whether the peer's process runs.", float(alive))
    yield _gauge("updated_seconds", "When the status was written, since the epoch.", status.updated)
    yield _gauge("round", "Outer steps made.", status.round)
    yield _gauge("members", "Members of the epoch.", len(status.members))
    yield _gauge("inner_steps", "Inner steps of this peer, over all its lives.", status.inner_steps)
    yield _state(status)
    yield _gauge("live_members", "Members that are here, this one included.", sum(map(_is_live, status.members)))
    yield _gauge("rounds_seen", "Rounds that ended since this peer is a member, at most 100.", status.rounds_seen)
    yield _gauge("rounds_contributed", "Those of them that carry this peer's update.", status.rounds_contributed)
    yield _gauge("stalled_seconds", "Without a round, where that is unusual; 0: as usual.", status.stalled_seconds)
    yield _gauge("send_rate_bytes", "Bytes sent per second, of late.", status.sent_per_second)
    yield _gauge("receive_rate_bytes", "Bytes received per second, of late.", status.received_per_second)
    yield _counter("sent_bytes", "Bytes sent since the process began.", status.bytes_sent)
    yield _counter("received_bytes", "Bytes received since the process began.", status.bytes_received)
    held = "Seconds of a round in which the training thread copies parameters."
    taking = "Seconds in which it copies what a checkpoint holds."
    known = (
        ("loss", "Nats per token.", status.loss),
        ("held_out_loss", "Nats per token.", status.held_out_loss),
        ("held_seconds", held, status.held_seconds),
        ("checkpoint_held_seconds", taking, status.checkpoint_held_seconds),
    )
    for name, meaning, value in known:
        if value is not None:
            yield _gauge(name, meaning, value)
    yield from _diagnostics(status)


def _state(status: Status) -> Metric:
    states = GaugeMetricFamily(f"{_OURS}_state", "1 for the state that it is in.", labels=["state"])
    for state in STATES:
        states.add_metric([state], float(state == status.state))
    return states


def _is_live(member: Mapping[str, Any]) -> bool:
    return bool(member.get("live", True))


def _diagnostics(status: Status) -> Iterator[Metric]:
    known = [name for name in NAMES if name in status.diagnostics]
    for name in known:
        yield _gauge(name, _MEANING[name], status.diagnostics[name])
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
    """Prometheus knows it by this name and ``_total``."""
    return CounterMetricFamily(f"{_OURS}_{name}", meaning, value)
