"""Whom a peer tells that it is here: everybody in a small swarm, its row and its column in a large one.

The peers, in the order of their ids, stand in rows of equal length, or one longer: about the square root of their
number. A peer tells its row of itself, and its column of its row: so all hear of all by way of one other at most, in
2 to 3 ``sqrt(N)`` messages per renewal instead of N. What is passed on is as old as a renewal, a third of a lease at
most, and signed by whom it is of; who passes nothing on is made up for by the list that each peer asks another for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from decentral.wire.keys import PeerId

__all__ = ["DIRECT", "Circles", "circles"]

DIRECT = 20  # others that are told one by one: where the DHT begins, too


@dataclass(frozen=True, slots=True)
class Circles:
    """Others, each once."""

    told: Sequence[PeerId]  # hear of this peer alone
    passed_to: Sequence[PeerId] = ()  # hear of it and of its row
    row: Sequence[PeerId] = ()  # of whom those hear


def circles(me: PeerId, others: Sequence[PeerId]) -> Circles:
    """Where peer ``me`` stands among ``others``, which are in the order of their ids."""
    if len(others) <= DIRECT:
        return Circles(others)
    peers = sorted((me, *others))
    num_rows = math.isqrt(len(peers))
    short, num_long = divmod(len(peers), num_rows)
    rows, start = [], 0
    for number in range(num_rows):
        stop = start + short + (number < num_long)
        rows.append(peers[start:stop])
        start = stop
    own = next(row for row in rows if row[-1] >= me)
    place = own.index(me)
    column = [row[place] for row in rows if place < len(row) and row is not own]
    nobody_passes_on = [row[short] for row in rows if len(row) > short] if len(own) == short else []
    told = [peer for peer in (*own, *nobody_passes_on) if peer != me]
    return Circles(told, column, [peer for peer in own if peer != me])
