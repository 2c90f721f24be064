"""Frames that come in pieces, from their owner and from those who pass them on, until they are whole.

Nothing is allocated for a header that is not signed by a member or for more bytes than the schema allows; each sender
has one frame of a round in pieces here, and each of its bytes is taken once from itself and once from all others.

A piece may be forged by who passes it on. So the owner's own count first, and when a whole that others had a part in is
not what its header names, theirs are dropped, none is taken of that frame any more, and the owner's stay: nobody can
spoil what an owner sends itself. What is missing then is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from decentral.errors import PayloadError
from decentral.exchange.part import Part, part_of
from decentral.wire.frames import HEADER_NBYTES, Header, signed_header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece

MaxNbytes = Callable[[Header], int]  # of a body; raises PayloadError for a header that belongs to nothing here


@dataclass(slots=True)
class _Side:
    """The pieces from the owner of a frame, or those from others."""

    data: bytearray
    missing: int  # bytes
    lengths: dict[int, int] = field(default_factory=dict)  # of pieces, by where they begin

    def put(self, piece: Piece) -> bool:
        """Whether it is new. Raises PayloadError."""
        if piece.start in self.lengths:
            return False
        if len(piece.data) > self.missing or piece.nbytes != len(self.data):
            raise PayloadError(f"piece of {piece.nbytes} bytes in a frame of {len(self.data)}, or twice; drop it")
        self.data[piece.start : piece.start + len(piece.data)] = piece.data
        self.lengths[piece.start] = len(piece.data)
        self.missing -= len(piece.data)
        return True


@dataclass(slots=True)
class _Frame:
    """One frame in pieces."""

    head: bytes
    own: _Side
    others: _Side | None = None  # once there are such pieces
    only_others: int = 0  # bytes of pieces that came from others and not from the owner
    checked: bool = False  # a whole is being looked at
    over: bool = False  # it was right, or its owner's own bytes are not
    forged: bool = False  # others' pieces were, and no more of them are taken

    def put(self, piece: Piece, by_owner: bool) -> bool:
        """Whether it is new. Raises PayloadError."""
        if self.over or (self.forged and not by_owner):
            return False
        if by_owner:
            fresh = self.own.put(piece)
            if fresh and self.others is not None:
                self.only_others -= self.others.lengths.get(piece.start, 0)
            return fresh
        if self.others is None:
            self.others = _side(len(self.own.data))
        fresh = self.others.put(piece)
        self.only_others += len(piece.data) if fresh and piece.start not in self.own.lengths else 0
        return fresh

    def whole(self) -> bytes | None:
        """Its bytes, if all are here and nobody looks at them yet."""
        if self.over or self.checked or self.own.missing > self.only_others:
            return None
        self.checked = True
        return self._together()

    def part(self) -> Part | None:
        """What is here, of both sides; None when it is nothing, or all and being looked at, or over."""
        came = [side.lengths for side in (self.own, self.others) if side is not None]
        if self.over or self.checked or not any(came):
            return None
        here = ((start, start + length) for lengths in came for start, length in lengths.items())
        return part_of(self._together(), here)

    def _together(self) -> bytes:
        if self.others is None or not self.own.missing:
            return bytes(self.own.data)
        whole = bytearray(self.others.data)
        for start, length in self.own.lengths.items():
            whole[start : start + length] = self.own.data[start : start + length]
        return bytes(whole)

    def end(self) -> None:
        """Nothing more of it is wanted."""
        self.over, self.others, self.own.data = True, None, bytearray()

    def without_others(self) -> bytes | None:
        """What they brought was no part of it; its bytes, if all are here from its owner by now."""
        if self.others is None:
            self.end()  # its owner sent something else, and that is that
        self.others, self.only_others, self.forged, self.checked = None, 0, True, False
        return self.whole()


class Puzzle:
    """The frames in pieces of the rounds in progress."""

    def __init__(self, max_nbytes: MaxNbytes) -> None:
        self._max_nbytes = max_nbytes
        self._frames: dict[tuple[int, PeerId], _Frame] = {}  # (round, sender)

    def add(self, piece: Piece, peer: PeerId) -> tuple[bool, bytes | None]:
        """Whether the piece from ``peer`` is new, and the frame when that makes it whole. Raises PayloadError.

        A second frame of one sender takes the place of the first if the sender itself brings it: it was started anew.
        """
        header, by_owner = piece.header, peer == piece.header.sender
        frame = self._frames.get((header.round, header.sender))
        if frame is None or (frame.head != piece.head and by_owner):
            frame = self._begin(piece)
        if frame.head != piece.head:
            raise PayloadError("piece of a second frame of one sender in a round; drop it")
        return frame.put(piece, by_owner), frame.whole()

    def part(self, round_: int, sender: PeerId) -> Part | None:
        """What is here of that sender's frame while it is not whole; None: nothing to speak of."""
        frame = self._frames.get((round_, sender))
        return None if frame is None else frame.part()

    def right(self, head: bytes) -> None:
        """The whole is what its header names: no bytes of it are kept here."""
        for frame in self._with(head):
            frame.end()

    def wrong(self, head: bytes) -> bytes | None:
        """It is not: go on with what its owner brings, and return the frame if that is all here."""
        return next((frame.without_others() for frame in self._with(head)), None)

    def forget_before(self, round_: int) -> None:
        """Drop what belongs to rounds before ``round_``."""
        self._frames = {key: frame for key, frame in self._frames.items() if key[0] >= round_}

    def _begin(self, piece: Piece) -> _Frame:
        header = piece.header
        most = HEADER_NBYTES + self._max_nbytes(header)
        if not HEADER_NBYTES <= piece.nbytes <= most:
            raise PayloadError(f"piece of a frame of {piece.nbytes} bytes, the schema allows {most}; drop its sender")
        signed_header(piece.head)
        frame = _Frame(piece.head, _side(piece.nbytes))
        self._frames[header.round, header.sender] = frame
        return frame

    def _with(self, head: bytes) -> list[_Frame]:
        return [frame for frame in self._frames.values() if frame.head == head]


def _side(nbytes: int) -> _Side:
    return _Side(bytearray(nbytes), nbytes)
