"""A piece of a frame, for one who passes it on to the others or puts the frame together.

Crosses the wire, little-endian: the frame's header of ``HEADER_NBYTES``, which is signed and names the body's hash; u64
bytes of the whole frame; u64 where the piece begins in it; u8, 1 when it is to be passed on; the bytes. The header
comes with each piece, so that nothing is kept for a frame that belongs to nothing here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Header, parse_header

_FIELDS = struct.Struct("<QQB")
PIECE_HEAD_NBYTES = HEADER_NBYTES + _FIELDS.size


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, start + len(data)) of a frame of ``nbytes``."""

    head: bytes  # the frame's header, as it is signed
    nbytes: int
    start: int
    pass_on: bool
    data: bytes

    @property
    def header(self) -> Header:
        """The header's fields; its signature is not checked by this."""
        return parse_header(self.head)

    def to_bytes(self) -> bytes:
        """The piece as it crosses the wire."""
        return b"".join((self.head, _FIELDS.pack(self.nbytes, self.start, self.pass_on), self.data))


def read_piece(data: bytes) -> Piece:
    """Read one; the header's signature is still to be checked. Raises PayloadError."""
    if len(data) <= PIECE_HEAD_NBYTES:
        raise PayloadError(f"piece of {len(data)} bytes, its head alone takes {PIECE_HEAD_NBYTES}; drop it")
    nbytes, start, pass_on = _FIELDS.unpack_from(data, HEADER_NBYTES)
    piece = Piece(data[:HEADER_NBYTES], nbytes, start, pass_on == 1, data[PIECE_HEAD_NBYTES:])
    if pass_on > 1:
        raise PayloadError(f"piece: flag byte {pass_on}, want 0 or 1; drop it")
    if start + len(piece.data) > nbytes:
        raise PayloadError(f"piece: it ends at {start + len(piece.data)} of a frame of {nbytes} bytes; drop it")
    parse_header(piece.head)
    return piece
