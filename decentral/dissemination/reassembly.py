"""Frames on their way to this peer: those in pieces until they are whole, and what need not be asked for, as it comes.

Pieces come from a frame's owner and from those who pass them on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np

from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Header, frame_hash, parse_signed_header
from decentral.wire.keys import Digest, PeerId
from decentral.wire.pieces import Piece, Range, joined

# ---- the bytes that came ----
#
# Ranges that grow together, each byte counted once however the pieces were cut.


class RangeSet:
    """Disjoint ranges with a gap between any two, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.nbytes = 0  # in all of them

    def __len__(self) -> int:
        return len(self._starts)

    def ranges(self) -> list[Range]:
        """Return the ranges that came."""
        return list(zip(self._starts, self._stops, strict=True))

    def gaps(self, start: int, stop: int) -> list[Range]:
        """Return the ranges of [start, stop) that did not come."""
        first, last = self._find_touching(start, stop)
        stops = [start, *self._stops[first:last]]
        starts = [*self._starts[first:last], stop]
        return [(begin, end) for begin, end in zip(stops, starts, strict=True) if begin < end]

    def add(self, start: int, stop: int) -> None:
        """Add a range that came."""
        self.nbytes += sum(end - begin for begin, end in self.gaps(start, stop))
        first, last = self._find_touching(start, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def _find_touching(self, start: int, stop: int) -> tuple[int, int]:
        """Return the ranges that [start, stop) meets or has no gap to."""
        return bisect_left(self._stops, start), bisect_right(self._starts, stop)


# ---- a frame that did not come whole ----


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of a frame that are here: ``data`` is as long as the frame; in ``missing`` it holds nothing."""

    data: bytes
    missing: tuple[Range, ...]

    def complete(self, answer: bytes, frame: bytes) -> bytes | None:
        """Return the frame with that hash; None when the answer makes another of it, or what is here was forged."""
        whole = self._with(answer) if self.missing else answer
        return whole if whole is not None and frame_hash(whole) == frame else None

    def _with(self, answer: bytes) -> bytes | None:
        if len(answer) != sum(stop - start for start, stop in self.missing):
            return None
        whole, at = bytearray(self.data), 0
        for start, stop in self.missing:
            whole[start:stop] = answer[at : at + stop - start]
            at += stop - start
        return bytes(whole)


NOTHING_CAME = Part(b"", ())

# ---- pieces put together ----
#
# Nothing is allocated for a header that is not signed by a member or for more bytes than the schema allows; each sender
# has one frame of a round in pieces here, and each of its bytes is taken once from itself and once from all others,
# however the pieces are cut: an owner that learns its uplink in the middle cuts the rest anew.
#
# A piece may be forged by who passes it on. So the owner's own count first, and when a whole that others had a part in
# is not what its header names, theirs are dropped, none is taken of that frame any more, and the owner's stay: nobody
# can spoil what an owner sends itself. What is missing then is fetched.

SMALLEST_PIECE = 1 << 12  # bytes of a piece, but for the last of each range
SCATTERED = 2048  # ranges that a frame may be in, beside one for each of its smallest pieces: more is malice

MaxNbytes = Callable[[Header], int]  # of a body; raises PayloadError for a header that belongs to nothing here


class _Side:
    """The pieces from the owner of a frame, or those from others."""

    def __init__(self, nbytes: int) -> None:
        # The system gives this memory as bytes come; a bytearray takes all of it at once, and clears it.
        self.data = np.zeros(nbytes, dtype=np.uint8).data
        self.came = RangeSet()

    def put(self, piece: Piece) -> bool:
        """Add a piece; tell whether any byte of it is new; what came first stays. Raises PayloadError."""
        if piece.nbytes != len(self.data):
            raise PayloadError(f"piece of {piece.nbytes} bytes in a frame of {len(self.data)}; drop it")
        fresh = self.came.gaps(piece.start, piece.start + len(piece.data))
        if fresh and len(self.came) > SCATTERED + piece.nbytes // SMALLEST_PIECE:
            raise PayloadError(f"frame in {len(self.came)} crumbs; drop them and their sender")
        for start, stop in fresh:
            self.data[start:stop] = piece.data[start - piece.start : stop - piece.start]
            self.came.add(start, stop)
        return bool(fresh)


@dataclass(slots=True)
class _Frame:
    """A frame in pieces."""

    head: bytes
    own: _Side
    others: _Side | None = None  # once there are such pieces
    came: RangeSet = field(default_factory=RangeSet)  # from any of them
    checked: bool = False  # a whole is being looked at
    over: bool = False  # it was right, or its owner's own bytes are not
    forged: bool = False  # others' pieces were, and no more of them are taken

    def put(self, piece: Piece, by_owner: bool) -> bool:
        """Add a piece; tell whether it is new. Raises PayloadError."""
        if self.over or (self.forged and not by_owner):
            return False
        if not by_owner and self.others is None:
            self.others = _Side(len(self.own.data))
        fresh = (self.own if by_owner or self.others is None else self.others).put(piece)
        if fresh:
            self.came.add(piece.start, piece.start + len(piece.data))
        return fresh

    def whole(self) -> bytes | None:
        """Return the frame's bytes, if all are here and nobody looks at them yet."""
        if self.over or self.checked or self.came.nbytes < len(self.own.data):
            return None
        self.checked = True
        return self._together()

    def part(self) -> Part | None:
        """Return the bytes that are here, of both sides; None when there are none, or all and being looked at, or
        over.
        """
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
        """End the frame: nothing more of it is wanted."""
        self.over, self.others, self.own.data = True, None, memoryview(b"")

    def without_others(self) -> bytes | None:
        """Forget what others brought, which was no part of the frame; return its bytes, if its owner brought all by
        now.
        """
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
        """Add a piece from ``peer``; tell whether it is new, and the frame when that makes it whole. Raises
        PayloadError.

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
        """Return the part of that sender's frame that is here while it is not whole; None: nothing to speak of."""
        frame = self._frames.get((round_, sender))
        return None if frame is None else frame.part()

    def right(self, head: bytes) -> None:
        """Note that the whole is what its header names: no bytes of it are kept here."""
        for frame in self._with(head):
            frame.end()

    def wrong(self, head: bytes) -> bytes | None:
        """Note that it is not: go on with what its owner brings, and return the frame if that is all here."""
        return next((frame.without_others() for frame in self._with(head)), None)

    def forget_before(self, round_: int) -> None:
        """Drop what belongs to rounds before ``round_``."""
        self._frames = {key: frame for key, frame in self._frames.items() if key[0] >= round_}

    def _begin(self, piece: Piece) -> _Frame:
        header = piece.header
        most = HEADER_NBYTES + self._max_nbytes(header)
        if not HEADER_NBYTES <= piece.nbytes <= most:
            raise PayloadError(f"piece of a frame of {piece.nbytes} bytes, the schema allows {most}; drop its sender")
        parse_signed_header(piece.head)
        frame = _Frame(piece.head, _Side(piece.nbytes))
        self._frames[header.round, header.sender] = frame
        return frame

    def _with(self, head: bytes) -> list[_Frame]:
        return [frame for frame in self._frames.values() if frame.head == head]


# ---- what is on its way already ----
#
# It is known so that no frame takes this peer's downlink, and somebody's uplink, twice.

# s without a byte after which a push is not counted on. A lost packet costs TCP about one; but the daemon's streams
# move in steps of 460 kB, seven at once on 20 Mbit/s every 1.3 s: with a limit of 2 s a busy machine sent twice
PAUSE = 5.0


class Push:
    """A frame that a peer is sending here."""

    def __init__(self) -> None:
        self.moved_at = anyio.current_time()
        self.ended = anyio.Event()
        self.began: float | None = None  # when the first bytes came, which say nothing of a rate
        self.nbytes = 0  # after those

    @property
    def stands_still_at(self) -> float:
        """Return the moment from which it is not counted on any more. One expression: another may round to a time that
        never comes.
        """
        return self.moved_at + PAUSE

    def on_bytes(self, count: int) -> None:
        """Note that ``count`` bytes came."""
        self.moved_at = anyio.current_time()
        if self.began is None:
            self.began = self.moved_at
        else:
            self.nbytes += count

    @property
    def rate(self) -> float | None:
        """Return bytes per second; None: too few came to tell."""
        took = 0.0 if self.began is None else self.moved_at - self.began
        return self.nbytes / took if took > 0 and self.nbytes >= MEASURED_FROM else None


MEASURED_FROM = 1 << 15  # bytes of a push from which on its rate tells something of a line
RATES = 8  # pushes of a peer, the fastest of which counts


class Arrivals:
    """Pushes to this peer, and the frames that it fetches."""

    def __init__(self) -> None:
        self._rates: dict[PeerId, deque[float]] = {}
        self._pushes: dict[PeerId, list[Push]] = {}
        self._pieces: dict[PeerId, Push] = {}
        self._fetched: set[Digest] = set()

    @contextmanager
    def push(self, peer: PeerId) -> Iterator[Callable[[int], None]]:
        """Hold while a frame of ``peer`` comes and is checked; what is yielded is told of its bytes."""
        push = Push()
        pushes = self._pushes.setdefault(peer, [])
        pushes.append(push)
        try:
            yield push.on_bytes
        finally:
            push.ended.set()
            pushes.remove(push)
            if push.rate is not None:
                self._rates.setdefault(peer, deque(maxlen=RATES)).append(push.rate)
            if not pushes:
                self._pushes.pop(peer, None)

    def piece(self, owner: PeerId) -> None:
        """Note that a piece of a frame of ``owner`` came, from any peer."""
        self._pieces.setdefault(owner, Push()).on_bytes(0)

    def whole(self, owner: PeerId) -> None:
        """Note that the last piece came, and the frame is kept."""
        if owner in self._pieces:
            self._pieces.pop(owner).ended.set()

    @contextmanager
    def fetch(self, frame: Digest) -> Iterator[bool]:
        """Hold while ``frame`` is fetched; yields False when it is being fetched already."""
        fresh = frame not in self._fetched
        self._fetched.add(frame)
        try:
            yield fresh
        finally:
            if fresh:
                self._fetched.discard(frame)

    def rate_of(self, peer: PeerId) -> float | None:
        """Return the bytes per second at which frames of ``peer`` came lately; None: none that was long enough to
        tell.
        """
        rates = self._rates.get(peer)
        return max(rates) if rates else None

    def keep(self, peers: Container[PeerId]) -> None:
        """Forget the rates of all others."""
        self._rates = {peer: rates for peer, rates in self._rates.items() if peer in peers}

    def is_pushing(self, peer: PeerId) -> bool:
        """Tell whether a push of ``peer`` has begun and not ended, moving or not."""
        return peer in self._pushes

    def is_moving(self, peer: PeerId) -> bool:
        """Tell whether bytes of a push of ``peer`` come."""
        return self._moving(peer) is not None

    async def wait_for_push(self, peer: PeerId) -> None:
        """Wait while bytes of a push of ``peer`` come: which frame it is will be known when all of it is there."""
        while push := self._moving(peer):
            with anyio.CancelScope(deadline=push.stands_still_at):
                await push.ended.wait()

    def _moving(self, peer: PeerId) -> Push | None:
        now, pieces = anyio.current_time(), self._pieces.get(peer)
        pushes = [*self._pushes.get(peer, ()), *([] if pieces is None else [pieces])]
        return next((push for push in pushes if now < push.stands_still_at), None)
