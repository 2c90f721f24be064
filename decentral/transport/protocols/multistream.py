"""Which protocol a connection or a stream speaks: one side proposes by name, the other takes it or says ``na``.

Crosses the wire: each side's ``/multistream/1.0.0`` and the name, about 50 bytes each way and one round trip.

Source: multiformats/multistream-select, README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from decentral.errors import PayloadError, PeerUnreachable
from decentral.transport.protocols.varint import read_varint, varint

_HEADER = "/multistream/1.0.0"
_REFUSED = "na"
_LONGEST = 256  # bytes of a name; ours have fewer than 40
_MOST = 32  # proposals listened to


class Ends(Protocol):
    """What is needed of a connection or a stream."""

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        ...

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``."""
        ...


async def propose(ends: Ends, protocol: str) -> None:
    """Have the other side speak ``protocol``. PeerUnreachable when it does not, PayloadError for nonsense."""
    await ends.send(_line(_HEADER) + _line(protocol))
    header = await _read(ends)
    answer = await _read(ends) if header == _HEADER else header
    if answer == _REFUSED and header == _HEADER:
        raise PeerUnreachable(f"{protocol} is not served there; compare the versions")
    if answer != protocol:
        raise PayloadError(f"multistream: {answer!a} in answer to {protocol}; drop the stream")


async def answer(ends: Ends, known: Container[str]) -> str:
    """The first protocol proposed that is ``known``. PayloadError when none of many is."""
    await ends.send(_line(_HEADER))
    if (header := await _read(ends)) != _HEADER:
        raise PayloadError(f"multistream: begins with {header!a}; drop the stream")
    for _ in range(_MOST):
        protocol = await _read(ends)
        if protocol in known:
            await ends.send(_line(protocol))
            return protocol
        await ends.send(_line(_REFUSED))
    raise PayloadError(f"multistream: {_MOST} proposals and none is served here; drop the stream")


def _line(text: str) -> bytes:
    return varint(len(text) + 1) + text.encode() + b"\n"


async def _read(ends: Ends) -> str:
    prefix = await ends.receive_exactly(1)
    if prefix[-1] >= 0x80:
        prefix += await ends.receive_exactly(1)
    nbytes, _ = read_varint(prefix) if prefix[-1] < 0x80 else (_LONGEST + 1, 0)
    if not 0 < nbytes <= _LONGEST:
        raise PayloadError(f"multistream: a name of {nbytes} bytes or more, at most {_LONGEST} are taken; drop it")
    line = await ends.receive_exactly(nbytes)
    return line.decode("utf-8", errors="replace").removesuffix("\n")
