"""Error feedback: what a compressor drops is owed, and is sent later.

m = beta * debt + g ; send C(m) ; debt = m - C(m).

Source: Seide et al., "1-bit stochastic gradient descent", 2014; Stich et al., "Sparsified SGD with Memory", 2018,
arXiv:1809.07599; the decay beta as in Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706.
"""
# Shape suffixes: N = values of the fragment.

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Compressor, Method, Payload, accumulate
from decentral.compressors.feedback.base import Sending, Shapes, State, add_sent, compress_flat, slot
from decentral.compressors.fresh import fresh_like
from decentral.errors import ConfigError

__all__ = ["ErrorFeedback", "compress_with_debt"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Method):
    """``beta`` of what is owed is kept from round to round: 1 forgets nothing."""

    name: ClassVar[str] = "ef"
    about: ClassVar[About] = About(
        layout="sender: debt",
        biased=False,
        source='Stich et al., "Sparsified SGD with Memory", 2018, arXiv:1809.07599',
    )
    sender: ClassVar[tuple[str, ...]] = ("debt",)
    receiver: ClassVar[tuple[str, ...]] = ()
    beta: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"{self}: the debt's decay must be in [0, 1]; 0.95 is usual")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """The gradient and what is owed, compressed; the new debt is what that lost."""
        owed_N = _owed(gradient_N.detach(), state, self.beta)
        payloads = compress_flat(compressor, owed_N, shapes)
        add_sent(compressor, owed_N, payloads, -1.0)
        return Sending(payloads, {"debt": owed_N})

    def receive(self, mean_N: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean itself."""
        return mean_N, {}


def _owed(gradient_N: Tensor, state: State, beta: float) -> Tensor:
    """A new tensor, in one pass; rounded once where the machine can, which the sender alone sees."""
    owed_N = fresh_like(gradient_N)
    if "debt" not in state:
        return owed_N.copy_(gradient_N)
    return torch.add(gradient_N, slot(state, "debt", gradient_N), alpha=beta, out=owed_N)


def compress_with_debt(
    compressor: Compressor, tensor: Tensor, debt: Tensor | None, beta: float
) -> tuple[Payload, Tensor]:
    """`ErrorFeedback` for one tensor of any shape; ``None`` is a debt of zero.

    Returns the payload and the debt after sending it, both new; ``tensor`` and ``debt`` are untouched.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"compress_with_debt(beta={beta}): the debt's decay must be in [0, 1]; 0.95 is usual")
    if debt is not None and debt.shape != tensor.shape:
        raise ConfigError(
            f"compress_with_debt: debt {tuple(debt.shape)} and tensor {tuple(tensor.shape)} differ in shape"
        )
    owed = tensor.detach().clone() if debt is None else torch.add(tensor.detach(), debt, alpha=beta)
    payload = compressor.compress(owed)
    accumulate(compressor, owed, payload, -1.0)
    return payload, owed
