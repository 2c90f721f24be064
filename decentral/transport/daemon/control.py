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
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from decentral.errors import PayloadError, PeerUnreachable, TransportError
from decentral.transport.daemon.process import package_folder
from decentral.transport.multiaddr import to_bytes, to_text
from decentral.transport.protocols.messages import LONGEST_VARINT, peer_from_id, peer_to_id, read_varint, varint
from decentral.wire.keys import PeerId, peer_name

READ_LIMIT = 1 << 16  # bytes; asyncio stops reading a socket at twice this, which bounds a stream's memory
_MESSAGE_LIMIT = 1 << 22  # bytes of a daemon's answer
_UNIX = 400  # multiaddr code of a unix socket's path
_LONGEST_REASON = 300  # characters of the daemon's words in a message

T = TypeVar("T")
U = TypeVar("U")
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Control:
    """Requests to the daemon behind ``socket``; each raises TransportError after ``timeout`` seconds."""

    def __init__(self, socket: str, timeout: float) -> None:
        self.socket, self._timeout = socket, timeout

    async def identify(self) -> tuple[PeerId, list[str]]:
        """Who the daemon is, and all its addresses."""
        response = await self._ask("IDENTIFY")
        return peer_from_id(response.identify.id), _known(to_text, response.identify.addrs)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial a peer. PeerUnreachable when no address answers."""
        body = {"peer": peer_to_id(peer), "addrs": _known(to_bytes, addresses), "timeout": self._whole_seconds}
        await self._ask("CONNECT", peer, connect=body)

    async def open(self, peer: PeerId, protocol: str) -> Ends:
        """A stream to a peer; its ends are the caller's to close. PeerUnreachable when there is none."""
        body = {"peer": peer_to_id(peer), "proto": [protocol], "timeout": self._whole_seconds}
        _, ends = await self._request("STREAM_OPEN", peer, streamOpen=body)
        return ends

    async def connections(self) -> dict[PeerId, tuple[str, ...]]:
        """The other ends of the daemon's connections to peers of this kind."""
        found: dict[PeerId, tuple[str, ...]] = {}
        for info in (await self._ask("LIST_PEERS")).peers:
            for peer in _known(peer_from_id, [info.id]):
                found[peer] = (*found.get(peer, ()), *_known(to_text, info.addrs))
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
        """A request whose connection is of no further use. Any: a generated protobuf class."""
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
    """Who is at the other end of an inbound stream, proven by the handshake, and its protocol."""
    info = _messages().StreamInfo.FromString(await _read_delimited(reader))
    return peer_from_id(info.peer), info.proto


def _known(convert: Callable[[T], U], addresses: Iterable[T]) -> list[U]:
    """The addresses that can be converted; strangers may have had a hand in any of them."""
    known = []
    for address in addresses:
        try:
            known.append(convert(address))
        except PayloadError:
            continue
    return known


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
    """hivemind's generated messages, without the rest of hivemind: that import takes over a second and torch."""
    path = package_folder() / "proto" / "p2pd_pb2.py"
    spec = importlib.util.spec_from_file_location("decentral_p2pd_pb2", path)
    assert spec is not None, "a .py file always has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
