"""SPARTA: every few inner steps a few of the parameters are averaged; SPARTA-DiLoCo: now and then all, with momentum.

each round: x_S <- mean(local_S) ; local_S <- x_S          S: one parameter of each run of ``parts``; the rest goes on
each whole-th round: g = start - mean(local) ;  m <- mu*m + g ;  x <- start - lr*(g + mu*m) ;  start <- local <- x

All peers know S from the round's number, so no index is sent: one of each run of ``parts`` parameters
(`draw_one_of_each`), and each of them once in ``parts`` rounds. What a peer learnt of parameters that are not in S
stays in its live model (``drawn``), and a newcomer's is the anchor's.

The anchor is therefore patched together of means of the last ``parts`` rounds, and one model again after a whole round:
with whole = 0 it never is, so let ``run.rounds`` be a multiple of ``whole``. After 100 rounds of three peers on a
quadratic, at 40 parts, it is 15.4 from the optimum with whole = 0, where live models are 13.1; 13.1 as they with 20.

A peer sends zeros outside S, which int8's entropy coder makes small: of Gaussian changes .051 of the bytes are left
with 40 parts, .014 with 200 (.10 bits per parameter). A debt is sent when it is owed and not when its parameter is
drawn, so nothing is lost with ``compressor.feedback``, and more is sent. Who misses more than two rounds starts from
the anchor, as in every method, and gives up what it learnt since its parameters were drawn. Who misses a whole round
keeps them, but brings of each no more than the others do (``Drawn.rounds``); one of a few costs nothing.

What differs from the code. There each parameter is drawn with probability p in each step, by one peer that tells the
others where, and some are not for long; a variant in it cuts all parameters into 1/p parts at random, and that is
nearly this one. There the DiLoCo step is made by one peer. Rounds are after ``inner.steps`` of them, 5 in the preset,
since a round over the internet is no all-reduce: 20 rounds make the 100 steps between two DiLoCo steps, and 40 parts
let half of all be averaged in between, as 0.5 % in each of 100 steps do.

Source: Beton et al., "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging", 2025,
openreview.net/forum?id=stFPf3gzq1; constants from the authors' code, exo-explore/gym (SPARTAStrategy,
SPARTADiLoCoStrategy): p 0.005 in each step, a DiLoCo step of (0.7, 0.9) in each 100th.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import Drawn, OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import MOST_PARTS, draw_one_of_each, nesterov

__all__ = ["Sparta"]

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Sparta(OuterMethod):
    """A mean of what is drawn, and Nesterov in whole rounds; state {"momentum": (N,), "start": (N,)}, none without."""

    name: ClassVar[str] = "sparta"
    equation: ClassVar[str] = (
        "x_S <- mean(local_S), S drawn by round ; each whole-th: g = start - mean(local) ; m <- mu*m + g ; "
        "x <- start - lr*(g + mu*m)"
    )
    source: ClassVar[str] = 'Beton et al., "Sparse Parameter Averaging", 2025, openreview.net/forum?id=stFPf3gzq1'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.9, "parts": 40, "whole": 20},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
        inner={"steps": 5},
        demo={"outer": {"parts": 10, "whole": 5}},  # a demo has a few dozen rounds
    )
    lr: float = rate(0.7)
    momentum: float = key(0.9, "of the steps in whole rounds; 0 is none", within="[0, 1)")
    parts: int = key(
        200,
        "rounds in which each parameter is averaged once: 200 is 0.5 % of them in each",
        within=f"[1, {MOST_PARTS}]",
    )
    whole: int = key(
        100, "rounds from one in which all are to the next, a divisor of run.rounds; 0: never", within="[0, inf)"
    )

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and the first whole step is from here."""
        return {"momentum": torch.zeros_like(anchor), "start": anchor.detach().clone()} if self.whole else {}

    def drawn(self, step: int) -> Drawn:
        """Draw one of each run of ``parts``; behind it are the rounds since it was drawn last, or all were."""
        is_all = self.parts == 1 or self._is_whole(step)
        since = step % self.whole + 1 if self.whole else step + 1
        return Drawn(
            None if is_all else partial(draw_one_of_each, self.parts, step), min(self.parts, since), self.parts
        )

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean where it is known; in a whole round a step from where the last one ended."""
        with torch.no_grad():
            if not self._is_whole(info.step):
                return anchor - received["change"], {name: tensor.clone() for name, tensor in state.items()}
            change = (state["start"] - anchor) + received["change"]
            after, momentum = nesterov(state["start"], change, state["momentum"], self.lr, self.momentum)
            return after, {"momentum": momentum, "start": after.clone()}

    def _is_whole(self, step: int) -> bool:
        return self.whole > 0 and (step + 1) % self.whole == 0
