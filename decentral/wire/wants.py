"""What is asked of a holder: a frame by its hash, or only the ranges of it that did not come.

Crosses the wire, little-endian: the hash of 32 bytes; then, for each of at most ``MOST`` ranges, u64 where it begins
and u64 where it ends, rising, with a gap between any two. No ranges: all of the frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from decentral.errors import PayloadError

Range = tuple[int, int]  # bytes [start, stop) of a frame

MOST = 64  # ranges
_HASH_NBYTES = 32
_RANGE = struct.Struct("<QQ")
WANT_NBYTES = _HASH_NBYTES + MOST * _RANGE.size  # of the longest


@dataclass(frozen=True, slots=True)
class Want:
    """Which bytes of which frame are wanted."""

    frame: bytes
    ranges: tuple[Range, ...] = ()

    def of(self, data: bytes) -> bytes:
        """The answer, from the whole frame: never more than that. Raises PayloadError for a range beyond its end."""
        if not self.ranges:
            return data
        if self.ranges[-1][1] > len(data):
            raise PayloadError(f"want: bytes up to {self.ranges[-1][1]} of a frame of {len(data)}; drop it")
        return b"".join(data[start:stop] for start, stop in self.ranges)

    def to_bytes(self) -> bytes:
        """The want as it crosses the wire."""
        return self.frame + b"".join(_RANGE.pack(*range_) for range_ in self.ranges)


def read_want(data: bytes) -> Want:
    """Read one. Raises PayloadError."""
    left = len(data) - _HASH_NBYTES
    if left < 0 or left % _RANGE.size or left > MOST * _RANGE.size:
        raise PayloadError(f"want of {len(data)} bytes, want 32 and 16 for each of at most {MOST} ranges; drop it")
    ranges = tuple(_RANGE.iter_unpack(data[_HASH_NBYTES:]))
    ends = [end for range_ in ranges for end in range_]
    if any(one >= other for one, other in pairwise(ends)):
        raise PayloadError("want: its ranges do not rise; drop it")
    return Want(data[:_HASH_NBYTES], ranges)


def joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """At most ``MOST`` ranges that hold all of these, with as little else as can be."""
    gaps = sorted(range(1, len(ranges)), key=lambda n: ranges[n - 1][1] - ranges[n][0])[: MOST - 1]  # the widest stay
    ends = [0, *sorted(gaps), len(ranges)]
    return tuple((ranges[first][0], ranges[last - 1][1]) for first, last in pairwise(ends)) if ranges else ()
