"""Numbers of a running process for Prometheus, over HTTP: a scraper asks ``http://HOST:PORT/metrics``.

``/healthz`` says in one line how it is, with 200 while that is well and 503 else, for what restarts or alarms.

One request per connection, one answer, closed. Whoever reaches the port can read the numbers and nothing else, and can
cost us no more than a few connections of a few seconds: so it is meant for localhost. That is why the server is ours:
prometheus_client's has a thread for each connection and waits for its request without end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import anyio
import anyio.abc
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_LONGEST = 8192  # bytes of a request's head
_PATIENCE = 5.0  # s for all of it
_AT_ONCE = 16  # connections; a scraper needs one

Read = Callable[[], Iterable[Metric]]
Health = Callable[[], tuple[bool, str]]  # whether it is well, and a line for people


class _Now(Collector):
    """The numbers of the moment, read when they are asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._read()


def exposition(read: Read) -> bytes:
    """All of them in Prometheus' text format."""
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
                with anyio.move_on_after(_PATIENCE):
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
    while b"\r\n\r\n" not in request and len(request) < _LONGEST:
        request += await stream.receive(_LONGEST)
    return request


def _response(status: str, body: bytes, *, head_only: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)
