"""Connections that came in and whose other end has yet to prove who it is: a few at a time, each for a while.

When too many are at it, the one that takes longest is dropped: an honest peer needs three round trips.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

import anyio
import anyio.abc

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
    listener: anyio.abc.SocketListener,
    group: anyio.abc.TaskGroup,
    accept: Callable[[anyio.abc.SocketStream], Coroutine[object, object, None]],
) -> None:
    """Have ``accept`` take each connection: with too many files open, connections wait until some are closed."""
    while True:
        try:
            group.start_soon(accept, await listener.accept())
        except OSError as error:
            logger.warning("connections cannot be accepted now: %s", error)
            await anyio.sleep(_NO_FILES)
