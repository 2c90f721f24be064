"""Numbers of a running process in Prometheus' text format, over HTTP, for who scrapes ``http://HOST:PORT/metrics``.

One request per connection, one answer, closed. Whoever reaches the port can read the numbers and nothing else, and can
cost us no more than a few connections of a few seconds: so it is meant for localhost.

Source: prometheus.io, "Exposition formats", text format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import anyio
import anyio.abc

_LONGEST = 8192  # bytes of a request's head
_PATIENCE = 5.0  # s for all of it
_AT_ONCE = 16  # connections; a scraper needs one
_KIND = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One name; ``values`` by the value of ``label``, or under ``""`` when there is no label."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    values: Mapping[str, float]
    label: str = ""


def exposition(metrics: Iterable[Metric]) -> str:
    """All of them as text."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for value, number in metric.values.items():
            labels = f'{{{metric.label}="{value}"}}' if metric.label else ""
            lines.append(f"{metric.name}{labels} {_number(number)}")
    return "\n".join(lines) + "\n"


async def serve_metrics(listener: anyio.abc.Listener[anyio.abc.SocketStream], read: Callable[[], str]) -> None:
    """Answer until cancelled; ``read`` gives the text of the moment."""
    room = anyio.CapacityLimiter(_AT_ONCE)

    async def attend(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if room.borrowed_tokens >= _AT_ONCE:
                return
            async with room:
                with anyio.move_on_after(_PATIENCE):
                    await _answer(stream, read)

    await listener.serve(attend)


async def _answer(stream: anyio.abc.SocketStream, read: Callable[[], str]) -> None:
    try:
        request = await _head(stream)
        method, _, rest = request.partition(b" ")
        if method in (b"GET", b"HEAD") and rest.partition(b" ")[0] in (b"/metrics", b"/"):
            await stream.send(_response("200 OK", read(), head_only=method == b"HEAD"))
        else:
            await stream.send(_response("404 Not Found", "the numbers are at /metrics\n"))
        await stream.send_eof()
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        return


async def _head(stream: anyio.abc.SocketStream) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request and len(request) < _LONGEST:
        request += await stream.receive(_LONGEST)
    return request


def _response(status: str, text: str, *, head_only: bool = False) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_KIND}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + (b"" if head_only else body)


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(float(number))
