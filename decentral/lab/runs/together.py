"""The references: one model, every peer's gradient averaged in every inner step, one inner optimizer; or a peer alone.

Data-parallel training is what outer methods try to reach with fewer bytes: it sends float32 gradients in a reduce, so
that a peer sends 2*(P - 1)/P of the model in each step. A peer alone is what they have to beat: it is data-parallel
training of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from decentral.lab.runs.cell import Cell
from decentral.lab.runs.curve import Curve, Looks, Point
from decentral.lab.swarm import LabWorld
from decentral.lab.work.base import Work
from decentral.manifest import Manifest
from decentral.tasks.sizing import warm_up
from decentral.training.inner import Averages, build_inner, inner_step

__all__ = ["run_together"]

_FLOAT32 = 4


def run_together(cell: Cell, work: Work) -> Curve:
    """The whole run, or up to where it gives no number any more. A round is an inner step."""
    manifest = cell.manifest
    ranks = 1 if cell.kind == "alone" else cell.peers
    trainer = _Trainer(manifest, work, ranks)
    world, tokens, looks = LabWorld(ranks), work.tokens_of_step, Looks(cell.steps, cell.points)
    each = world.sent(_FLOAT32 * trainer.numel, "reduce", ranks)
    found = [Point(0, 0, 0, 0.0, 0.0, trainer.held_out())]
    for step in range(1, cell.steps + 1):
        trainer.step()
        if looks.due(step):
            spent = (step, step * tokens, step if ranks > 1 else 0, step * each, float(step))
            found.append(Point(*spent, trainer.held_out()))
            if found[-1].loss is None:
                break
    return Curve(tuple(found), each, trainer.numel)


class _Trainer:
    """The model of rank 0, and copies of it that only make gradients."""

    def __init__(self, manifest: Manifest, work: Work, ranks: int) -> None:
        self._manifest, self._work = manifest, work
        self._modules = [work.model() for _ in range(ranks)]
        self._trained = work.trained(self._modules)
        self._held = [[p for p in module.parameters() if p.requires_grad] for module in self._modules]
        self._optimizers = build_inner(manifest.inner, self._modules[0])
        self._schedulers = [warm_up(optimizer, manifest.inner.warmup) for optimizer in self._optimizers]
        self._averages = Averages(self._optimizers)
        self._steps = 0

    @property
    def numel(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel() for parameter in self._held[0])

    def step(self) -> None:
        """One inner step of all."""
        inner_step(self._manifest.inner, self._optimizers, self._losses, backward=self._backward)
        for scheduler in self._schedulers:
            scheduler.step()
        self._steps += 1
        self._hand_out()

    def held_out(self) -> float | None:
        """Of what is learnt, where the inner optimizer trains at something else; None: no number."""
        self._averages.show()
        loss = self._work.held_out(self._modules[0])
        self._averages.resume()
        return loss if math.isfinite(loss) else None

    def _losses(self) -> Tensor:
        steps = dict.fromkeys(range(len(self._modules)), self._steps)
        return torch.stack(list(self._trained.backward(steps).values())).mean()

    def _backward(self, loss: Tensor) -> None:
        """The gradients are there: their mean goes to rank 0, in the order of ranks."""
        for same in zip(*self._held, strict=True):
            same[0].grad = _mean([_gradient(parameter) for parameter in same])
        if self._manifest.inner.clip is not None:
            nn.utils.clip_grad_norm_(self._held[0], self._manifest.inner.clip)

    @torch.no_grad()
    def _hand_out(self) -> None:
        for module in self._modules:
            module.zero_grad()
        for same in zip(*self._held, strict=True):
            for copy in same[1:]:
                copy.copy_(same[0])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    return gradients[0] if len(gradients) == 1 else torch.stack(tuple(gradients)).mean(0)
