"""The loss on held-out data of replicas, read into one module that nobody trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.lab.work.base import Work
from decentral.parameters import parameters_of, scatter, schema_of

__all__ = ["HeldOut", "Reader"]

Fragments = Sequence[Tensor]  # flat float32, as the replica has them


@dataclass(frozen=True, slots=True)
class HeldOut:
    """In the task's own unit."""

    loss: float  # the mean of the losses of the peers' models: what somebody gets who takes one of them
    of_mean: float | None = None  # of the mean of the peers' models, where they are not all alike


class Reader:
    """Evaluates what replicas hold."""

    def __init__(self, work: Work, fragments: int) -> None:
        self._work, self._module = work, work.model()
        self._schema = schema_of(self._module, fragments)
        self._parameters = parameters_of(self._module)

    def loss(self, anchors: Fragments) -> float:
        """Of one model."""
        for fragment, flat_N in zip(self._schema.fragments, anchors, strict=True):
            scatter(flat_N, fragment, self._parameters)
        return self._work.held_out(self._module)

    def held_out(self, replicas: Sequence[Fragments]) -> HeldOut:
        """Of the models of peers that agree: one of them is given; or of all that do not."""
        losses = [self.loss(anchors) for anchors in replicas]
        mean = sum(losses) / len(losses)
        if len(replicas) == 1:
            return HeldOut(mean)
        means = [sum(parts[1:], start=parts[0]) / len(parts) for parts in zip(*replicas, strict=True)]
        return HeldOut(mean, self.loss(means))
