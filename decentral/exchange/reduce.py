"""Each owner sums its parts of the contributors' slices and returns re-quantised results, one for each part.

Right for dense frames: sent per peer and round ``2 (N-1)/N * body``, whatever N. Everybody applies the owners'
result frames, so all apply the same bits although sums were made in one place only.

Compressing a result loses something as compressing a slice does. Under feedback the owner owes it, in units of the
mean: it adds it to the next result that it makes of these elements (`decentral.rounds.owing`).

Source: the bandwidth-optimal all-reduce of Patarasuk and Yuan, 2009; re-quantising once per owner instead of once
per hop, as decentral training runs do since INTELLECT-1 (Jaghouar et al., 2024, arXiv:2412.01152).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torch import Tensor

from decentral.exchange.codec import Codec, Encoded, range_shapes
from decentral.exchange.turns import shifted
from decentral.optimizers.aggregate import mean_pseudo_gradient
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId
from decentral.wire.messages import Plan


@dataclass(slots=True)
class Reduction:
    """One part that this peer owns in a plan: collects slices, then makes the result."""

    plan: Plan
    part: int
    slices: dict[PeerId, Tensor] = field(default_factory=dict)
    tails: dict[PeerId, Tensor] = field(default_factory=dict)  # the contributors' buffers, where the part has them

    @property
    def range(self) -> tuple[int, int]:
        """The elements owned, [start, stop)."""
        _, start, stop = self.plan.partition[self.part]
        return start, stop

    def missing(self) -> tuple[PeerId, ...]:
        """Contributors whose slice has not come."""
        return tuple(ref.peer for ref in self.plan.contributors if ref.peer not in self.slices)

    def told_buffers(self) -> list[Tensor]:
        """The buffers of exactly the plan's contributors, in peer order; nothing where the part carries none."""
        peers = sorted(ref.peer for ref in self.plan.contributors)
        return [self.tails[peer] for peer in peers if peer in self.tails]

    def result(
        self,
        codec: Codec,
        weights: Sequence[float],
        owed_N: Tensor | None = None,
        scales: Sequence[float] | None = None,
    ) -> Encoded:
        """The mean over exactly the plan's contributors, each by its weight and scale, and what this owner owes of
        these elements, compressed once; "debt" in its feedback is what is owed after a commit that names it.
        """
        refs = zip(self.plan.contributors, weights, strict=True)
        weighted = [(ref.peer, self.slices[ref.peer], weight) for ref, weight in refs]
        mean_N = mean_pseudo_gradient(weighted, scales)
        owed = {} if owed_N is None else {"debt": owed_N}
        return codec.for_results().encode(mean_N, owed, range_shapes(*self.range))


class Results:
    """What results decoded to when they came, so that the outer step need not decode them again.

    Kept for the newest plan only, and one for each part: an owner that sends several fills no memory.
    """

    def __init__(self) -> None:
        self._plan = (0, 0)
        self._of_part: dict[int, tuple[bytes, Tensor]] = {}

    def add(self, frame: Frame, decoded: Tensor) -> None:
        """Remember a checked result."""
        header = frame.header
        plan = (header.round, header.plan)
        if plan > self._plan:
            self._plan, self._of_part = plan, {}
        if plan == self._plan:
            self._of_part.setdefault(header.part, (frame.hash, decoded))

    def by_frame(self) -> dict[bytes, Tensor]:
        """Those that are known, by their frames' hashes."""
        return dict(self._of_part.values())

    def forget(self) -> None:
        """The round is over."""
        self._of_part = {}


def owned_parts(plan: Plan, peer: PeerId) -> list[int]:
    """The indices of the parts that ``peer`` owns in ``plan``."""
    return [part for part, (owner, _, _) in enumerate(plan.partition) if owner == peer]


def in_order(plan: Plan, me: PeerId) -> list[int]:
    """The parts in the order in which ``me`` sends their slices: of each owner the first, then the second."""
    owners = shifted({owner for owner, _, _ in plan.partition}, me)
    rounds = zip_longest(*(owned_parts(plan, owner) for owner in owners))
    return [part for parts in rounds for part in parts if part is not None]


def assembled(
    plan_partition: tuple[tuple[PeerId, int, int], ...], parts: Mapping[int, Tensor], out_N: Tensor
) -> Tensor:
    """Lay the owners' decoded results into ``out_N`` (flat, float32) and return it."""
    for part, (_, start, stop) in enumerate(plan_partition):
        out_N[start:stop] = parts[part]
    return out_N
