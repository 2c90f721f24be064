"""What an owner of a reduce owes: what compressing its results lost, in units of the mean.

The contributors have struck it off their books, so nobody else has it. It is added to the next result that this peer
makes of the same elements, and booked with the commit that names the result, never before: a plan that is made again
begins from the same debt.

Ranges move from round to round, with the uplinks as they are measured. What is owed of elements that another peer owns
now goes into this peer's own slice for them, times the number of contributors, so that the mean has it in full. Kept
until this peer owns them again, it might be never; and a slice is booked like all that this peer sends. Where it counts
nothing, or next to nothing, nothing is handed on, and it is owed still.

An owner that dies takes its debt along, as a contributor does; so does one whose rounds are given up, for contributors
then owe again all that went into them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from decentral.tensors.memory import fresh_zeros
from decentral.wire.keys import PeerId
from decentral.wire.messages import FrameRef, Record

# Shape suffix: N = elements of one fragment, flat float32.

OWED = "owed"  # its name beside the sender's feedback
LEAST = 2.0**-20  # of all weights, with which a contributor still hands on: beyond it float32 would lose its own change


def in_own_units(contributors: Sequence[FrameRef], weights: Sequence[float], me: PeerId) -> float:
    """What a unit of the mean is in the contribution of ``me``: the number of contributors, when all weigh the same.

    0 where that is beyond all bounds, for ``me`` counts nothing: then nothing is to be handed on.
    """
    own = next(weight for ref, weight in zip(contributors, weights, strict=True) if ref.peer == me)
    total = math.fsum(weights)
    return total / own if own > LEAST * total else 0.0


def owed_after(
    owed_N: Tensor | None, record: Record, me: PeerId, made: Mapping[bytes, Tensor], numel: int, keeps: bool = False
) -> Tensor | None:
    """What ``me`` owes as an owner once ``record`` is applied, new; None when that is nothing new.

    ``keeps``: the slices that ``me`` contributed handed nothing on.

    ``made``: by the hashes of the results that this process made, what each leaves to owe. Of one that a previous
    incarnation made nobody knows, and its elements are owed no more, rather than twice.
    """
    if not record.partition:
        return None
    mine = [(record.partition[ref.part], made.get(ref.frame)) for ref in record.frames if ref.peer == me]
    if owed_N is None and not any(left_N is not None for _, left_N in mine):
        return None
    slices_took_the_rest = not keeps and any(ref.peer == me for ref in record.contributors)
    after_N = fresh_zeros(numel) if owed_N is None or slices_took_the_rest else owed_N.clone()
    for (_, start, stop), left_N in mine:
        after_N[start:stop] = 0.0 if left_N is None else left_N
    return after_N
