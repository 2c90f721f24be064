"""Frames that come in pieces, from their owner and from those who pass them on, until they are whole.

Nothing is allocated for a header that is not signed by a member or for more bytes than the schema allows; each sender
has one frame of a round in pieces here, and each of its bytes is taken once. A piece may be forged by who passes it on:
then the whole has not the hash that its header names, is dropped, and the frame is fetched in one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Header, signed_header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece

MaxNbytes = Callable[[Header], int]  # of a body; raises PayloadError for a header that belongs to nothing here


@dataclass(slots=True)
class _Frame:
    """One frame in pieces; no bytes are kept once it was whole."""

    head: bytes
    data: bytearray
    missing: int  # bytes
    begun: set[int] = field(default_factory=set)  # where pieces begin that are here


class Puzzle:
    """The frames in pieces of the rounds in progress."""

    def __init__(self, max_nbytes: MaxNbytes) -> None:
        self._max_nbytes = max_nbytes
        self._frames: dict[tuple[int, PeerId], _Frame] = {}  # (round, sender)

    def add(self, piece: Piece) -> tuple[bool, bytes | None]:
        """Whether the piece is new, and the frame when that makes it whole. Raises PayloadError."""
        header = piece.header
        frame = self._frames.get((header.round, header.sender))
        if frame is None:
            frame = self._begin(piece)
        if frame.head != piece.head:
            raise PayloadError("piece of a second frame of one sender in a round; drop its sender")
        if piece.start in frame.begun or not frame.missing:
            return False, None
        if len(piece.data) > frame.missing or piece.nbytes != len(frame.data):
            raise PayloadError(f"piece of {piece.nbytes} bytes in a frame of {len(frame.data)}, or twice; drop it")
        frame.data[piece.start : piece.start + len(piece.data)] = piece.data
        frame.begun.add(piece.start)
        frame.missing -= len(piece.data)
        return True, None if frame.missing else self._whole(frame)

    def forget_before(self, round_: int) -> None:
        """Drop what belongs to rounds before ``round_``."""
        self._frames = {key: frame for key, frame in self._frames.items() if key[0] >= round_}

    def _begin(self, piece: Piece) -> _Frame:
        header = piece.header
        most = HEADER_NBYTES + self._max_nbytes(header)
        if not HEADER_NBYTES <= piece.nbytes <= most:
            raise PayloadError(f"piece of a frame of {piece.nbytes} bytes, the schema allows {most}; drop its sender")
        signed_header(piece.head)
        frame = _Frame(piece.head, bytearray(piece.nbytes), piece.nbytes)
        self._frames[header.round, header.sender] = frame
        return frame

    @staticmethod
    def _whole(frame: _Frame) -> bytes:
        data, frame.data = bytes(frame.data), bytearray()
        return data
