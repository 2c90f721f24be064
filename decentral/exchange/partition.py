"""Which part of a fragment each owner reduces.

Ranges are cut at multiples of ``ALIGN`` elements, the compressors' block, so that a slice compresses to the same
bytes however the fragment is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from decentral.wire.keys import PeerId

ALIGN = 4096  # elements


def partition(
    numel: int, owners: Sequence[PeerId], weights: Sequence[float] | None = None
) -> tuple[tuple[PeerId, int, int], ...]:
    """Cut ``[0, numel)`` among ``owners`` in proportion to ``weights`` (equal when None): (owner, start, stop).

    Owners whose share rounds to nothing are left out; together the ranges cover everything exactly once.
    """
    shares = [1.0] * len(owners) if weights is None else list(weights)
    total, blocks = sum(shares), -(-numel // ALIGN)
    ranges, done, cumulated = [], 0, 0.0
    for owner, share in zip(owners, shares, strict=True):
        cumulated += share
        upto = blocks if owner == owners[-1] else round(blocks * cumulated / total)
        if upto > done:
            ranges.append((owner, done * ALIGN, min(upto * ALIGN, numel)))
            done = upto
    return tuple(ranges)
