"""Who trains with this peer now, and whether it was left alone: a pure watch over the live leases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass

from decentral.rounds.driver import Driver
from decentral.wire.keys import PeerId


@dataclass(slots=True)
class Company:
    """The other members that are here, and the last ones that were."""

    here: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()  # who was here last, once nobody is any more; empty before anybody came
    left: bool = False  # whether all of those said goodbye, rather than fell silent
    _seen: tuple[object, object] = (None, None)  # the live ones and the members at the look before

    def look(
        self, live: Collection[PeerId], members: Collection[PeerId], said_goodbye: Callable[[PeerId], bool]
    ) -> bool:
        """Book who is here; whether the last one has gone since the look before.

        A peer that rests is no member and still here; one that only asks for the terms never was.
        """
        if self._seen[0] is live and self._seen[1] is members:  # nobody came or went; asked four times a second
            return False
        before, self._seen = self.here, (live, members)
        self.here = frozenset(peer for peer in live if peer in members or peer in before)
        if self.here:
            self.gone = frozenset()
        elif before:
            self.gone, self.left = before, all(map(said_goodbye, before))
        return bool(before) and not self.here


class RunMembers(Container[PeerId]):
    """The members of the run as its chain has them now."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __contains__(self, peer: object) -> bool:
        return peer in self._driver.head.members
