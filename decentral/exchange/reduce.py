"""Each owner sums its partition of the contributors' slices and returns one re-quantised result.

Right for dense frames: sent per peer and round ``2 (N-1)/N * body``, whatever N. Everybody applies the owners'
result frames, so all apply the same bits although sums were made in one place only.

Source: the bandwidth-optimal all-reduce of Patarasuk and Yuan, 2009; re-quantising once per owner instead of once
per hop, as decentral training runs do since INTELLECT-1 (Jaghouar et al., 2024, arXiv:2412.01152).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from decentral.exchange.codec import Codec, range_shapes
from decentral.optimizers.aggregate import mean_pseudo_gradient
from decentral.wire.keys import PeerId
from decentral.wire.messages import Plan


@dataclass(slots=True)
class Reduction:
    """The partition this peer owns in one plan: collects slices, then makes the result."""

    plan: Plan
    part: int
    slices: dict[PeerId, Tensor] = field(default_factory=dict)

    @property
    def range(self) -> tuple[int, int]:
        """The elements owned, [start, stop)."""
        _, start, stop = self.plan.partition[self.part]
        return start, stop

    def missing(self) -> tuple[PeerId, ...]:
        """Contributors whose slice has not come."""
        return tuple(ref.peer for ref in self.plan.contributors if ref.peer not in self.slices)

    def result(self, codec: Codec, weights: Sequence[float]) -> bytes:
        """The mean over exactly the plan's contributors, each by its weight, compressed once."""
        refs = zip(self.plan.contributors, weights, strict=True)
        weighted = [(ref.peer, self.slices[ref.peer], weight) for ref, weight in refs]
        mean_N = mean_pseudo_gradient(weighted)
        return codec.encode(mean_N, {}, range_shapes(*self.range)).body


def owned_part(plan: Plan, peer: PeerId) -> int | None:
    """The index of the partition that ``peer`` owns in ``plan``, or None."""
    return next((part for part, (owner, _, _) in enumerate(plan.partition) if owner == peer), None)


def assembled(
    plan_partition: tuple[tuple[PeerId, int, int], ...], parts: Mapping[int, Tensor], out_N: Tensor
) -> Tensor:
    """Lay the owners' decoded results into ``out_N`` (flat, float32) and return it."""
    for part, (_, start, stop) in enumerate(plan_partition):
        out_N[start:stop] = parts[part]
    return out_N
