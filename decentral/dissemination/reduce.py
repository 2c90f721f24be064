"""The parts of a reduce: which are whose, and in which order slices go.

Each owner sums its parts of the contributors' slices and returns re-quantised results, one for each part.
Right for dense frames: sent per peer and round ``2 (N-1)/N * body``, whatever N. Everybody applies the owners' result
frames, so all apply the same bits although sums were made in one place only (`decentral.replica.reduction`).

Source: the bandwidth-optimal all-reduce of Patarasuk and Yuan, 2009; re-quantising once per owner instead of once per
hop, as decentral training runs do since INTELLECT-1 (Jaghouar et al., 2024, arXiv:2412.01152).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from decentral.flow.pacing import order_after
from decentral.wire.keys import PeerId
from decentral.wire.messages import ReducePlan


def parts_of(plan: ReducePlan, peer: PeerId) -> list[int]:
    """Return the indices of the parts that ``peer`` owns in ``plan``."""
    return [part for part, (owner, _, _) in enumerate(plan.partition) if owner == peer]


def in_order(plan: ReducePlan, me: PeerId) -> list[int]:
    """Return the parts in the order in which ``me`` sends their slices: of each owner the first, then the second."""
    owners = order_after({owner for owner, _, _ in plan.partition}, me)
    rounds = zip_longest(*(parts_of(plan, owner) for owner in owners))
    return [part for parts in rounds for part in parts if part is not None]


# ---- a fragment cut among its owners ----
#
# Each owner reduces a part, in pieces. A piece is summed, and its result sent, while slices of the next are still
# coming: else every uplink idles from its own last slice until the last slice of all is there. Ranges are cut at
# multiples of the compressors' block, so that a slice compresses to the same bytes however the fragment is cut.

MOST_PIECES = 4  # of one owner; each costs a signature, a stream to everybody and 128 bytes of the record
MOST_PARTS = 256  # of a fragment; a record holds 1,024

Ranges = tuple[tuple[PeerId, int, int], ...]  # owner, start, stop


@dataclass(frozen=True, slots=True)
class Grain:
    """The least sizes into which a fragment may be cut, in elements."""

    align: int = 4096  # the compressors' block
    piece: int = 1 << 17  # the least that is worth a frame: half a megabyte of float32; see experiments/LOG.md


USUAL_GRAIN = Grain()


def shares(uplinks: Sequence[float]) -> list[float]:
    """Return the share of a reduce that each peer should own, given what it can send per second; any unit, sum 1.

    Of a body of one, peer i sends ``1 - s_i`` as slices and ``(N - 1) s_i`` as its result, ``1 + (N - 2) s_i`` in all.
    All are done at the same time T when ``1 + (N - 2) s_i = T u_i``; who is too slow even for its slices owns nothing,
    which is water-filling: T is such that the shares ``max(0, T u_i - 1) / (N - 2)`` sum to one. Peers that can send
    nothing own nothing; equal shares when none can.
    """
    room = len(uplinks) - 2
    most = sorted((u for u in uplinks if u > 0), reverse=True)
    if room <= 0 or not most:
        total = sum(most)
        return [max(u, 0.0) / total for u in uplinks] if most else [1.0 / len(uplinks)] * len(uplinks)
    finish = next(
        time for k in range(len(most), 0, -1) if (time := (room + k) / sum(most[:k])) * most[k - 1] >= 1.0 - 1e-9
    )
    return [max(0.0, finish * u - 1.0) / room for u in uplinks]


def partition(
    numel: int, owners: Sequence[PeerId], weights: Sequence[float] | None = None, grain: Grain = USUAL_GRAIN
) -> Ranges:
    """Cut ``[0, numel)`` among ``owners`` in proportion to ``weights`` (equal when None), each share in pieces.

    Owners whose share rounds to nothing are left out; together the ranges cover everything exactly once.
    """
    shares = [1.0] * len(owners) if weights is None else list(weights)
    total, blocks = sum(shares), -(-numel // grain.align)
    most = max(1, min(MOST_PIECES, MOST_PARTS // len(owners)))
    ranges: list[tuple[PeerId, int, int]] = []
    done, cumulated = 0, 0.0
    for owner, share in zip(owners, shares, strict=True):
        cumulated += share
        upto = blocks if owner == owners[-1] else round(blocks * cumulated / total)
        ends = (min(end * grain.align, numel) for end in _in_pieces(done, upto, grain, most))
        ranges += [(owner, start, stop) for start, stop in pairwise(ends)]
        done = max(done, upto)
    return tuple(ranges)


def _in_pieces(start: int, stop: int, grain: Grain, most: int) -> list[int]:
    """Return the ends, in blocks, of as many equal pieces as are large enough, and no more than ``most``."""
    if stop <= start:
        return []
    count = max(1, min(most, (stop - start) * grain.align // grain.piece))
    return [start + (stop - start) * number // count for number in range(count + 1)]
