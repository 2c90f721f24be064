"""Frames that come in pieces, from their owner and from those who pass them on, until they are whole.

Nothing is allocated for a header that is not signed by a member or for more bytes than the schema allows; each sender
has one frame of a round in pieces here, and each of its bytes is taken once from itself and once from all others,
however the pieces are cut: an owner that learns its uplink in the middle cuts the rest anew.

A piece may be forged by who passes it on. So the owner's own count first, and when a whole that others had a part in is
not what its header names, theirs are dropped, none is taken of that frame any more, and the owner's stay: nobody can
spoil what an owner sends itself. What is missing then is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decentral.dissemination.partial_frame import Part
from decentral.dissemination.range_set import RangeSet
from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Header, signed_header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece, joined

SMALLEST = 1 << 12  # bytes of a piece, but for the last of each range
SCATTERED = 2048  # ranges that a frame may be in, beside one for each of its smallest pieces: more is malice

MaxNbytes = Callable[[Header], int]  # of a body; raises PayloadError for a header that belongs to nothing here


class _Side:
    """The pieces from the owner of a frame, or those from others."""

    def __init__(self, nbytes: int) -> None:
        # The system gives this memory as bytes come; a bytearray takes all of it at once, and clears it.
        self.data = np.zeros(nbytes, dtype=np.uint8).data
        self.came = RangeSet()

    def put(self, piece: Piece) -> bool:
        """Whether any byte of it is new; what came first stays. Raises PayloadError."""
        if piece.nbytes != len(self.data):
            raise PayloadError(f"piece of {piece.nbytes} bytes in a frame of {len(self.data)}; drop it")
        fresh = self.came.gaps(piece.start, piece.start + len(piece.data))
        if fresh and len(self.came) > SCATTERED + piece.nbytes // SMALLEST:
            raise PayloadError(f"frame in {len(self.came)} crumbs; drop them and their sender")
        for start, stop in fresh:
            self.data[start:stop] = piece.data[start - piece.start : stop - piece.start]
            self.came.add(start, stop)
        return bool(fresh)


@dataclass(slots=True)
class _Frame:
    """One frame in pieces."""

    head: bytes
    own: _Side
    others: _Side | None = None  # once there are such pieces
    came: RangeSet = field(default_factory=RangeSet)  # from any of them
    checked: bool = False  # a whole is being looked at
    over: bool = False  # it was right, or its owner's own bytes are not
    forged: bool = False  # others' pieces were, and no more of them are taken

    def put(self, piece: Piece, by_owner: bool) -> bool:
        """Whether it is new. Raises PayloadError."""
        if self.over or (self.forged and not by_owner):
            return False
        if not by_owner and self.others is None:
            self.others = _Side(len(self.own.data))
        fresh = (self.own if by_owner or self.others is None else self.others).put(piece)
        if fresh:
            self.came.add(piece.start, piece.start + len(piece.data))
        return fresh

    def whole(self) -> bytes | None:
        """Its bytes, if all are here and nobody looks at them yet."""
        if self.over or self.checked or self.came.nbytes < len(self.own.data):
            return None
        self.checked = True
        return self._together()

    def part(self) -> Part | None:
        """What is here, of both sides; None when it is nothing, or all and being looked at, or over."""
        if self.over or self.checked or not self.came.nbytes:
            return None
        return Part(self._together(), joined(self.came.gaps(0, len(self.own.data))))

    def _together(self) -> bytes:
        if self.others is None or self.own.came.nbytes == len(self.own.data):
            return bytes(self.own.data)
        whole = bytearray(self.others.data)
        for start, stop in self.own.came.ranges():
            whole[start:stop] = self.own.data[start:stop]
        return bytes(whole)

    def end(self) -> None:
        """Nothing more of it is wanted."""
        self.over, self.others, self.own.data = True, None, memoryview(b"")

    def without_others(self) -> bytes | None:
        """What they brought was no part of it; its bytes, if all are here from its owner by now."""
        if self.others is None:
            self.end()  # its owner sent something else, and that is that
        self.others, self.came, self.forged, self.checked = None, self.own.came, True, False
        return self.whole()


class Reassembly:
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
        frame = _Frame(piece.head, _Side(piece.nbytes))
        self._frames[header.round, header.sender] = frame
        return frame

    def _with(self, head: bytes) -> list[_Frame]:
        return [frame for frame in self._frames.values() if frame.head == head]
