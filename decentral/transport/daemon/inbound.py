"""The streams that others open: the daemon brings each to a unix socket of this process, which serves its protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from decentral.errors import DecentralError, TransportError
from decentral.flow.upload import Budget
from decentral.transport.base import Handler, Services, Traffic, attend
from decentral.transport.daemon.control import READ_LIMIT, Control, Ends, drop, read_stream_info
from decentral.transport.daemon.stream import DaemonStream

_WAITING = 1024  # streams that the daemon has brought and that are not looked at yet

logger = logging.getLogger("decentral.transport")


class Inbound:
    """Those of one transport. ``timeout`` (s) is what the daemon has to say whose a stream is."""

    def __init__(self, services: Services, budget: Budget, traffic: Traffic, timeout: float) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that handlers run in; None: streams are dropped
        self._services, self._budget, self._traffic, self._timeout = services, budget, traffic, timeout
        self._writers: set[asyncio.StreamWriter] = set()
        self._socket = ""

    @asynccontextmanager
    async def served(self, socket: str) -> AsyncIterator[None]:
        """Take streams at this unix socket. To be left after the daemon has ended: asyncio leaks a connection that is
        being accepted meanwhile.
        """
        self._socket = socket
        server = await asyncio.start_unix_server(self._came, socket, limit=READ_LIMIT, backlog=_WAITING)
        try:
            yield
        finally:
            server.close()

    async def offer(self, control: Control) -> None:
        """Have a daemon bring the streams of all protocols here."""
        for protocol in self._services.handlers:
            await control.handle(protocol, self._socket)

    def end(self) -> None:
        """Drop every inbound stream: a handler cancelled before its first step would close nothing."""
        self.group = None
        for writer in tuple(self._writers):
            drop(writer)

    def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.group is None:
            drop(writer)
            return
        self._writers.add(writer)
        self.group.start_soon(self._attend, reader, writer)

    async def _attend(self, *ends: *Ends) -> None:
        reader, writer = ends
        stream = None
        try:
            with anyio.fail_after(self._timeout):
                peer, protocol = await read_stream_info(reader)
            handler = self._handler(protocol)
            with self._budget.inbound(peer):
                stream = DaemonStream(peer, reader, writer, self._traffic)
                await attend(stream, protocol, handler)
        except (DecentralError, OSError, EOFError) as error:
            logger.debug("inbound stream refused: %s", error)
        finally:
            if stream is None:
                drop(writer)
            self._writers.discard(writer)

    def _handler(self, protocol: str) -> Handler:
        if protocol not in self._services.handlers:
            raise TransportError(f"{protocol}: not served here")
        return self._services.handlers[protocol]
