"""SPSA: descent along one random direction a step, by two losses and no backward pass.

g = (L(x + eps*z) - L(x - eps*z)) / (2*eps) ;  x <- x - lr*level(g)*z        z of random signs, level: g in one byte

It needs no gradients, no activations and no moments: the parameters once more, to put them back exactly, and z. What a
step did is a seed, a number and a byte, which ``derivatives`` has: who knows them can make the step again. The more
parameters, the noisier is each one's step, so rates are small, and a small model learns fastest.

A loss that is NaN or Inf makes the parameters NaN, as its gradients would, and no derivative is noted of it.

The closure gives the loss, and the same one for the same parameters: no dropout between its two calls, so ``eval()``.

Source: Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient Approximation", 1992;
for language models Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO), 2023,
arXiv:2305.17333: eps 1e-3, Gaussian z; the byte is of "Just One Byte", 2023, arXiv:2306.10015.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import MOST_NUMBER, Direction, byte_of, level_of
from decentral.training.inner.per_parameter import Group

__all__ = ["SPSA", "step_forward"]

_WIDE = (torch.float32, torch.float64)  # the others have no room for eps beside a parameter
_SEED_BITS = 63  # a checkpoint's whole numbers have a sign


class SPSA(torch.optim.Optimizer):
    """No state but the number of the next direction, in its parameter groups."""

    def __init__(
        self, params: Iterable[tuple[str, Tensor]], lr: float = 1e-3, eps: float = 1e-3, seed: int | None = None
    ) -> None:
        """``params``: with their names in the model, ``model.named_parameters()``; ``seed``: of the directions, another
        one for each peer; None: one from the operating system.
        """
        seed = secrets.randbits(_SEED_BITS) if seed is None else seed
        super().__init__(params, {"lr": lr, "eps": eps, "seed": seed, "number": 0})
        self.derivatives: Sequence[Derivative] = ()  # those that the last step went by
        if not (lr >= 0 and eps > 0):
            raise ConfigError(f"SPSA(lr={lr}, eps={eps}): lr must be 0 or more, eps above 0; 1e-3 is usual")
        for name, parameter, _ in self._each():
            if parameter.dtype not in _WIDE:
                raise ConfigError(
                    f"SPSA: {name} is {parameter.dtype}, where a step of eps = {eps} is rounded away; keep the "
                    "parameters in float32"
                )

    def _each(self) -> Iterator[tuple[str, Tensor, Group]]:
        for group in self.param_groups:
            if "param_names" not in group:
                raise ConfigError("SPSA: its directions go by parameters' names; give it model.named_parameters()")
            yield from ((name, p, group) for name, p in zip(group["param_names"], group["params"], strict=True))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> float:  # type: ignore[override]  # overloads
        """One step; the mean of the two losses. ``closure``: the loss, a number or a tensor of one."""
        if closure is None:
            raise ConfigError(
                "SPSA.step: it goes by losses; give it a closure that returns the loss, and leave backward() out, "
                'or use another inner optimizer, as inner.optimizer = "sgd"'
            )
        first = self.param_groups[0]
        seed, number, eps = first["seed"], first["number"], first["eps"]
        direction, each = Direction(seed, number), list(self._each())
        signs = [direction.of(name, p.numel()).view(p.shape).to(p) for name, p, _ in each]
        above, below = _losses([p for _, p, _ in each], signs, eps, closure)
        along = (above - below) / (2 * eps)
        measured = (byte_of(along),) if math.isfinite(along) else ()
        level = level_of(measured[0]) if measured else math.nan  # as backward() would have it: see join's ``on_nan``
        for (_, parameter, group), sign in zip(each, signs, strict=True):
            parameter.sub_(sign, alpha=group["lr"] * level)
        self.derivatives = tuple(Derivative(seed, number, byte) for byte in measured)
        first["number"] = number + len(measured) & MOST_NUMBER  # others count on directions one after the other
        return (above + below) / 2


def _losses(
    parameters: Sequence[Tensor], signs: Sequence[Tensor], eps: float, closure: Callable[[], Any]
) -> tuple[float, float]:
    """At the parameters plus and minus eps times the signs. They are put back to the very bits, whatever happens."""
    before = [parameter.clone() for parameter in parameters]

    def at(shift: float) -> float:
        for parameter, kept, sign in zip(parameters, before, signs, strict=True):
            parameter.copy_(kept).add_(sign, alpha=shift)
        return float(closure())

    try:
        return at(eps), at(-eps)
    finally:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.copy_(kept)


def step_forward(optimizer: Any, loss: Callable[[], Tensor]) -> Tensor:  # Any: accelerate's wrapper has no type
    """One step of an optimizer that needs no backward pass; the mean of the losses that it saw."""
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(loss().detach())
        return seen[-1]

    optimizer.step(closure)  # the wrapper returns nothing
    return torch.stack(seen).mean()
