"""Bytes of frames that travel by themselves: pieces, as they are sent, and wants, which ask for ranges."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from decentral.errors import PayloadError
from decentral.wire.frames import HEADER_NBYTES, Header, parse_header
from decentral.wire.keys import DIGEST_NBYTES

# ---- a piece of a frame ----
#
# It is for one who passes it on to the others or puts the frame together.
#
# Crosses the wire, little-endian: the frame's header of ``HEADER_NBYTES``, which is signed and names the body's hash;
# u64 bytes of the whole frame; u64 where the piece begins in it; u8, 1 when it is to be passed on; the bytes. The
# header comes with each piece, so that nothing is kept for a frame that belongs to nothing here.

_PIECE_FIELDS = struct.Struct("<QQB")
PIECE_HEAD_NBYTES = HEADER_NBYTES + _PIECE_FIELDS.size


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
        return b"".join((self.head, _PIECE_FIELDS.pack(self.nbytes, self.start, self.pass_on), self.data))


def read_piece(data: bytes) -> Piece:
    """Read one; the header's signature is still to be checked. Raises PayloadError."""
    if len(data) <= PIECE_HEAD_NBYTES:
        raise PayloadError(f"piece of {len(data)} bytes, its head alone takes {PIECE_HEAD_NBYTES}; drop it")
    nbytes, start, pass_on = _PIECE_FIELDS.unpack_from(data, HEADER_NBYTES)
    piece = Piece(data[:HEADER_NBYTES], nbytes, start, pass_on == 1, data[PIECE_HEAD_NBYTES:])
    if pass_on > 1:
        raise PayloadError(f"piece: flag byte {pass_on}, want 0 or 1; drop it")
    if start + len(piece.data) > nbytes:
        raise PayloadError(f"piece: it ends at {start + len(piece.data)} of a frame of {nbytes} bytes; drop it")
    parse_header(piece.head)
    return piece


# ---- what is asked of a holder ----
#
# A frame by its hash, or only the ranges of it that did not come.
#
# Crosses the wire, little-endian: the hash of 32 bytes; then, for each of at most ``MOST`` ranges, u64 where it begins
# and u64 where it ends, rising, with a gap between any two. No ranges: all of the frame, or its first ``AT_ONCE``
# bytes when it is longer, as an answer's length has 32 bits; who asks for the next ``AT_ONCE`` need not know where it
# ends.

Range = tuple[int, int]  # bytes [start, stop) of a frame

MOST = 64  # ranges
AT_ONCE = 1 << 30  # bytes of one answer at most
_RANGE = struct.Struct("<QQ")
WANT_NBYTES = DIGEST_NBYTES + MOST * _RANGE.size  # of the longest


@dataclass(frozen=True, slots=True)
class Want:
    """Which bytes of which frame are wanted."""

    frame: bytes
    ranges: tuple[Range, ...] = ()

    def of(self, data: bytes, at_once: int = AT_ONCE) -> bytes:
        """The answer, from the whole frame: never more than that, nor than ``at_once``. PayloadError for more."""
        if not self.ranges:
            return data if len(data) <= at_once else data[:at_once]
        stop_of_last = self.ranges[-1][1]
        goes_on = (
            len(self.ranges) == 1 and stop_of_last - self.ranges[0][0] == at_once and self.ranges[0][0] < len(data)
        )
        if stop_of_last > len(data) and not goes_on:
            raise PayloadError(f"want: bytes up to {stop_of_last} of a frame of {len(data)}; drop it")
        if sum(stop - start for start, stop in self.ranges) > at_once:
            raise PayloadError(f"want: more than {at_once} bytes at once; drop it")
        return b"".join(data[start:stop] for start, stop in self.ranges)

    def cut(self, at_once: int = AT_ONCE) -> Iterator[Want]:
        """The same ranges, in wants whose answers have at most ``at_once`` bytes."""
        batch: list[Range] = []
        room = at_once
        for start, stop in self._pieces(at_once):
            if stop - start > room:
                yield Want(self.frame, tuple(batch))
                batch, room = [], at_once
            batch.append((start, stop))
            room -= stop - start
        yield Want(self.frame, tuple(batch))

    def _pieces(self, at_once: int) -> Iterator[Range]:
        for start, stop in self.ranges:
            for at in range(start, stop, at_once):
                yield at, min(at + at_once, stop)

    def to_bytes(self) -> bytes:
        """The want as it crosses the wire."""
        return self.frame + b"".join(_RANGE.pack(*range_) for range_ in self.ranges)


def read_want(data: bytes) -> Want:
    """Read one. Raises PayloadError."""
    left = len(data) - DIGEST_NBYTES
    if left < 0 or left % _RANGE.size or left > MOST * _RANGE.size:
        raise PayloadError(f"want of {len(data)} bytes, want 32 and 16 for each of at most {MOST} ranges; drop it")
    ranges = tuple(_RANGE.iter_unpack(data[DIGEST_NBYTES:]))
    ends = [end for range_ in ranges for end in range_]
    if any(one >= other for one, other in pairwise(ends)):
        raise PayloadError("want: its ranges do not rise; drop it")
    return Want(data[:DIGEST_NBYTES], ranges)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """At most ``MOST`` ranges that hold all of these, with as little else as can be."""
    gaps = sorted(range(1, len(ranges)), key=lambda n: ranges[n - 1][1] - ranges[n][0])[: MOST - 1]  # the widest stay
    ends = [0, *sorted(gaps), len(ranges)]
    return tuple((ranges[first][0], ranges[last - 1][1]) for first, last in pairwise(ends)) if ranges else ()
