"""One inner step, by gradients or by losses alone, as the manifest's optimizer wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS
from decentral.manifest.training_terms import Inner
from decentral.training.inner.spsa import step_forward

__all__ = ["inner_step"]


def _nothing() -> None:
    """Nothing to do before the step."""


def inner_step(
    inner: Inner,
    optimizers: Sequence[Any],  # Any: accelerate's wrapper has no type
    loss: Callable[[], Tensor],
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    begins: Callable[[], None] = _nothing,
) -> Tensor:
    """One step of each of ``optimizers``; the loss that it went by. Gradients are as they were left: clear them.

    ``backward``: makes the gradients, and clips them; not called where losses are enough. ``begins``: called when all
    is there that the step goes by, before a parameter moves for good.
    """
    if INNER_OPTIMIZERS[inner.named].forward_only:
        begins()
        return step_forward(optimizers[0], loss)
    value = loss()
    backward(value)
    begins()
    for optimizer in optimizers:
        optimizer.step()  # a round may begin or end in the last one's
    return value
