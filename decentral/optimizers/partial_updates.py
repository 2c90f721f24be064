"""Partial parameter updates: between two rounds each peer trains one slice of the parameters, and the rest stands.

inner step: local <- where(own slice, local, anchor)
g = sum over a slice's owners w_i (anchor - local_i) / sum of their w_i ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)

Every peer runs the whole model, and sends zeros outside its slice, which int8's entropy coder makes small: of Gaussian
changes .63 of the bytes are left with 2 slices, .36 with 4; of bf16 .97. A coordinate's divisor is the number of its
owners; what others send there is not looked at. Where a round had none of a slice, x and m stay.

Who owns what: a peer's place among the contributors of the last round that took it, modulo S. With fewer contributors
than slices the places move on every round. Before its first a slice follows from the id. A peer says which it trained.

What differs from the paper. There subsets are fixed, and the backward pass knows them; here a slice is 1/S of each
fragment, stays while who contributes stays, and only bytes are saved: gradients and moments are of all. A fixed subset
that saves memory, too, is what a peer of any plain method trains whose memory is bounded (docs/weak-machines.md). The
outer step is DiLoCo's. With ``overlap``, steps on a slice before its owner's place changed are in the next
contribution, too.

Source: Filippova et al., "Partial Parameter Updates for Efficient Distributed Training", 2025, arXiv:2509.22418.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import (
    MAX_SUMMARY_NBYTES,
    Contributor,
    Layout,
    Live,
    Preset,
    RoundInfo,
    Span,
    Speaking,
    State,
    key,
    numel_of,
    rate,
)
from decentral.optimizers.owners import hold, is_still, put_back, scale_to_owners
from decentral.optimizers.steps import nesterov

__all__ = ["PartialUpdates", "pack_slices", "read_slices", "span_of"]

_MOST = 1024  # slices: fewer peers than that train one model


@dataclass(frozen=True, slots=True)
class PartialUpdates(Speaking):
    """Nesterov on a mean over owners; state {"momentum": (N,), "turn": (1,)}: the slice of the first contributor."""

    name: ClassVar[str] = "partial_updates"
    equation: ClassVar[str] = "a peer trains slice s ; g_s = mean over owners ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Filippova et al., "Partial Parameter Updates", 2025, arXiv:2509.22418'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.9}, compressor="int8(block=4096)", exchange="reduce"
    )
    divides: ClassVar[bool] = True
    lr: float = rate(0.7)
    momentum: float = key(0.9, "of the outer step; 0 is none", within="[0, 1)")
    slices: int = key(2, "parts of the model, of which each peer trains one; 1 is DiLoCo", within=f"[1, {_MOST}]")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and the first contributor has the first slice."""
        return {"momentum": torch.zeros_like(anchor), "turn": anchor.new_zeros(1)}

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Remember what must not move."""
        hold(live, fragment, self._others(live, fragment))

    def after_inner_step(self, live: Live, fragment: int) -> None:
        """Put it back."""
        put_back(live, fragment, self._others(live, fragment))

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """The slice that is trained, and others in which something is left of before."""
        mine, numel = self._slice_of(live, fragment), numel_of(live.layout(fragment))
        others = [s for s in range(self.slices) if s != mine and sent and not is_still(sent[0], [self._span(s, numel)])]
        return pack_slices([mine, *others])

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """The slice of the place that this peer had among the contributors."""
        if sent is not None and live.peer in peers:
            place = peers.index(live.peer) + int(state["turn"])
            live.own(fragment)["slice"] = state["turn"].new_tensor([place % self.slices])

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Nothing for who names no slice."""
        return [
            weight if read_slices(one, self.slices) else 0.0 for one, weight in zip(contributors, given, strict=True)
        ]

    def outside(self, contributor: Contributor, layout: Layout) -> list[Span]:
        """The slices that it does not name."""
        named, numel = read_slices(contributor, self.slices), numel_of(layout)
        return [self._span(number, numel) for number in range(self.slices) if number not in named]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step of the slices that had an owner."""
        parts = [[self._span(number, anchor.numel())] for number in range(self.slices)]
        owned, came = [read_slices(one, self.slices) for one in info.contributors], len(info.contributors)
        with torch.no_grad():
            change, has_owner = scale_to_owners(received["change"], parts, owned, info.weights)
            after, momentum = nesterov(anchor, change, state["momentum"], self.lr, self.momentum)
            turn = (state["turn"] + (came if came < self.slices else 0)) % self.slices
            momentum = torch.where(has_owner, momentum, state["momentum"])
            return torch.where(has_owner, after, anchor), {"momentum": momentum, "turn": turn}

    def _others(self, live: Live, fragment: int) -> list[Span]:
        mine, numel = self._slice_of(live, fragment), numel_of(live.layout(fragment))
        return [self._span(number, numel) for number in range(self.slices) if number != mine]

    def _span(self, number: int, numel: int) -> Span:
        return span_of(number, self.slices, numel)

    def _slice_of(self, live: Live, fragment: int) -> int:
        if "slice" in live.own(fragment):
            return int(live.own(fragment)["slice"]) % self.slices
        return int.from_bytes(hashlib.blake2b(live.peer, digest_size=8).digest(), "little") % self.slices


# ---- equal slices of a fragment ----
#
# A peer says which of them it trained: in a summary, uint16 each, little-endian.

_SLICE = struct.Struct("<H")
_NAMED_SLICES = MAX_SUMMARY_NBYTES // _SLICE.size


def span_of(number: int, slices: int, numel: int) -> Span:
    """Where slice ``number`` of so many begins and stops."""
    return numel * number // slices, numel * (number + 1) // slices


def pack_slices(named: Sequence[int]) -> bytes:
    """The first 32; what moves in a slice that is not named counts nothing."""
    return b"".join(map(_SLICE.pack, named[:_NAMED_SLICES]))


def read_slices(contributor: Contributor, slices: int) -> tuple[int, ...]:
    """The slices that it names; none where it names one that there is not, or one twice."""
    if len(contributor.summary) % _SLICE.size:
        return ()
    named = tuple(int(number) for (number,) in _SLICE.iter_unpack(contributor.summary))
    return named if len(set(named)) == len(named) and all(number < slices for number in named) else ()
