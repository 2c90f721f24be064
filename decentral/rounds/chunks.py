"""One chunk from one donor: packed while that gains time, and as it is from donors of before that could be asked for.

Crosses the wire: 37 bytes for a chunk in one of several forms (`state/chunk_form`). A donor that does not serve that is
asked once more, with the 36 bytes of the protocol before it, and only so from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from decentral.errors import PeerUnreachable, TransportError
from decentral.rounds.donor import ANY_FORM, CHUNK, PACKED, STATE
from decentral.state.chunk_form import BY_PLANES, HEAD_NBYTES, PLANES, from_form
from decentral.state.snapshot import SnapshotIndex
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, peer_name

_BOTH_ENDS = 4  # times unpacking


@dataclass(slots=True)
class Gain:
    """Whether a byte less on the way is worth more time than packing takes. Pure: the times come in.

    The way is as fast as answers came over all of it. Unpacking is measured; the quickest counts, as a busy machine
    makes one slow and nothing makes one fast. Packing takes longer, and both take turns from the streams: over
    loopback, where the processor is the limit, plain chunks came at 65 to 68 MB/s, packed ones at 42 to 62.
    """

    began: float  # s
    arrived: int = 0  # bytes
    saved: float = 0.0  # of a byte, by the last chunk that came packed
    unpacking: float = 0.0  # s for a byte

    def came(self, nbytes: int, chunk_nbytes: int, seconds: float, packed: bool) -> None:
        """A chunk came as ``nbytes``, and was made what it is in so many seconds."""
        self.arrived += nbytes
        if packed:
            took = seconds / chunk_nbytes
            self.unpacking = min(self.unpacking, took) if self.saved else took
            self.saved = 1 - nbytes / chunk_nbytes

    def pays(self, now: float) -> bool:
        """Whether to ask for packed chunks; yes while nothing is known of them."""
        return not self.saved or self.saved * (now - self.began) >= _BOTH_ENDS * self.unpacking * self.arrived


class Chunks:
    """Asks for those of one snapshot."""

    def __init__(self, transport: Transport, index: SnapshotIndex, timeout: float) -> None:
        self.transport, self.index, self.timeout = transport, index, timeout
        self.gain = Gain(anyio.current_time())
        self._packs: dict[PeerId, bool] = {}  # who has answered, and whether in any form

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
        forms = BY_PLANES if self.gain.pays(anyio.current_time()) else 0
        ask = ANY_FORM.pack(self.index.digest, number, forms)
        answer = self._there(donor, await self._request(donor, PACKED, ask, nbytes + HEAD_NBYTES))
        began = anyio.current_time()
        chunk = from_form(answer, nbytes)
        took = anyio.current_time() - began
        self.gain.came(len(answer), nbytes, took, packed=answer[0] == PLANES)
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
