"""Muon of many replicas at once: every matrix is one tensor (R, rows, columns), orthogonalised as a batch.

B <- b*B + (1-b)*g ;  O = NS(B) ;  x <- x*(1 - lr*wd) - lr*0.2*sqrt(max(rows, columns))*O

What ``torch.optim.Muon`` does to each by itself, as `decentral.training.inner` builds it: five Newton-Schulz steps in
bfloat16, no Nesterov. A test compares them. One after the other the small matrices of 64 replicas take most of a step.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; of the scale: Liu et al., "Muon
is Scalable for LLM Training", 2025, arXiv:2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["StackedMuon"]

# Shape suffixes: R = replicas, A = rows, C = columns of a matrix, A <= C inside the iteration.

Group = dict[str, Any]  # Any: numbers and words, as torch's Muon has them
_OF_TORCH = ("lr", "weight_decay", "momentum", "ns_coefficients", "ns_steps", "eps")


class StackedMuon(torch.optim.Optimizer):
    """State of a stacked matrix: momentum_buffer, as torch's."""

    def __init__(self, stacked: Sequence[Tensor], like: torch.optim.Muon) -> None:
        """``like``: the optimizer of one replica, whose numbers count."""
        super().__init__(stacked, {name: like.defaults[name] for name in _OF_TORCH})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """One step of every matrix of every replica."""
        assert closure is None, "gradients are made beforehand"
        for group in self.param_groups:
            for stacked in group["params"]:
                assert stacked.grad is not None, "every matrix has a part in the loss"
                self._update(stacked, stacked.grad, group)
        return None

    def _update(self, stacked_RAC: Tensor, gradient_RAC: Tensor, group: Group) -> None:
        state = self.state[stacked_RAC]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient_RAC)
        state["momentum_buffer"].lerp_(gradient_RAC, 1 - group["momentum"])
        made_RAC = _orthogonal(state["momentum_buffer"], group)
        scale = 0.2 * math.sqrt(max(stacked_RAC.shape[1:]))
        stacked_RAC.mul_(1 - group["lr"] * group["weight_decay"]).add_(made_RAC, alpha=-group["lr"] * scale)


def _orthogonal(matrix_RAC: Tensor, group: Group) -> Tensor:
    """Newton-Schulz: singular values go to about 1."""
    a, b, c = group["ns_coefficients"]
    tall = matrix_RAC.shape[1] > matrix_RAC.shape[2]
    made_RAC = matrix_RAC.bfloat16().mT if tall else matrix_RAC.bfloat16()
    made_RAC = made_RAC / made_RAC.flatten(1).norm(dim=1).clamp(min=group["eps"]).view(-1, 1, 1)
    for _ in range(group["ns_steps"]):
        gram_RAA = made_RAC @ made_RAC.mT
        made_RAC = torch.baddbmm(
            made_RAC, torch.baddbmm(gram_RAA, gram_RAA, gram_RAA, beta=b, alpha=c), made_RAC, beta=a
        )
    return made_RAC.mT if tall else made_RAC
