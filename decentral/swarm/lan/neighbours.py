"""Who was said to be on this network, and when each is worth a look. Pure: the time comes in.

Anybody on the network can say anything about anybody, so what is said is a reason to look and nothing more: at most 32
peers are remembered, the one heard longest ago is forgotten first, and at most 8 looks begin at a time, at each peer
with growing pauses. A flood of names can hide neighbours; it can hold no memory and causes at most 32 dials a second.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from decentral.swarm.lan.announcement import Sighting
from decentral.wire.keys import PeerId

MOST = 32  # peers
AT_ONCE = 8  # looks
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # s between two looks at one peer
FORGOTTEN = 4500.0  # s without a word: how long a TXT record counts (RFC 6762, 10)


@dataclass(slots=True)
class Neighbour:
    """One peer, as it was announced last."""

    addresses: tuple[str, ...]
    heard: float
    look_at: float  # the next time
    pause: float = FIRST_PAUSE
    tried: bool = False


class Neighbours:
    """Those of one run who are said to be near."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._known: dict[PeerId, Neighbour] = {}  # heard longest ago first

    def __len__(self) -> int:
        return len(self._known)

    def heard(self, sighting: Sighting, now: float) -> None:
        """Somebody says so."""
        if sighting.peer == self._me:
            return
        known = self._known.pop(sighting.peer, None)
        if known is None and len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        if known is None:
            known = Neighbour(sighting.addresses, now, look_at=now)
        elif known.addresses != sighting.addresses:
            known.addresses, known.pause = sighting.addresses, FIRST_PAUSE
            known.look_at = min(known.look_at, now + FIRST_PAUSE)
        known.heard = now
        self._known[sighting.peer] = known

    def due(self, now: float, here: Container[PeerId]) -> list[tuple[PeerId, tuple[str, ...]]]:
        """Whom to look for now, and where; nobody who is ``here`` already."""
        for peer in [peer for peer, one in self._known.items() if now - one.heard > FORGOTTEN]:
            del self._known[peer]
        chosen = [(peer, one) for peer, one in self._known.items() if one.look_at <= now and peer not in here]
        for _, one in chosen[:AT_ONCE]:
            one.look_at, one.pause, one.tried = now + one.pause, min(2 * one.pause, LONGEST_PAUSE), True
        return [(peer, one.addresses) for peer, one in chosen[:AT_ONCE]]

    def met(self, here: Container[PeerId]) -> list[PeerId]:
        """Those that are here since they were looked for; each is named once, and looked for soon when it is gone."""
        found = [peer for peer, one in self._known.items() if one.tried and peer in here]
        for peer in found:
            self._known[peer].tried, self._known[peer].pause = False, FIRST_PAUSE
        return found
