"""How long a round's frames may be on their way before somebody is blamed for them.

No constant fits: what is there in milliseconds on a LAN takes minutes behind 2 Mbit/s. A reduce whose slices took
longer than the leader's two seconds was planned anew without their senders, round after round, until it named one peer
alone. So it follows from the bytes that were offered and the uplinks as they were measured, and from nothing else: who
is away is known from its lease, whatever was allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from decentral.wire.keys import PeerId

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
