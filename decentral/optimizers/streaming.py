"""Streaming DiLoCo: DiLoCo's outer step per fragment, merged into the live parameters tau inner steps later.

x_p <- Nesterov(x_p, mean(x_p - local_p)) ;  local_p <- alpha*local_p + (1-alpha)*x_p

alpha weighs the *local* copy: 0 overwrites it, 1 never listens, 0.5 is the paper's.

Fragments are the paper's: three transformer blocks in each at every depth L, strided (block b in fragment b mod P-1),
and one more for all that is in no block (embeddings, head, last norm): P = L/3 + 1. The preset has that for the
built-in model, and 3 at least; a script's blocks are not known when its terms are written, and it has 3.

What differs from the paper. A fragment is due every H // P inner steps, so each one every P * (H // P). The merge is
tau steps after the contribution at the earliest; the paper waits for the average there, while here training goes on
until the commit has come. The mean is over those who contributed, of what each sent, decoded to float32 as in the
paper; scale, block and rounding of E3M0 are ours (`e3m0`).

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
arXiv:2501.18512: outer lr 0.4, momentum 0.9, alpha 0.5, tau 1.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import blend, nesterov

__all__ = ["StreamingDiLoCo"]


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo(OuterMethod):
    """Nesterov per fragment, blended into the live copy. State {"momentum": (N,)}."""

    name: ClassVar[str] = "streaming"
    equation: ClassVar[str] = "m <- mu*m + g ; x <- x - lr*(g + mu*m) ; local <- alpha*local + (1-alpha)*x"
    source: ClassVar[str] = 'Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.4, "momentum": 0.9, "alpha": 0.5},
        compressor="e3m0(block=256)",
        exchange="reduce",
        fragments=3,  # at least: see preset_manifest
        overlap=1,
        # 24, a multiple of its three fragments. 4 of the 8 steps between two of them: a round on a busy machine takes
        # about a second. A fragment moves every 24 steps, six times in 144: at 0.7 sooner than a peer alone, at 0.4 not
        demo={"inner": {"steps": 24}, "outer": {"learning_rate": 0.7, "overlap": 4}},
    )
    on_device: ClassVar[bool] = True  # a blend is one of any device
    lr: float = rate(0.4)
    momentum: float = key(0.9, "of the outer step; 0 is none", within="[0, 1)")
    alpha: float = key(0.5, "weight of the live copy in a merge", within="[0, 1]")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step of the fragment's anchor."""
        after, buffer = nesterov(anchor, received["change"], state["momentum"], self.lr, self.momentum)
        return after, {"momentum": buffer}

    def merge(self, live_N: Tensor, sent_N: Tensor, anchor_N: Tensor) -> Tensor:
        """A blend of the live copy and the anchor."""
        return blend(live_N, anchor_N, self.alpha)
