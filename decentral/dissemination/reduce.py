"""Each owner sums its parts of the contributors' slices and returns re-quantised results, one for each part.

Right for dense frames: sent per peer and round ``2 (N-1)/N * body``, whatever N. Everybody applies the owners'
result frames, so all apply the same bits although sums were made in one place only (`decentral.replica.reduction`).
Here: which parts are whose, and in which order slices go.

Source: the bandwidth-optimal all-reduce of Patarasuk and Yuan, 2009; re-quantising once per owner instead of once
per hop, as decentral training runs do since INTELLECT-1 (Jaghouar et al., 2024, arXiv:2412.01152).
"""

from __future__ import annotations

from itertools import zip_longest

from decentral.flow.send_queue import shifted
from decentral.wire.keys import PeerId
from decentral.wire.messages import ReducePlan


def owned_parts(plan: ReducePlan, peer: PeerId) -> list[int]:
    """The indices of the parts that ``peer`` owns in ``plan``."""
    return [part for part, (owner, _, _) in enumerate(plan.partition) if owner == peer]


def in_order(plan: ReducePlan, me: PeerId) -> list[int]:
    """The parts in the order in which ``me`` sends their slices: of each owner the first, then the second."""
    owners = shifted({owner for owner, _, _ in plan.partition}, me)
    rounds = zip_longest(*(owned_parts(plan, owner) for owner in owners))
    return [part for parts in rounds for part in parts if part is not None]
