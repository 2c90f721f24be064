"""The ports that a command serves beside its work: the page, and numbers for Prometheus."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Protocol

import click

from decentral.errors import DecentralError, DiskError, ListenError, UsageError

if TYPE_CHECKING:  # help texts need none of it, and it takes a while to import
    from anyio.abc import SocketListener
    from prometheus_client.metrics_core import Metric

# ---- the page beside a command ----
#
# A thread serves it while a peer trains. An entry point names the module that has it.

PAGES = "decentral.pages"  # group of entry points


class Page(Protocol):
    """A module that shows a peer while a command runs."""

    def check_installed(self) -> None:
        """Raise UsageError where a package is missing."""
        ...

    def page_beside(self, directory: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Show the peer of this folder for as long as the block lasts."""
        ...


def _load_page() -> Page:
    from decentral.plugins import added, to_install  # 0.03 s, which only those pay that ask for it

    point = added(PAGES).get("dashboard")
    if point is None:
        raise UsageError(f"no page is installed; {to_install('dashboard')}")
    page: Page = point.load()
    return page


def _page_wanted(context: click.Context, parameter: click.Parameter, wanted: bool) -> bool:
    """Refused before anything is read or made."""
    if wanted:
        _load_page().check_installed()
    return wanted


with_page = click.option(
    "--dashboard",
    is_flag=True,
    callback=_page_wanted,
    help="Show this peer and its swarm in the browser, on this machine only; decentral dashboard does so, too.",
)


def page_beside(directory: Path, say: Callable[[str], None], *, wanted: bool) -> AbstractContextManager[None]:
    """Show the page of one peer for as long as the block lasts."""
    return _load_page().page_beside(directory, say) if wanted else nullcontext()


# ---- the port for Prometheus ----
#
# A relay or a peer answers there, also whatever restarts it and asks how it is.


def _port_wanted(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[str, int] | None:
    """Refused before anything is read or made, a port that is taken, too."""
    if text is None:
        return None
    where = host_and_port(text)
    try:
        with socket.create_server(where, family=socket.AF_INET6 if ":" in where[0] else socket.AF_INET):
            return where
    except OSError as error:
        raise _listen_error(where, error) from None


def _listen_error(where: tuple[str, int], error: OSError) -> ListenError:
    return ListenError(f"--metrics {where[0]}:{where[1]}: cannot listen ({error.strerror or error}); name another port")


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


_LAST_WORD = 70.0  # s: who asks once a minute, as Prometheus does unless told otherwise, has asked by then
_ANSWERING = 1.0  # s that an answer takes at most


async def metrics_socket(where: tuple[str, int], stack: AsyncExitStack, say: Callable[[str], None]) -> SocketListener:
    """Where Prometheus asks; said, because port 0 lets the system choose. ListenError when it is taken."""
    import anyio
    from anyio.abc import SocketAttribute, SocketListener

    try:
        made = await anyio.create_tcp_listener(local_host=where[0], local_port=where[1])
    except OSError as error:
        raise _listen_error(where, error) from None
    (listener,) = made.listeners
    assert isinstance(listener, SocketListener), "TCP"
    stack.push_async_callback(listener.aclose)
    port = listener.extra(SocketAttribute.local_port)
    say(f"metrics at http://{f'[{where[0]}]' if ':' in where[0] else where[0]}:{port}/metrics")
    return listener


@contextmanager
def metrics_beside(directory: Path, where: tuple[str, int] | None, say: Callable[[str], None]) -> Iterator[None]:
    """Answer for the peer that runs in ``directory``, on a thread, while the block lasts; not at all without a port.

    Where a write that failed ends the block, until that was asked for: an alarm goes by it, and a process that is gone
    tells nobody.
    """
    if where is None:
        yield
        return
    import anyio
    from anyio.from_thread import start_blocking_portal

    from decentral.observe.metrics import serve_metrics

    opened: AsyncExitStack = AsyncExitStack()
    with start_blocking_portal() as portal:
        listener = portal.call(metrics_socket, where, opened, say)
        asked = Event()

        def numbers() -> Iterator[Metric]:
            yield from _numbers_of(directory)
            asked.set()

        served = portal.start_task_soon(serve_metrics, listener, numbers, lambda: health_of(directory))
        try:
            yield
        except DiskError:
            if _is_end_of_a_write(directory):
                asked.clear()
                say("a write failed: Prometheus is told before the process ends, in a minute or so")
                if asked.wait(_LAST_WORD):
                    portal.call(anyio.sleep, _ANSWERING)
            raise
        finally:
            served.cancel()
            portal.call(opened.aclose)


def health_of(directory: Path) -> tuple[bool, str]:
    """Tell whether the peer of ``directory`` is well, with its sentence. No peer, or no status, is not well."""
    from decentral.observe.health import as_seen, is_well
    from decentral.observe.status import read_status

    try:
        status = as_seen(read_status(directory), time.time(), time.monotonic())
    except DecentralError as error:
        return False, str(error)
    return is_well(status), status.health


def _is_end_of_a_write(directory: Path) -> bool:
    from decentral.observe.status import read_status

    with suppress(DecentralError):
        return bool(read_status(directory).write_failed)
    return False


def _numbers_of(directory: Path) -> Iterator[Metric]:
    from decentral.observe.health import as_seen
    from decentral.observe.metrics import peer_numbers
    from decentral.observe.status import is_running, read_status

    try:
        status = as_seen(read_status(directory), time.time(), time.monotonic())
    except DecentralError:  # none has been written yet
        return
    yield from peer_numbers(status, alive=is_running(status))
