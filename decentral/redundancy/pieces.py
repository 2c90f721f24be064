"""Pieces of a state, any K of which give it back: cut, labelled, and sealed so that only their owner reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from numpy.typing import NDArray

from decentral.errors import PayloadError
from decentral.tensors.compiled import compiled
from decentral.wire.keys import Digest, Signer

# Shape suffixes: K = rows, W = bytes of a row, n = pieces, w = words of eight bytes of a row.

# ---- Reed-Solomon ----
#
# K rows of bytes become n pieces, of which any K give the rows back.
#
# Systematic: the first K pieces are the rows themselves, so only what stands for lost ones costs arithmetic. The
# others are sums over GF(2**8) with the coefficients of a Cauchy matrix, every square part of which can be inverted.
#
# Our own, as no library fits: zfec is GPL, pyeclib has wheels for Linux alone, galois multiplies 31 MB/s where this
# does eight bytes in one word. Source: Bloemer et al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995.

Rows = NDArray[np.uint8]

FIELD_SIZE = 256  # elements; no more pieces can be told apart
WORD = 8  # bytes: rows are a multiple of it
_POLYNOMIAL = 0x11D  # x**8 + x**4 + x**3 + x**2 + 1, under which 2 generates the field


def pieces_of(row_KW: Rows, count: int) -> Rows:
    """Return ``count`` pieces of these rows: (count, W), the rows first."""
    needed, nbytes = row_KW.shape
    assert 1 <= needed <= count <= FIELD_SIZE, f"{needed} of {count} pieces"
    assert nbytes % WORD == 0, f"rows of {nbytes} bytes"
    piece_nW = np.zeros((count, nbytes), np.uint8)
    piece_nW[:needed] = row_KW
    _add_products(piece_nW[needed:], [_coefficients(number, needed) for number in range(needed, count)], row_KW)
    return piece_nW


def join_pieces(piece_W: Mapping[int, Rows], needed: int) -> Rows:
    """Return the rows of any ``needed`` pieces, by their numbers: (needed, W). More pieces are not looked at."""
    numbers = sorted(piece_W)[:needed]
    assert len(numbers) == needed, f"{len(piece_W)} of {needed} pieces"
    given_KW = np.stack([piece_W[number] for number in numbers])
    inverse = _inverse([_coefficients(number, needed) for number in numbers])
    row_KW = np.zeros_like(given_KW)
    _add_products(row_KW, inverse, given_KW)
    return row_KW


def _coefficients(number: int, needed: int) -> list[int]:
    """Return what piece ``number`` takes of each row."""
    if number < needed:
        return [int(row == number) for row in range(needed)]
    return [_EXPONENTIALS[(255 - _LOGARITHMS[number ^ row]) % 255] for row in range(needed)]


def _add_products(into_nW: Rows, factors: Sequence[Sequence[int]], row_KW: Rows) -> None:
    for into_W, own in zip(into_nW, factors, strict=True):
        for row_W, factor in zip(row_KW, own, strict=True):
            if factor:
                _add_product(into_W.view(np.uint64), row_W.view(np.uint64), factor)


@compiled
def _add_product(into_w: NDArray[np.uint64], row_w: NDArray[np.uint64], factor: int) -> None:
    """Add ``factor`` times a row, eight bytes at once: doubling is a shift, and the polynomial where a bit fell out.

    Every bit of ``factor`` is a mask, so that no lap branches and several words go at once.
    """
    for at in range(into_w.size):
        doubled, total = row_w[at], np.uint64(0)
        for bit in range(8):
            total ^= doubled & np.uint64(-((factor >> bit) & 1))
            fell_out = (doubled >> np.uint64(7)) & np.uint64(0x0101010101010101)
            doubled = ((doubled & np.uint64(0x7F7F7F7F7F7F7F7F)) << np.uint64(1)) ^ (fell_out * np.uint64(0x1D))
        into_w[at] ^= total


def _product(a: int, b: int) -> int:
    return _EXPONENTIALS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % 255] if a and b else 0


def _inverse(matrix: list[list[int]]) -> list[list[int]]:
    """Invert by elimination; such a matrix always has an inverse."""
    size = len(matrix)
    rows = [[*row, *(int(other == number) for other in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(number for number in range(column, size) if rows[number][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = _EXPONENTIALS[(255 - _LOGARITHMS[rows[column][column]]) % 255]
        rows[column] = [_product(scale, value) for value in rows[column]]
        for number in range(size):
            factor = rows[number][column]
            if number != column and factor:
                pairs = zip(rows[number], rows[column], strict=True)
                rows[number] = [value ^ _product(factor, other) for value, other in pairs]
    return [row[size:] for row in rows]


def _tables() -> tuple[list[int], list[int]]:
    """Return the powers of 2, and the power that each value is."""
    powers, value = list[int](), 1
    for _ in range(255):
        powers.append(value)
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return powers, [0, *(powers.index(one) for one in range(1, 256))]


_EXPONENTIALS, _LOGARITHMS = _tables()

# Labels that say what a kept piece is and whose, and the sealing by which only its owner can read and make it.

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
