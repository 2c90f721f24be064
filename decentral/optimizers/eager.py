"""Eager updates: while a round is in flight each peer trains on from where its own share of the step will lead.

the paper, of each peer:  d_i = mean' + (change_i - change_i')/M ;  x_i <- Nesterov(x_i, d_i)     ': of the round before
here, when a commit comes:        m <- mu*m + g ;  x <- x - lr*(g + mu*m)             DiLoCo's step, alike on all peers
from a contribution to its commit:  b_i <- mu*b_i + change_i/M ;  live_i <- x - lr*(change_i/M + mu*b_i)

Nesterov's step is linear in what it is given. So the paper's x_i, which is a round late but for the peer's own change,
is the sum of two: the anchor after the last commit, which is one on all peers, and the own share of the step to come.
That one is in the live model alone, and gives way to the step of all when the commit is there: a test has the paper's
recursion beside it. A sole peer knows all of the step before it is made, and goes as DiLoCo without delay.

Without it (``diloco`` with ``overlap``) a peer trains on from all of its own change until the commit comes. Which is
better depends on how much a round solves. Three noisy quadratics, commits ten of ten steps late, the anchor's excess
loss at (0.4, 0.9): with slow inner steps 22.1 against 27.5 after 10 rounds, 5.4 against 7.7 after 20, .38 both after
60; with four times as fast ones 21 against 9.9, and 1.6 against .8 in the end, as the own momentum goes too far where
there is little left to go (experiments/eager). ``outer.overlap`` = 0 waits for the round, and it is DiLoCo; the preset
has 1: a commit is merged as soon as it is there, while the paper takes it at the end of the next round.

What differs from the paper. M is the number of contributors of the last commit that this peer saw; before the first it
is not known, and the peer trains on from its own change. A round that takes nothing of it counts as a change of zero.
The changes of its share are as they were measured; compression, weights and norm clip are in what all apply.

Source: Kale, Douillard, Donchev, "Eager Updates for Overlapped Communication and Computation in DiLoCo", 2025,
arXiv:2502.12996. The rate and the momentum are Streaming DiLoCo's, arXiv:2501.18512: the paper's were not retrieved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import Live, OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import nesterov

__all__ = ["Eager"]

# ``own``: "change" as it was contributed (N,) ; "momentum" M*b_i (N,) ; "peers" M (1,)


@dataclass(frozen=True, slots=True)
class Eager(OuterMethod):
    """DiLoCo, whose peers go ahead by their own share; state {"momentum": (N,)}."""

    name: ClassVar[str] = "eager"
    equation: ClassVar[str] = (
        "m <- mu*m + g ; x <- x - lr*(g + mu*m) ; until then live_i <- x - lr*(c_i + mu*b_i), "
        "b_i <- mu*b_i + c_i, c_i = change_i/M"
    )
    source: ClassVar[str] = 'Kale, Douillard, Donchev, "Eager Updates", 2025, arXiv:2502.12996'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.4, "momentum": 0.9},
        compressor="int8(block=4096)",
        exchange="reduce",
        overlap=1,
        norm_clip="median",
    )
    lr: float = rate(0.4)
    momentum: float = key(0.9, "of the outer step; 0 is none", within="[0, 1)")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def meanwhile(self, live: Live, fragment: int, anchor_N: Tensor, local_N: Tensor) -> Tensor | None:
        """The anchor and the own share of its next step."""
        own, change_N = live.own(fragment), anchor_N - local_N
        own["change"] = change_N
        if "peers" not in own:
            return None
        momentum_N = self._momentum(own, change_N)
        return anchor_N - (change_N + momentum_N * self.momentum) * (self.lr / float(own["peers"]))

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """Let what was sent, or nothing, enter the own momentum."""
        own = live.own(fragment)
        own.pop("change", None)
        change_N = None if sent is None else sent.get("change")
        if change_N is not None:
            own["momentum"] = self._momentum(own, change_N)
        elif "momentum" in own:
            own["momentum"] = own["momentum"] * self.momentum
        if peers:
            own["peers"] = torch.tensor([len(peers)], dtype=torch.float32, device="cpu")

    def progress_lost(self, live: Live, fragment: int) -> None:
        """Keep what moved the anchor in the momentum: only what was not sent is lost."""
        live.own(fragment).pop("change", None)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step."""
        after, momentum = nesterov(anchor, received["change"], state["momentum"], self.lr, self.momentum)
        return after, {"momentum": momentum}

    def _momentum(self, own: State, change_N: Tensor) -> Tensor:
        if "momentum" not in own:
            return change_N
        kept_N = own["momentum"] * self.momentum
        return kept_N + change_N
