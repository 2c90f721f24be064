"""Which bytes of something came: ranges that grow together, each byte counted once however the pieces were cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from decentral.wire.pieces import Range


class RangeSet:
    """Disjoint ranges with a gap between any two, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.nbytes = 0  # in all of them

    def __len__(self) -> int:
        return len(self._starts)

    def ranges(self) -> list[Range]:
        """What came."""
        return list(zip(self._starts, self._stops, strict=True))

    def gaps(self, start: int, stop: int) -> list[Range]:
        """What of [start, stop) did not."""
        first, last = self._touched(start, stop)
        stops = [start, *self._stops[first:last]]
        starts = [*self._starts[first:last], stop]
        return [(begin, end) for begin, end in zip(stops, starts, strict=True) if begin < end]

    def add(self, start: int, stop: int) -> None:
        """It came."""
        self.nbytes += sum(end - begin for begin, end in self.gaps(start, stop))
        first, last = self._touched(start, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def _touched(self, start: int, stop: int) -> tuple[int, int]:
        """The ranges that [start, stop) meets or has no gap to."""
        return bisect_left(self._stops, start), bisect_right(self._starts, stop)
