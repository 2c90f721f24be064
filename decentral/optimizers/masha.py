"""MASHA: few values on the way there, few on the way back, and both ends remember what they left out.

a_i <- beta*a_i + change_i ;  send q_i = C(a_i) ;  a_i <- a_i - q_i           each peer: its compressor and feedback
e <- keep*e + mean(q_i) ;  x <- x - lr*C(e) ;  e <- e - C(e)                  all alike: C, one of ``parts`` values of e

MASHA2 has contractive compressors both ways with error feedback, and that is what makes sense here: the second line is
what its server does, made by every peer, with e in the shared state. ``choose`` = "largest" is its top-k; "random" is
the rand-k of MASHA1, not scaled, so that it is contractive, too, and drawn by the round's number. What it is good for:
the anchor moves in one of ``parts`` values, however many peers sent, so what comes back to those who follow a run is as
small as what one peer sends: ``follow --delta`` writes .012 of the anchor's bytes for a round of 8 or 16 peers, where
sparseloco's takes .058 and .095 (a million Gaussian values, 64 of 4096 sent). Values of equal size move together.
Choosing takes 1.4 s for 10 million values on one core.

Nothing comes back over the wire in a gather, where each peer has the frames. In a reduce owners send results through
the run's compressor and owe what it lost: there ``local_sgd`` with feedback is both ways already, without this.

What waits is learnt again in every round. At a share h that a round solves of the distance to the optimum, waiting for
``parts`` rounds overshoots by up to parts*h. On the quadratics of the laws (8 peers; experiments/both_ways) "largest"
with keep = 1 is stable at 4 parts for h up to 1 and not at 8; at 64 parts for h up to .1, where it costs nothing (loss
.042 after 500 rounds, as with all moving). "random" is stable at 2 parts and not at 4 for h up to 1; at 16 and not at
32 for h up to .1, and at 64 with keep = .95 only (.162). The preset has 4, as nobody knows a model's h beforehand: with
k = 160 of 4096 nothing waits until more than six peers send other values, and from there on what followers download
grows no further. 16 or 64 are for runs whose rounds are known to change little.

What differs from the paper. It solves variational inequalities, by extragradient steps from a reference point w whose
field all know from rounds that are sent whole: z' = tau*z + (1-tau)*w - gamma*F(w), and F(z') - F(w) is compressed. A
minimisation gains nothing from the second evaluation, and a change of H inner steps is no field at a point: neither w
nor its whole rounds are here. What differences to F(w) do for a compressor ``feedback = "ef21"`` does.

Source: Beznosikov, Richtarik, Diskin, Ryabinin, Gasnikov, "Distributed Methods with Compressed Communication for
Solving Variational Inequalities, with Theoretical Guarantees" (MASHA), 2021, arXiv:2110.03313. Constants are ours.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import MOST_PARTS, draw_one_of_each

__all__ = ["Masha"]

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Masha(OuterMethod):
    """A mean that moves few parameters and owes the rest; state {"debt": (N,)}."""

    name: ClassVar[str] = "masha"
    equation: ClassVar[str] = "e <- keep*e + g ; x <- x - lr*C(e) ; e <- e - C(e), C: the largest, or those drawn"
    source: ClassVar[str] = 'Beznosikov et al., "MASHA", 2021, arXiv:2110.03313'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.6, "parts": 4, "keep": 1.0, "choose": "largest"},
        compressor="topk(k=160, chunk=4096) >> signmag2",
        feedback="ef(beta=0.95)",
        exchange="gather",
        norm_clip="median",
        # A demo has some 50 rounds. With 64 parts, k = 64 and rate 1 it ended behind one peer alone, 1.714 nats against
        # 1.602; with these at 1.495 against 1.648 (one run each).
        demo={"outer": {"learning_rate": 2.0, "parts": 16}},
    )
    lr: float = rate(1.0)
    parts: int = key(64, "the parameters that a round moves are one of so many; 1: all", within=f"[1, {MOST_PARTS}]")
    keep: float = key(1.0, "of what is owed from round to round", within="[0, 1]")
    choose: str = key("largest", "which: the largest of what is owed, or random: drawn by the round's number")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if self.choose not in ("largest", "random"):
            raise ConfigError(f"{self}: choose must be largest or random; largest is MASHA2's")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Nothing is owed."""
        return {"debt": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Move what is chosen by all that is owed of it."""
        with torch.no_grad():
            owed = state["debt"] * self.keep
            owed += received["change"]
            moves = self._choose(owed, info.step)
            zero = torch.zeros_like(owed)
            return anchor - torch.where(moves, owed, zero) * self.lr, {"debt": torch.where(moves, zero, owed)}

    def _choose(self, owed_N: Tensor, step: int) -> Tensor:
        """Return the places that move, bool (N,). Of equal sizes all: their order is the machine's choice."""
        if self.parts == 1 or not owed_N.numel():
            return torch.ones_like(owed_N, dtype=torch.bool)
        if self.choose == "random":
            return draw_one_of_each(self.parts, step, owed_N.numel())
        size_N, count = owed_N.abs(), math.ceil(owed_N.numel() / self.parts)
        return size_N >= size_N.kthvalue(owed_N.numel() - count + 1).values
