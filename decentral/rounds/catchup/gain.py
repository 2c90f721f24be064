"""Whether chunks come sooner packed or as they are: both are timed, as no rate alone can tell.

A packed chunk is a sixth shorter, and packing and unpacking take turns from the streams. That gains where the way is
the narrow part, and loses where a processor is, at either end; from here both are only bytes that come slowly. So the
two forms are timed against each other, a few chunks each, and the sooner one is asked for; now and then the other is
tried again. Where a way is so slow that packing takes a small part of what it saves, nothing is tried.

Measured (experiments/LOG.md): a rule that compared the time saved at the rate seen with the quickest unpacking gave
packing up at 400 Mbit/s, where it gains 17 %.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_TURN = 8  # chunks that are timed before the forms are compared
_TRIALS = 0.01  # of the time may go to trying the slower form
_SURELY = 40  # times unpacking: both ends take four of it, and a busy processor would have to be ten times slower
_MARGIN = 0.03  # the other form has to be that much sooner: turns of one form differ so
_FIRST_STAY, _LONGEST_STAY = 6, 24  # turns; the first comparison falls into the time in which windows grow
_KEPT = 7 / 8  # of what is known of a form when its next chunk comes
_NEVER = float("inf")


@dataclass(slots=True)
class LinkPace:
    """Seconds for a byte in one form, of late."""

    seconds: float = 0.0
    nbytes: float = 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        """A chunk of ``nbytes`` came so long after the one before it."""
        self.seconds = _KEPT * self.seconds + seconds
        self.nbytes = _KEPT * self.nbytes + nbytes

    @property
    def per_byte(self) -> float:
        """Seconds; none is known before something came."""
        return self.seconds / self.nbytes if self.nbytes else _NEVER


@dataclass(slots=True)
class Gain:
    """Which form to ask for. Pure: the times come in."""

    packed: bool = True  # the form to ask for now
    better: bool = True  # the form that came sooner; the other one while that is tried
    paces: tuple[LinkPace, LinkPace] = field(default_factory=lambda: (LinkPace(), LinkPace()))  # as they are, packed
    saved: float = 0.0  # of a byte, by the last chunk that came packed
    unpacking: float = _NEVER  # s for a byte, the quickest: a busy machine makes one slow, nothing makes one fast
    _left: int = _TURN  # chunks until the next decision
    _longest: int = _FIRST_STAY
    _last: tuple[bool, float] | None = None  # the form in which the last chunk was asked for, and when it came

    def unpacked(self, nbytes: int, chunk_nbytes: int, seconds: float) -> None:
        """A chunk that came as ``nbytes`` was made what it is in so many seconds."""
        self.saved = 1 - nbytes / chunk_nbytes
        self.unpacking = min(self.unpacking, seconds / chunk_nbytes)

    def came(self, chunk_nbytes: int, now: float, *, packed: bool) -> None:
        """A chunk that was asked for in this form is here. Only one after another in the same form tells its pace."""
        before, self._last = self._last, (packed, now)
        if before is None or before[0] != packed:
            return
        self.paces[packed].add(now - before[1], chunk_nbytes)
        if packed == self.packed:
            self._left -= 1
            if self._left <= 0:
                self._decide()

    def _decide(self) -> None:
        if self.packed != self.better:
            self._compare()
        elif self._is_sure():
            self._left = _TURN
        else:
            self.packed, self._left = not self.better, _TURN

    def _is_sure(self) -> bool:
        """Whether the way is so slow that packing pays whatever the processors do."""
        saved = self.saved * self.paces[True].per_byte
        return self.better and self.saved > 0 and saved >= _SURELY * self.unpacking

    def _compare(self) -> None:
        here, other = self.paces[self.better].per_byte, self.paces[not self.better].per_byte
        if other < (1 - _MARGIN) * here:
            self.better = not self.better
        self.packed = self.better
        loss = max(here, other) / min(here, other) - 1 if min(here, other) else 0.0
        self._left = _TURN * max(1, min(self._longest, round(loss / _TRIALS)))
        self._longest = _LONGEST_STAY
