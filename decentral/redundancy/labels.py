"""Labels that say what a kept piece is and whose, and the sealing by which only its owner can read and make it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.errors import PayloadError
from decentral.redundancy.erasure import WORD, join_pieces, pieces_of
from decentral.wire.keys import Digest, Signer

# ---- labels of pieces ----
#
# A label says whose state of which moment a piece is of, which of the pieces it is, and how long.
#
# Crosses the wire: 51 bytes, the last 16 of them a seal that only the owner can make and check. A keeper reads the rest
# to know how much it is asked to keep; the owner believes nothing of it before the seal.

SALT_NBYTES = 16
SEAL_NBYTES = 16  # of ChaCha20-Poly1305
CHUNK_NBYTES = 1 << 18  # of a piece at most, without its seal: 0.4 s of a 5 Mbit/s uplink
MOST_PIECES = 32
MOST_STRIPES = 1 << 20  # 256 GiB of a piece
_FIELDS = struct.Struct("<Q16sBBBQ")  # in their order below


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a piece. The state is cut into stripes, each stripe into a chunk for every piece."""

    round: int  # outer steps, or gossip steps, that the state has behind it
    salt: bytes  # other for every state that is given, and part of its key
    number: int  # of the piece, from 0
    pieces: int
    needed: int  # pieces that give the state back
    state_nbytes: int
    seal: bytes = bytes(SEAL_NBYTES)

    @classmethod
    def read(cls, data: bytes) -> Label:
        """Read a label; PayloadError for what no peer would write."""
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
        """Return all but the seal."""
        cut = self.number, self.pieces, self.needed
        return _FIELDS.pack(self.round, self.salt, *cut, self.state_nbytes)

    def to_bytes(self) -> bytes:
        """Write what ``read`` takes."""
        return self.fields + self.seal

    @property
    def of_state(self) -> tuple[int, bytes]:
        """Return which state it is of; the higher one is the newer one."""
        return self.round, self.salt

    @property
    def stripes(self) -> int:
        """Return the number of chunks of each piece."""
        return -(-self.state_nbytes // (self.needed * CHUNK_NBYTES))

    @property
    def chunk_nbytes(self) -> int:
        """Return the bytes of a chunk without its seal: alike for all, and no more than it takes, so that none is
        small.
        """
        return -(-self.state_nbytes // (self.needed * self.stripes * WORD)) * WORD

    @property
    def stripe_nbytes(self) -> int:
        """Return the bytes of the state in one stripe."""
        return self.needed * self.chunk_nbytes

    @property
    def piece_nbytes(self) -> int:
        """Return the bytes of a whole piece, seals included."""
        return self.stripes * (self.chunk_nbytes + SEAL_NBYTES)

    def __str__(self) -> str:
        return f"piece {self.number + 1} of {self.pieces}, {self.piece_nbytes} bytes, of round {self.round}"


LABEL_NBYTES = _FIELDS.size + SEAL_NBYTES

# ---- sealing with ChaCha20-Poly1305 ----
#
# Only their owner can read the pieces, and nobody can alter, mix or pass them off as others.
#
# The key is made of the owner's own, the run, and a salt that is drawn for every state, so that a nonce (number of the
# piece, number of the stripe) is used once. The label is part of what is sealed: a chunk of another piece, of another
# place or of an older state does not open.
#
# Source: Nir and Langley, "ChaCha20 and Poly1305 for IETF Protocols", RFC 8439.

_PURPOSE = b"decentral redundancy 1 "
_NONCE = struct.Struct("<IQ")  # piece, stripe
_OF_THE_LABEL = 2**64 - 1  # where a stripe's number stands for chunks


class Seals:
    """The seals of one owner in one run."""

    def __init__(self, signer: Signer, run: Digest) -> None:
        self._signer, self._run = signer, run
        self._cipher = lru_cache(maxsize=4)(self._new_cipher)

    def label(self, plan: Label, number: int) -> Label:
        """Return the label of piece ``number``, sealed."""
        made = replace(plan, number=number)
        cipher = self._cipher(plan.salt)
        return replace(made, seal=cipher.encrypt(_NONCE.pack(number, _OF_THE_LABEL), b"", made.fields))

    def is_ours(self, label: Label) -> bool:
        """Tell whether this peer wrote a label, in this run."""
        try:
            nonce = _NONCE.pack(label.number, _OF_THE_LABEL)
            self._cipher(label.salt).decrypt(nonce, label.seal, label.fields)
        except InvalidTag:
            return False
        return True

    def chunks(self, plan: Label, stripe: int, state: memoryview) -> list[bytes]:
        """Return the chunks of a stripe, one for every piece; ``state`` is the whole."""
        row_B = np.zeros(plan.stripe_nbytes, np.uint8)  # what it is short of at the end is zeros
        part = state[stripe * plan.stripe_nbytes : (stripe + 1) * plan.stripe_nbytes]
        row_B[: len(part)] = np.frombuffer(part, np.uint8)
        piece_nW = pieces_of(row_B.reshape(plan.needed, plan.chunk_nbytes), plan.pieces)
        cipher, sealed = self._cipher(plan.salt), []
        for number, piece_W in enumerate(piece_nW):
            bound = replace(plan, number=number).fields
            sealed.append(cipher.encrypt(_NONCE.pack(number, stripe), piece_W.data, bound))
        return sealed

    def open_chunk(self, label: Label, stripe: int, chunk: bytes) -> bytes:
        """Return a chunk as it was. Raises PayloadError for anything else than the very one."""
        try:
            return self._cipher(label.salt).decrypt(_NONCE.pack(label.number, stripe), chunk, label.fields)
        except InvalidTag:
            raise PayloadError(f"chunk {stripe} of {label}: not what was given to keep; ask another") from None

    def stripe(self, plan: Label, opened: Mapping[int, bytes]) -> memoryview:
        """Return a stripe of the state from ``needed`` opened chunks, by the numbers of their pieces."""
        rows = {number: np.frombuffer(chunk, np.uint8) for number, chunk in opened.items()}
        return join_pieces(rows, plan.needed).reshape(-1).data

    def _new_cipher(self, salt: bytes) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(self._signer.secret_for(_PURPOSE + self._run, salt))
