"""Which part of a fragment each owner reduces.

Ranges are cut at multiples of ``ALIGN`` elements, the compressors' block, so that a slice compresses to the same
bytes however the fragment is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from decentral.wire.keys import PeerId

ALIGN = 4096  # elements


def shares(uplinks: Sequence[float]) -> list[float]:
    """How much of a reduce each peer should own, given what it can send per second; any unit, sum 1.

    Of a body of one, peer i sends ``1 - s_i`` as slices and ``(N - 1) s_i`` as its result, ``1 + (N - 2) s_i`` in all.
    All are done at the same time T when ``1 + (N - 2) s_i = T u_i``; who is too slow even for its slices owns nothing,
    which is water-filling: T is such that the shares ``max(0, T u_i - 1) / (N - 2)`` sum to one. Peers that can send
    nothing own nothing; equal shares when none can.
    """
    most = sorted((u for u in uplinks if u > 0), reverse=True)
    room = len(uplinks) - 2
    if room <= 0 or not most:
        total = sum(most)
        return [max(u, 0.0) / total for u in uplinks] if most else [1.0 / len(uplinks)] * len(uplinks)
    finish = next(
        time for k in range(len(most), 0, -1) if (time := (room + k) / sum(most[:k])) * most[k - 1] >= 1.0 - 1e-9
    )
    return [max(0.0, finish * u - 1.0) / room for u in uplinks]


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
