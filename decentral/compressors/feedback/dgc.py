"""Deep gradient compression: momentum before sparsification, forgotten where something was sent.

u = momentum * u + g ; v = v + u ; send C(v) ; v = v - C(v), and u = 0 where C(v) is not 0.

An entry that waits for its turn gathers velocity, not only gradients: with plain error feedback under a momentum
optimizer it would arrive without the momentum it had earned. Where it was sent, the old velocity is masked, or stale
directions would be applied again (momentum factor masking). The momentum is here, so the outer optimizer wants none.
The paper zeroes v where something was sent; subtracting is the same for exact values, and keeps a quantiser's error.
For compressors that send every entry all velocity is masked, and what is left is error feedback with beta = 1.

The paper's clipping by N**-0.5 and its warm-up of the sparsity, 75 to 99.9 % over four epochs, are not done here.

Source: Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887.
"""
# Shape suffixes: N = values of the fragment.

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Compressor, Method
from decentral.compressors.feedback.base import Receiving, Sending, Shapes, State, add_sent, compress_flat, slot
from decentral.errors import ConfigError

__all__ = ["DGC"]


@dataclass(frozen=True, slots=True)
class DGC(Method):
    """Momentum correction with factor masking."""

    name: ClassVar[str] = "dgc"
    about: ClassVar[About] = About(
        layout="sender: velocity, debt",
        biased=False,
        source='Lin et al., "Deep Gradient Compression", 2017, arXiv:1712.01887',
    )
    sender: ClassVar[tuple[str, ...]] = ("velocity", "debt")
    receiver: ClassVar[tuple[str, ...]] = ()
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"{self}: momentum must be in [0, 1); 0.9 is usual, 0 is error feedback with beta=1")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """All velocity that was not sent yet, compressed."""
        velocity_N = slot(state, "velocity", gradient_N) * self.momentum + gradient_N.detach()
        owed_N = slot(state, "debt", gradient_N) + velocity_N
        payloads = compress_flat(compressor, owed_N, shapes)
        sent_N = torch.zeros_like(owed_N)
        add_sent(compressor, sent_N, payloads)
        return Sending(payloads, {"velocity": velocity_N.masked_fill_(sent_N != 0, 0.0), "debt": owed_N - sent_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """What arrived."""
        return Receiving(arrived_N, {})
