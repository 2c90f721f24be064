"""One chunk from one donor: packed while that gains time, and as it is from donors of before that could be asked for.

Crosses the wire: 37 bytes for a chunk in one of several forms (`state/chunk_form`). A donor that does not serve that is
asked once more, with the 36 bytes of the protocol before it, and only so from then on.
"""

from __future__ import annotations

import anyio

from decentral.errors import PeerUnreachable, TransportError
from decentral.rounds.catchup.donor import ANY_FORM, CHUNK, PACKED, STATE
from decentral.rounds.catchup.gain import Gain
from decentral.state.chunk_form import BY_PLANES, HEAD_NBYTES, PLANES, from_form
from decentral.state.snapshot import SnapshotIndex
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, peer_name


class Chunks:
    """Asks for those of one snapshot."""

    def __init__(self, transport: Transport, index: SnapshotIndex, timeout: float) -> None:
        self.transport, self.index, self.timeout = transport, index, timeout
        self.gain = Gain()
        self._packs: dict[PeerId, bool] = {}  # peers that have answered, and whether in any form

    async def ask(self, donor: PeerId, number: int) -> bytes:
        """The plain bytes. Raises TransportError, also when it has that snapshot no more, or PayloadError."""
        if self._packs.get(donor, True):
            try:
                chunk = await self._in_a_form(donor, number)
                self._packs[donor] = True
                return chunk
            except PeerUnreachable:
                if donor in self._packs:
                    raise
        chunk = await self._as_it_is(donor, number)
        self._packs[donor] = False
        return chunk

    async def _in_a_form(self, donor: PeerId, number: int) -> bytes:
        nbytes = self.index.layout.chunk_nbytes(number)
        packed = self.gain.packed
        ask = ANY_FORM.pack(self.index.digest, number, BY_PLANES if packed else 0)
        answer = self._there(donor, await self._request(donor, PACKED, ask, nbytes + HEAD_NBYTES))
        chunk = self._plain(answer, nbytes)
        self.gain.came(nbytes, anyio.current_time(), packed=packed)
        return chunk

    def _plain(self, answer: bytes, nbytes: int) -> bytes:
        began = anyio.current_time()
        chunk = from_form(answer, nbytes)
        if answer[0] == PLANES:
            self.gain.unpacked(len(answer), nbytes, anyio.current_time() - began)
        return chunk

    async def _as_it_is(self, donor: PeerId, number: int) -> bytes:
        ask = CHUNK.pack(self.index.digest, number)
        return self._there(donor, await self._request(donor, STATE, ask, self.index.layout.chunk_nbytes(number)))

    async def _request(self, donor: PeerId, protocol: str, ask: bytes, limit: int) -> bytes:
        return await request(self.transport, donor, protocol, ask, limit=limit, timeout=self.timeout)

    def _there(self, donor: PeerId, answer: bytes) -> bytes:
        if not answer:
            raise TransportError(f"{peer_name(donor)}: it does not have that snapshot any more; ask another")
        return answer
