"""SPES: of a mixture of experts each peer trains some, and the shared parts are everybody's.

x_e <- x_e - lr*mean over the owners of e (anchor - local) ;  shared: x <- x - lr*mean over all (anchor - local)
warm-up, every merge_every-th round: x_e <- x_e + a*(mean of the 4 experts nearest to e - x_e)
                                     a = merge_rate*(1 - round/merge_rounds)

Every peer runs all experts, but changes its own and the shared parts. Others stand still and are sent as zeros, of
which int8's entropy coder makes little (see `partial_updates`). The warm-up lets experts have what others learnt.
Nearest is by the cosine of an expert's first tensor, in each layer. A model without experts is averaged plainly.

Who owns what: the experts whose number, modulo the contributors of the last round that took this peer's contribution,
is its place among them. Before its first round a peer trains all. Each says its place beside its offer, or counts
nothing; what it sends of other experts is not looked at. Experts without an owner in a round stay.

What differs from the paper. Its nodes are numbered once, n experts in a row; here places follow who is there, and the
divisor of an expert is its owners. Only bytes are saved: gradients and moments are of all experts. Merging counts
rounds and not steps: every 5 are its 500 steps at H = 100; the decay over 50 is ours.

Source: Zhang et al., "Pretraining A Large Language Model using Distributed GPUs: A Memory-Efficient Decentralized
Paradigm" (SPES), 2026, arXiv:2602.11543; merging as in zjr2000/SPES.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import (
    Contributor,
    Layout,
    Live,
    Preset,
    RoundInfo,
    Span,
    Speaking,
    State,
    key,
    rate,
)
from decentral.optimizers.owners import (
    ALL,
    Place,
    by_expert,
    experts_of,
    hold,
    is_still,
    merge_owners,
    owns,
    pack_places,
    put_back,
    read_places,
    scale_to_owners,
)

__all__ = ["SPES"]


@dataclass(frozen=True, slots=True)
class SPES(Speaking):
    """Plain averaging at lr = 1, of an expert among its owners; no state."""

    name: ClassVar[str] = "spes"
    equation: ClassVar[str] = "x_e <- x_e - lr*mean over owners ; x <- x - lr*mean ; x_e <- x_e + a*(nearest - x_e)"
    source: ClassVar[str] = 'Zhang et al., "SPES", 2026, arXiv:2602.11543'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0},
        compressor="int8(block=4096)",
        exchange="reduce",
        model={"experts": 8},
        # Others' experts stand still for H steps: H = 10 is 0.055 nats ahead of a peer alone after 200 steps, 25 0.022
        demo={"model": {"hidden": 96, "layers": 2}, "inner": {"steps": 10, "learning_rate": 2e-3}},
    )
    divides: ClassVar[bool] = True
    lr: float = rate(1.0)
    merge_rate: float = key(0.05, "of the warm-up: share of the way to the nearest experts; 0 is none", within="[0, 1]")
    merge_every: int = key(5, "rounds from one merging of experts to the next", within="[1, inf)")
    merge_rounds: int = key(50, "rounds until the warm-up is over", within="[1, inf)")

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Remember what must not move."""
        hold(live, fragment, self._others(live, fragment))

    def after_inner_step(self, live: Live, fragment: int) -> None:
        """Put it back."""
        put_back(live, fragment, self._others(live, fragment))

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Its place, and what else names the experts in which something is left of earlier ones."""
        parts, now = by_expert(experts_of(live.layout(fragment))), self._place_of(live, fragment)
        moved = [e for e, part in parts.items() if sent and not is_still(sent[0], part)]
        return pack_places(now, self._place_of(live, fragment, "before"), moved, 1 + max(parts, default=0))

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """The place that this peer had among the contributors."""
        if sent is not None and live.peer in peers:
            own = live.own(fragment)
            own["before"] = _to_tensor(self._place_of(live, fragment))
            own["place"] = _to_tensor((peers.index(live.peer), len(peers)))

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Nothing for who names no place."""
        return [weight if read_places(one) else 0.0 for one, weight in zip(contributors, given, strict=True)]

    def outside(self, contributor: Contributor, layout: Layout) -> list[Span]:
        """The experts of others."""
        named = read_places(contributor)
        parts = by_expert(experts_of(layout))
        return [span for expert, part in parts.items() if not owns(named, expert) for span in part]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A mean among owners, and in the warm-up the merging."""
        layers = experts_of(dict(zip(info.names, info.shapes, strict=False)))
        parts, said = by_expert(layers), [read_places(one) for one in info.contributors]
        owned = [[n for n, e in enumerate(parts) if owns(named, e)] for named in said]
        with torch.no_grad():
            change, _ = scale_to_owners(received["change"], list(parts.values()), owned, info.weights)
            after = anchor - change * self.lr
            rate = self.merge_rate * (1 - info.step / self.merge_rounds)
            is_due = (info.step + 1) % self.merge_every == 0 and rate > 0
            return merge_owners(after, layers, rate) if is_due else after, {}

    def _others(self, live: Live, fragment: int) -> list[Span]:
        place, count = self._place_of(live, fragment)
        parts = by_expert(experts_of(live.layout(fragment)))
        return [span for expert, part in parts.items() if expert % count != place for span in part]

    def _place_of(self, live: Live, fragment: int, when: str = "place") -> Place:
        noted = live.own(fragment).get(when)
        place, count = ALL if noted is None else noted.tolist()
        return int(place), int(count)


def _to_tensor(place: Place) -> Tensor:
    return torch.tensor(place, dtype=torch.float32, device="cpu")
