"""Just one byte: a peer sends a byte per inner step, and everybody makes the whole step of it.

inner step s: g_s = dL/dz_s, z_s of random signs ;  at a round: x <- x - lr/sqrt(n) * sum over all peers of g_s * z_s

n: all derivatives of those who came. Each is a byte in the offer's summary, beside a seed and a number that say z_s:
12 + H bytes a round, whatever the model's size, and an empty frame's header. Every peer makes the z_s again: 1 ms of a
core each for a million values. After an absence only the newest are told, as many as inner steps count.

An inner optimizer that only goes forward (``[inner] optimizer = "spsa"``) measures g_s by two losses. Beside one that
goes by gradients, g_s is the gradient along z_s, which becomes the gradient: the same to the order of ``eps`` squared.

What differs from the paper. There a peer stands still between two rounds; here inner steps walk, the commit replaces
the walk, and g_s is measured where it is, as in FedKSeed. Directions there are Gaussian, by bits that depend on the
device; its byte has no sign, see `levels`. The authors' code divides the rate by n; here by sqrt(n), as the sum grows.

Robustness: a byte is worth 234 at most. Who lies moves all by that, as anyone's gradient would.

Source: Zelikman et al., "Just One Byte (per gradient): A Note on Low-Bandwidth Decentralized Language Model Finetuning
Using Shared Randomness", 2023, arXiv:2306.10015. Local steps: Qin et al., "Federated Full-Parameter Tuning of
Billion-Sized Language Models with Communication Cost under 18 Kilobytes" (FedKSeed), 2023, arXiv:2312.06353.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, State
from decentral.optimizers.live import Derivative, Layout, Live
from decentral.optimizers.round_info import Contributor, RoundInfo
from decentral.optimizers.steps import check_rate
from decentral.optimizers.zeroth_order.directions import Direction
from decentral.optimizers.zeroth_order.levels import byte_of, level_of
from decentral.optimizers.zeroth_order.noted import keep_newer, next_direction, note, noted
from decentral.optimizers.zeroth_order.told import MOST, ToldDerivatives
from decentral.tensors.ops import float32

__all__ = ["JustOneByte"]

# Shape suffix: N = values of a fragment, flat float32.


@dataclass(frozen=True, slots=True)
class JustOneByte(OuterMethod):
    """Descent along random directions; no state."""

    name: ClassVar[str] = "just_one_byte"
    equation: ClassVar[str] = "inner: g_s = dL/dz_s ; x <- x - lr/sqrt(n)*sum(g_s*z_s), z_s from seeds"
    source: ClassVar[str] = 'Zelikman et al., "Just One Byte (per gradient)", 2023, arXiv:2306.10015'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.002},
        compressor="none",
        exchange="gather",
        inner={"optimizer": "spsa", "learning_rate": 2e-4, "weight_decay": 0.0, "clip": None},
        demo={
            "model": {"hidden": 32, "layers": 1, "context": 64},  # 21,600 parameters: few, so that steps can be long
            "inner": {"learning_rate": 3e-3, "steps": 16, "weight_decay": 0.0, "clip": None},
            "outer": {"learning_rate": 0.012},
        },
    )
    lr: float = 0.002

    def __post_init__(self) -> None:
        check_rate(self, self.lr)

    @property
    def most_steps(self) -> int | None:
        """As many as a summary has bytes for."""
        return MOST

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Where the step goes by a gradient: note it along a direction, and let the step go by no more than that."""
        if live.derivatives is not None or (gradient_N := live.read_gradient(fragment)) is None:
            return
        seed, number = next_direction(live.own(fragment), live.peer)
        direction_N = Direction(seed, number).over(live.layout(fragment))
        along = float(torch.dot(gradient_N.double(), direction_N.double()))
        if math.isfinite(along):  # else nothing is to be told, and what it does to the parameters is found there
            byte = byte_of(along)
            note(live.own(fragment), Derivative(seed, number, byte))
            live.add_to_gradient(fragment, direction_N.mul_(level_of(byte)).sub_(gradient_N))

    def after_inner_step(self, live: Live, fragment: int) -> None:
        """Where the step measured derivatives: note those."""
        for derivative in live.derivatives or ():
            note(live.own(fragment), derivative)

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """What no commit took yet: the newest, as many as inner steps count."""
        return noted(live.own(fragment)).newest(live.counted(fragment)).written()

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """Keep what was noted since the contribution that the commit took."""
        if sent is not None and "next" in sent:
            keep_newer(live.own(fragment), sent)

    def progress_lost(self, live: Live, fragment: int) -> None:
        """They were of steps that count for nothing."""
        live.own(fragment).pop("levels", None)

    # ---- the replica's side ----

    def rebuilt(self, told: Contributor, layout: Layout) -> Tensor:
        """The sum over its derivatives."""
        return ToldDerivatives.read(told.summary).gradient(layout)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The peers' sum, which is their mean as often as they are, over the root of all derivatives."""
        counts = [len(ToldDerivatives.read(one.summary).levels) for one in info.contributors]
        scale = self.lr * max(1, len(counts)) / math.sqrt(max(1, sum(counts)))
        with torch.no_grad():
            return anchor - received["change"] * float32(scale), {}
