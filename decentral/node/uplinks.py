"""What members' leases say that each can send, and what follows from it for a round: a hint, wrong ones cost time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import anyio

from decentral.dissemination.broadcast import UNKNOWN, Line, Lines
from decentral.dissemination.reduce import alike
from decentral.swarm.directory import Directory
from decentral.wire.keys import PeerId
from decentral.wire.messages import PRIVATE

FRESH = (
    1.0  # s for which lines are remembered: leases change less often; looked up with every tick they took a tenth of it
)
LEAST = 0.1  # of the usual uplink: nobody is waited for as long as who says that it sends less would need


@dataclass(slots=True)
class Uplinks:
    """Of the members of one run; ``reduces``: whether its rounds are reduces."""

    directory: Directory
    reduces: bool
    clock: Callable[[], float] = anyio.current_time
    _members: tuple[PeerId, ...] = ()  # whose lines were looked up last, when, and what was found
    _since: float = -math.inf
    _places: dict[PeerId, int] = field(default_factory=dict)
    _lines: Lines | None = None

    def lines_of(self, peers: Sequence[PeerId]) -> list[Line]:
        """What each says it was seen to send; private peers, whom not all can reach, pass nothing on."""
        live, own = self.directory.live(), self.directory.draft()
        leases = [own if peer == own.peer else live.get(peer) for peer in peers]
        known = {lease.peer: lease.uplink / 8 for lease in leases if lease is not None and lease.uplink}
        others = [rate for peer, rate in known.items() if peer != own.peer]  # the own line says nothing of theirs
        usual = fmean(others or known.values() or [UNKNOWN])
        rates = alike([lease.uplink / 8 if lease is not None and lease.uplink else usual for lease in leases])
        private = [lease is not None and bool(lease.state & PRIVATE) for lease in leases]
        return [Line(rate, passes_on=not hidden) for rate, hidden in zip(rates, private, strict=True)]

    def for_owners(self, peers: Sequence[PeerId]) -> list[float]:
        """Bytes per second for a reduce; private peers own nothing of it, unless all are."""
        lines = self.lines_of(peers)
        nobody = not any(line.passes_on for line in lines)
        return [line.rate if line.passes_on or nobody else 0.0 for line in lines]

    def takes(self, nbytes: int, peer: PeerId, members: Sequence[PeerId]) -> float | None:
        """See Takes. Of a reduce, slices and results are about two bodies."""
        lines = self._waited_for(tuple(members))
        me = self._places.get(peer)
        if lines is None or me is None:
            return None
        return lines.seconds_alone(2 * nbytes, me) if self.reduces else lines.seconds_to_all(nbytes, me)

    def _waited_for(self, members: tuple[PeerId, ...]) -> Lines | None:
        now = self.clock()
        if self._since <= now < self._since + FRESH and (members is self._members or members == self._members):
            return self._lines
        self._members, self._since = members, now
        self._places = {peer: place for place, peer in enumerate(members)}
        lines = self.lines_of(members)
        usual = median(line.rate for line in lines)
        least = [replace(line, rate=max(line.rate, LEAST * usual)) for line in lines]
        self._lines = None if usual == UNKNOWN else Lines(least)
        return self._lines
