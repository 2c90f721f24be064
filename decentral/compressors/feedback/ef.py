"""Error feedback: what a compressor drops is owed, and is sent later.

m = beta * debt + g ; send C(m) ; debt = m - C(m).

Source: Seide et al., "1-bit stochastic gradient descent", 2014; Stich et al., "Sparsified SGD with Memory", 2018,
arXiv:1809.07599; the decay beta as in Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706.
"""
# Shape suffixes: N = values of the fragment.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Compressor, Method, Payload, accumulate, check_dtype
from decentral.compressors.feedback.base import Receiving, Sending, Shapes, State, add_sent, compress_flat, slot
from decentral.errors import ConfigError
from decentral.parameters import split
from decentral.tensors.memory import fresh_like
from decentral.tensors.threads import elements_here, spread

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
        if not elements_here(gradient_N):
            return self._send_from_device(compressor, gradient_N, state, shapes)
        owed_N = fresh_like(gradient_N)
        owed, gradients = split(owed_N, shapes), split(gradient_N.detach(), shapes)
        debts: Sequence[Tensor | None] = [None] * len(shapes)
        if "debt" in state:
            debts = split(slot(state, "debt", gradient_N), shapes)

        def one(job: tuple[Tensor, Tensor, Tensor | None]) -> Payload:
            return _send(compressor, *job, self.beta)

        payloads = spread(one, list(zip(gradients, owed, debts, strict=True)), elements_here(gradient_N))
        return Sending(tuple(payloads), {"debt": owed_N})

    def _send_from_device(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """The same, all tensors at once: a device has no cache in which one of them would wait."""
        owed_N = gradient_N.detach().clone()
        if "debt" in state:
            owed_N.add_(slot(state, "debt", gradient_N), alpha=self.beta)
        payloads = compress_flat(compressor, owed_N, shapes)
        add_sent(compressor, owed_N, payloads, -1.0)
        return Sending(payloads, {"debt": owed_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """What arrived."""
        return Receiving(arrived_N, {})


def _send(compressor: Compressor, gradient: Tensor, owed: Tensor, debt: Tensor | None, beta: float) -> Payload:
    """A tensor from beginning to end while it is in the cache; ``owed`` becomes what is still owed after it.
    Rounded once where the machine can, which the sender alone sees.
    """
    if debt is None:
        owed.copy_(gradient)
    else:
        torch.add(gradient, debt, alpha=beta, out=owed)
    payload = compressor.compress(owed)
    accumulate(compressor, owed, payload, -1.0)
    return payload


def compress_with_debt(
    compressor: Compressor, tensor: Tensor, debt: Tensor | None, beta: float
) -> tuple[Payload, Tensor]:
    """`ErrorFeedback` for one tensor of any shape; ``None`` is a debt of zero.

    Returns the payload and the debt after sending it in float32, both new; ``tensor`` and ``debt`` are untouched.
    """
    if not 0 <= beta <= 1:
        raise ConfigError(f"compress_with_debt(beta={beta}): the debt's decay must be in [0, 1]; 0.95 is usual")
    if debt is not None and debt.shape != tensor.shape:
        raise ConfigError(
            f"compress_with_debt: debt {tuple(debt.shape)} and tensor {tuple(tensor.shape)} differ in shape"
        )
    owed = fresh_like(check_dtype(tensor))
    return _send(compressor, tensor.detach(), owed, debt, beta), owed
