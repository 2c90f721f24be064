"""What stands on a piece: whose state of which moment it is of, which of the pieces it is, and how long.

Crosses the wire: 51 bytes, the last 16 of them a seal that only the owner can make and check. A keeper reads the rest
to know how much it is asked to keep; the owner believes nothing of it before the seal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from decentral.coding.erasure import WORD
from decentral.errors import PayloadError

SALT_NBYTES = 16
SEAL_NBYTES = 16  # of ChaCha20-Poly1305
CHUNK_NBYTES = 1 << 18  # of a piece at most, without its seal: 0.4 s of a 5 Mbit/s uplink
MOST_PIECES = 32
MOST_STRIPES = 1 << 20  # 256 GiB of a piece
_FIELDS = struct.Struct("<Q16sBBBQ")  # in their order below


@dataclass(frozen=True, slots=True)
class Label:
    """Of one piece. The state is cut into stripes, each stripe into a chunk for every piece."""

    round: int  # outer steps, or gossip steps, that the state has behind it
    salt: bytes  # other for every state that is given, and part of its key
    number: int  # of the piece, from 0
    pieces: int
    needed: int  # pieces that give the state back
    state_nbytes: int
    seal: bytes = bytes(SEAL_NBYTES)

    @classmethod
    def read(cls, data: bytes) -> Label:
        """Raises PayloadError for what no peer would write."""
        if len(data) != LABEL_NBYTES:
            raise PayloadError(f"label of {len(data)} bytes, want {LABEL_NBYTES}; drop it")
        round_, salt, number, pieces, needed, state_nbytes = _FIELDS.unpack_from(data)
        label = cls(round_, salt, number, pieces, needed, state_nbytes, data[_FIELDS.size :])
        if not 1 <= needed <= pieces <= MOST_PIECES or number >= pieces:
            raise PayloadError(f"label of piece {number} of {pieces}, {needed} needed: there is no such piece; drop it")
        if not 0 < state_nbytes <= MOST_STRIPES * CHUNK_NBYTES * needed:
            raise PayloadError(f"label of a state of {state_nbytes} bytes; drop it")
        return label

    @property
    def fields(self) -> bytes:
        """All but the seal."""
        cut = self.number, self.pieces, self.needed
        return _FIELDS.pack(self.round, self.salt, *cut, self.state_nbytes)

    def to_bytes(self) -> bytes:
        """See ``read``."""
        return self.fields + self.seal

    @property
    def of_state(self) -> tuple[int, bytes]:
        """Which state it is of; the higher one is the newer one."""
        return self.round, self.salt

    @property
    def stripes(self) -> int:
        """Chunks of each piece."""
        return -(-self.state_nbytes // (self.needed * CHUNK_NBYTES))

    @property
    def chunk_nbytes(self) -> int:
        """Without its seal: all alike, and no longer than it takes. A piece of many chunks has no small ones."""
        return -(-self.state_nbytes // (self.needed * self.stripes * WORD)) * WORD

    @property
    def stripe_nbytes(self) -> int:
        """Of the state, in one stripe."""
        return self.needed * self.chunk_nbytes

    @property
    def piece_nbytes(self) -> int:
        """Of a whole piece, seals included."""
        return self.stripes * (self.chunk_nbytes + SEAL_NBYTES)

    def __str__(self) -> str:
        return f"piece {self.number + 1} of {self.pieces}, {self.piece_nbytes} bytes, of round {self.round}"


LABEL_NBYTES = _FIELDS.size + SEAL_NBYTES
