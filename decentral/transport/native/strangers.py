"""Connections that came in and whose other end has yet to prove who it is: a few at a time, each for a while.

When too many are at it, the one that takes longest is dropped: an honest peer needs three round trips.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import anyio
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup

from decentral.transport.native.secured import close_now

_MOST = 64  # connections in their handshake
_NO_FILES = 0.2  # s until connections are accepted again

logger = logging.getLogger("decentral.transport")


class Strangers:
    """Those of one transport; each has ``timeout`` s."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._scopes: dict[anyio.CancelScope, None] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Let one shake hands. What is in here is cut short when time is up, or when it has to make room."""
        scope = anyio.CancelScope(deadline=anyio.current_time() + self._timeout)
        self._scopes[scope] = None
        if len(self._scopes) > _MOST:
            oldest = next(iter(self._scopes))
            del self._scopes[oldest]  # now: it takes a moment to end, and must not be chosen for the next one, too
            oldest.cancel()
        try:
            with scope:
                yield
        finally:
            self._scopes.pop(scope, None)

    def dismiss(self) -> None:
        """Drop all of them."""
        for scope in tuple(self._scopes):
            scope.cancel()


async def accept_for_ever(
    listener: SocketListener,
    group: TaskGroup,
    accept: Callable[[SocketStream], Coroutine[object, object, None]],
) -> None:
    """Have ``accept`` take each connection: with too many files open, connections wait until some are closed.

    ``accept`` closes what it was given. A task that is cancelled before its first step gives it nothing, so until then
    connections are closed here.
    """
    handed: set[SocketStream] = set()

    async def take(stream: SocketStream) -> None:
        handed.discard(stream)
        await accept(stream)

    try:
        while True:
            try:
                stream = await _accepted(listener.extra(SocketAttribute.raw_socket))
            except OSError as error:
                logger.warning("connections cannot be accepted now: %s", error)
                await anyio.sleep(_NO_FILES)
                continue
            handed.add(stream)
            group.start_soon(take, stream)
    finally:
        for stream in handed:
            await close_now(stream)


async def _accepted(listening: socket.socket) -> SocketStream:
    """The next connection. asyncio's own ``sock_accept`` drops the one that it has just taken when it is cancelled."""
    while True:
        await anyio.wait_readable(listening)
        try:
            made, _ = listening.accept()
        except BlockingIOError:  # it was reset before it could be taken
            continue
        try:
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return await SocketStream.from_socket(made)
        except (OSError, ValueError):  # it is gone already: macOS says so here
            made.close()
        except BaseException:
            made.close()
            raise
