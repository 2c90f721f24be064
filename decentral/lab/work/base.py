"""What a laboratory asks of a task, and how gradients are made one replica after the other.

The batch of an inner step is a function of (seed, rank, step) and of nothing else, so that every method of a study
sees the same data in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

__all__ = ["OneByOne", "Trained", "Work"]


class Trained(Protocol):
    """Makes gradients for several replicas; ``modules`` are the ones it was built for."""

    @property
    def stacked(self) -> Mapping[str, Tensor]:
        """The weights of all replicas by name, (replicas, ...), of which theirs are views; empty: there are none."""
        ...

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """As ``backward``, but that gradients are left in ``stacked`` alone."""
        ...

    def hand_out(self, ranks: Sequence[int]) -> None:
        """The gradients in ``stacked``, as views, to the parameters of these modules."""
        ...

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Gradients in the parameters of each module of ``steps``, by rank its inner step; the losses, by rank."""
        ...


class Work(Protocol):
    """One task with its data."""

    def model(self) -> nn.Module:
        """A freshly initialised model; the same bits at every call."""
        ...

    @property
    def tokens_of_step(self) -> int:
        """What one replica sees in an inner step: bytes of text, or examples."""
        ...

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Mean loss of the batch of inner step ``step``, counted from 0, of the replica of this rank."""
        ...

    def held_out(self, module: nn.Module) -> float:
        """The loss on data that nobody trains on, in the task's own unit."""
        ...

    def trained(self, modules: Sequence[nn.Module]) -> Trained:
        """How gradients of these are made; they may share storage from then on."""
        ...


class OneByOne:
    """Gradients of one module after the other: of any model."""

    def __init__(self, work: Work, modules: Sequence[nn.Module]) -> None:
        self._work, self._modules = work, modules
        self.stacked: Mapping[str, Tensor] = {}

    def gradients(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """See Trained."""
        return self.backward(steps)

    def hand_out(self, ranks: Sequence[int]) -> None:
        """They are there."""

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """See Trained."""
        losses = {}
        for rank, step in steps.items():
            loss = self._work.loss(self._modules[rank], rank, step)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank] = loss.detach()
        return losses
