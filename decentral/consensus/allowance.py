"""How long a round's frames may be on their way before somebody is blamed for them.

No constant fits: what is there in milliseconds on a LAN takes minutes behind 2 Mbit/s. A reduce whose slices took
longer than the leader's two seconds was planned anew without their senders, round after round, until it named one peer
alone. So it follows from the bytes that were offered and the uplinks as they were measured, and from nothing else: who
is away is known from its lease, whatever was allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decentral.wire.keys import PeerId

FIRST_REST = 4  # rounds in which nobody waits for a peer that offered and did not send
LONGEST_REST = 64

# (bytes offered, by whom, to whom): seconds in which its part is done, as uplinks were measured; None: its was not
Takes = Callable[[int, PeerId, Sequence[PeerId]], float | None]

UNMEASURED = 125_000.0  # bytes/s of an uplink until its first frame has arrived: 1 Mbit/s, less than is sold
SLACK = 2.0  # times; rounds take 1.3 to 1.5 times what links need, and estimates of equal links differ by a quarter


def unknown(nbytes: int, peer: PeerId, members: Sequence[PeerId]) -> float | None:
    """Nothing was measured."""
    return None


def allowance(nbytes: int, copies: int, takes: float | None) -> float:
    """Seconds; ``copies`` of so many bytes leave a peer in all, which should take it ``takes``."""
    return SLACK * (copies * nbytes / UNMEASURED if takes is None else takes)


@dataclass(slots=True)
class _Rest:
    rounds: int
    until: int  # the round in which it is waited for again


class Unsent:
    """Peers whose last offer was passed over, as its frame never came.

    They are waited for again after four rounds, and after twice as many each time that it was in vain. Never would be
    too seldom: a peer whose frame needs a little longer than the usual slack stayed out after one outage.
    """

    def __init__(self) -> None:
        self._rests: dict[PeerId, _Rest] = {}

    def came(self, peer: PeerId) -> None:
        """A frame of it is here."""
        self._rests.pop(peer, None)

    def passed_over(self, peer: PeerId, round_: int) -> None:
        """The commit of ``round_`` does without the frame that it offered, which is not here."""
        rest = self._rests.get(peer)
        if rest is None:
            self._rests[peer] = _Rest(FIRST_REST, round_ + 1 + FIRST_REST)
        elif rest.until <= round_:
            rest.rounds = min(2 * rest.rounds, LONGEST_REST)
            rest.until = round_ + 1 + rest.rounds

    def is_waited_for(self, peer: PeerId, round_: int) -> bool:
        """Whether its frame is worth waiting for in ``round_``."""
        return peer not in self._rests or self._rests[peer].until <= round_
