"""Who gossips with whom: a fresh random matching of the members for every gossip step, without a message.

Every peer sorts the members by a hash of (run, step, peer) and pairs neighbours; with an odd number one is left
over and takes its step alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from decentral.wire.keys import PeerId


def matching(run: bytes, step: int, members: Sequence[PeerId]) -> list[tuple[PeerId, ...]]:
    """Disjoint pairs that cover ``members``; the last group holds one peer when their number is odd."""
    salt = b"pair" + run + step.to_bytes(8, "little")
    order = sorted(members, key=lambda peer: hashlib.blake2b(salt + peer, digest_size=16).digest())
    return [tuple(sorted(order[at : at + 2])) for at in range(0, len(order), 2)]


def partner_of(run: bytes, step: int, members: Sequence[PeerId], me: PeerId) -> PeerId | None:
    """The peer that ``me`` swaps with at ``step``, or None when it is left over."""
    for group in matching(run, step, members):
        if me in group:
            return next((peer for peer in group if peer != me), None)
    return None
