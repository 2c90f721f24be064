"""The daemon's control protocol: one short connection to its unix socket per request, always closed, never hung.

Only this process speaks it, over a socket in a private folder. hivemind's own client leaves a failed request's
connection open and waits without end for a dead daemon; a peer that is away for a day would cost thousands.

Source: go-libp2p-daemon's specs/CONTROL.md; messages as in hivemind's p2pd.proto.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.transport.base import UNREAD, Traffic
from decentral.transport.daemon.process import package_folder
from decentral.transport.protocols.messages import (
    LONGEST_VARINT,
    convert_known,
    multiaddr_to_bytes,
    multiaddr_to_text,
    peer_from_id,
    peer_to_id,
    read_varint,
    varint,
)
from decentral.wire.keys import PeerId, peer_name

READ_LIMIT = 1 << 16  # bytes; asyncio stops reading a socket at twice this, which bounds a stream's memory
_MESSAGE_LIMIT = 1 << 22  # bytes of a daemon's answer
_UNIX = 400  # multiaddr code of a unix socket's path
_LONGEST_REASON = 300  # characters of the daemon's words in a message

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Control:
    """Requests to the daemon behind ``socket``; each raises TransportError after ``timeout`` seconds."""

    def __init__(self, socket: str, timeout: float) -> None:
        self.socket, self._timeout = socket, timeout

    async def identify(self) -> tuple[PeerId, list[str]]:
        """Ask who the daemon is, and for all its addresses."""
        response = await self._ask("IDENTIFY")
        return peer_from_id(response.identify.id), convert_known(multiaddr_to_text, response.identify.addrs)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer. PeerUnreachable when no address answers."""
        body = {
            "peer": peer_to_id(peer),
            "addrs": convert_known(multiaddr_to_bytes, addresses),
            "timeout": self._whole_seconds,
        }
        await self._ask("CONNECT", peer, connect=body)

    async def open(self, peer: PeerId, protocol: str) -> Ends:
        """Open a stream to a peer; its ends are the caller's to close. PeerUnreachable when there is none."""
        body = {"peer": peer_to_id(peer), "proto": [protocol], "timeout": self._whole_seconds}
        _, ends = await self._request("STREAM_OPEN", peer, streamOpen=body)
        return ends

    async def connections(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the daemon's connections to peers of this kind."""
        found: dict[PeerId, tuple[str, ...]] = {}
        for info in (await self._ask("LIST_PEERS")).peers:
            for peer in convert_known(peer_from_id, [info.id]):
                found[peer] = (*found.get(peer, ()), *convert_known(multiaddr_to_text, info.addrs))
        return found

    async def handle(self, protocol: str, socket: str) -> None:
        """Have the daemon bring inbound streams of ``protocol`` to the unix socket at ``socket``."""
        address = varint(_UNIX) + varint(len(socket)) + socket.encode()
        body = {"addr": address, "proto": [protocol], "balanced": False}
        await self._ask("STREAM_HANDLER", streamHandler=body)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep a persistent connection: the daemon ends by itself when its last one closes, as the DHT's may."""
        _, (_, writer) = await self._request("PERSISTENT_CONN_UPGRADE")
        try:
            yield
        finally:
            drop(writer)

    @property
    def _whole_seconds(self) -> int:
        return max(1, int(self._timeout))

    async def _ask(self, kind: str, peer: PeerId | None = None, **fields: dict[str, Any]) -> Any:
        """Make a request whose connection is of no further use. Any: a generated protobuf class."""
        response, (_, writer) = await self._request(kind, peer, **fields)
        drop(writer)
        return response

    async def _request(
        self, kind: str, peer: PeerId | None = None, **fields: dict[str, Any]
    ) -> tuple[Any, Ends]:  # Any: a generated protobuf class
        messages = _messages()
        body = messages.Request(type=messages.Request.Type.Value(kind), **fields).SerializeToString()
        writer, done = None, False
        try:
            with anyio.fail_after(self._timeout):
                reader, writer = await asyncio.open_unix_connection(self.socket, limit=READ_LIMIT)
                writer.write(varint(len(body)) + body)
                response = messages.Response.FromString(await _read_delimited(reader))
            if response.type == messages.Response.ERROR:
                raise _refusal(kind, peer, response.error.msg)
            done = True
            return response, (reader, writer)
        except TimeoutError:
            raise _refusal(kind, peer, f"no answer within {self._timeout:g} s") from None
        except (OSError, EOFError) as error:
            raise _refusal(kind, peer, f"the daemon does not answer ({error})") from None
        finally:
            if writer is not None and not done:
                drop(writer)


def drop(writer: asyncio.StreamWriter) -> None:
    """Close at once; what was not sent is lost. Whatever state the connection is in."""
    with contextlib.suppress(AttributeError):  # Python 3.11's abort() when the last bytes left after close()
        writer.transport.abort()


async def read_stream_info(reader: asyncio.StreamReader) -> tuple[PeerId, str]:
    """Read who is at the other end of an inbound stream, proven by the handshake, and its protocol."""
    info = _messages().StreamInfo.FromString(await _read_delimited(reader))
    return peer_from_id(info.peer), info.proto


def _refusal(kind: str, peer: PeerId | None, reason: str) -> TransportError:
    words = " ".join(reason.split())[:_LONGEST_REASON]
    if peer is None:
        return TransportError(f"{kind.lower()}: {words}")
    return PeerUnreachable(f"{peer_name(peer)}: no path to it now: {words}; try again or ask another peer")


async def _read_delimited(reader: asyncio.StreamReader) -> bytes:
    prefix = b""
    while not prefix or prefix[-1] >= 0x80:
        prefix += await reader.readexactly(1)
        if len(prefix) > LONGEST_VARINT:
            break
    nbytes, _ = read_varint(prefix)
    if nbytes > _MESSAGE_LIMIT:
        raise PayloadError(f"the daemon announces a message of {nbytes} bytes, at most {_MESSAGE_LIMIT} are taken")
    return await reader.readexactly(nbytes)


@functools.cache
def _messages() -> Any:  # Any: generated protobuf classes
    """Return hivemind's generated messages, without the rest of hivemind: that import takes over a second and torch."""
    path = package_folder() / "proto" / "p2pd_pb2.py"
    spec = importlib.util.spec_from_file_location("decentral_p2pd_pb2", path)
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- raw streams through the daemon ----
#
# A unix socket whose other end the daemon joins to a libp2p stream.
#
# Measured on loopback: 960 MB/s at 256 KiB a write, and ``send`` waits once about 1 MiB is unread. A stream holds at
# most 128 KiB read and 64 KiB unwritten in this process.
#
# The daemon reads a stream while it writes it, and when closing it for one it takes the end of the other for a fault
# and resets both (go-libp2p-daemon, stream.go, doStreamPipe). Of 1,500 bodies of 200 kB whose sender closed first, 4
# so lost their last bytes. Whoever opened a stream therefore closes it only when the other side, too, has said
# something or is gone; ``aclose`` leaves that wait to the transport.

_PIECE = 1 << 18  # bytes; measured best of 64 KiB, 256 KiB and 1 MiB
_LINGER = 10.0  # s that bytes sent may take to leave after aclose; then the other side is not reading


Later = Callable[[Callable[[], Awaitable[None]]], None]


class DaemonStream:
    """A stream through the daemon.

    ``later`` runs what is left to do after ``aclose``; None for a stream that the other side opened.
    """

    def __init__(
        self,
        peer: PeerId,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: Traffic,
        later: Later | None = None,
    ) -> None:
        self.peer = peer
        self._reader, self._writer, self._traffic = reader, writer, traffic
        self._later = later
        self._spoke_last = False

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        view = memoryview(data).cast("B")
        self._spoke_last = False  # what is sent by half is not waited for
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            try:
                self._writer.write(piece)
                await self._writer.drain()
            except (OSError, RuntimeError) as error:  # RuntimeError: closed here, perhaps by another task
                raise StreamClosed(
                    f"{peer_name(self.peer)}: {start} of {len(view)} bytes were taken before it ended the stream"
                ) from error
            self._traffic.add(self.peer, sent=len(piece))
        self._spoke_last = True

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
        pieces, missing = [], nbytes
        while missing:
            piece = await self._receive_some(missing)
            self._spoke_last = False
            if not piece:
                raise StreamClosed(
                    f"{peer_name(self.peer)}: {nbytes - missing} of {nbytes} bytes came before it ended the stream"
                )
            self._traffic.add(self.peer, received=len(piece))
            if on_bytes is not None:
                on_bytes(len(piece))
            missing -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        """Close; what was sent still arrives."""
        if not self._spoke_last or self._later is None:
            await self._close()
            return
        self._spoke_last = False  # closing twice is no error
        try:
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._later(self._close_when_heard)
        except RuntimeError:  # the transport has been left
            drop(self._writer)
        except BaseException:  # cancelled: nobody wants it to arrive any more
            drop(self._writer)
            raise

    async def _close_when_heard(self) -> None:
        closed = False
        try:
            with anyio.move_on_after(UNREAD), suppress(RuntimeError):  # another task reads it, and sees the end
                await self._receive_some(1)
            await self._close()
            closed = True
        finally:
            if not closed:
                drop(self._writer)

    async def _close(self) -> None:
        closed = False
        try:
            self._writer.close()
            with anyio.move_on_after(_LINGER):
                await self._writer.wait_closed()
                closed = True
        except OSError:
            closed = True
        finally:
            if not closed:
                drop(self._writer)

    async def _receive_some(self, most: int) -> bytes:
        try:
            return await self._reader.read(min(most, _PIECE))
        except OSError:
            return b""  # reset: the same to us as an early end
