"""Inner optimizers of our own, where torch has none: ADOPT, QH-ADOPT, Schedule-Free AdamW, GPA and SPSA."""

from __future__ import annotations

import math
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.errors import ConfigError
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import MOST_NUMBER, Direction, byte_of, level_of

# ---- one parameter after the other ----
#
# All but SPSA step each parameter by itself, elementwise, in its own dtype.

Group = dict[str, Any]  # Any: a parameter group of torch's holds numbers, words and parameters


class PerParameter(torch.optim.Optimizer):
    """An optimizer whose step of one parameter depends on no other one."""

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            self._check(group)

    def _check(self, group: Group) -> None:
        """Raise ConfigError for numbers that cannot be, or parameters whose small steps would be rounded away."""
        betas, known = group.get("betas", ()), all(0 <= beta < 1 for beta in group.get("betas", ()))
        if not (group["lr"] >= 0 and group["weight_decay"] >= 0 and known):
            raise ConfigError(
                f"{type(self).__name__}(lr={group['lr']}, weight_decay={group['weight_decay']}, betas={betas}): lr and "
                "weight_decay must be 0 or more, betas in [0, 1)"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Step every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def begin(self, group: Group) -> None:
        """Begin the step of a group, before its parameters."""

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step one parameter in place; its gradient is left as it is."""


# ---- ADOPT ----
#
# Adam that divides by the second moment of the gradients before this one, and takes the momentum after that:
#
# n = clip(g / max(sqrt(v), eps), t**(1/4)) ;  m <- b1*m + (1-b1)*n ;  x <- x - lr*(m + wd*x) ;  v <- b2*v + (1-b2)*g*g
#
# The first gradient makes v and moves nothing; t counts from 1 after it. As v does not know the gradient that it
# divides, it converges for every b2; Adam does not. The moments are of normalised gradients, n, and so larger than
# Adam's by far.
#
# Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", 2024,
# arXiv:2411.02853: betas 0.9 and 0.9999, eps 1e-6, clip at t**(1/4), decay decoupled as an option, which is the way
# here.


class ADOPT(PerParameter):
    """State of a parameter: step, exp_avg (m), exp_avg_sq (v)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step by the equations above."""
        if adopt_direction(gradient, state, group) is not None:
            step_along(parameter, state["exp_avg"], group)


def adopt_direction(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor | None:
    """Return n of this gradient, with the moments brought up to it; None of the first one, which makes v."""
    if not state:
        state.update(step=1, exp_avg=torch.zeros_like(gradient), exp_avg_sq=gradient.square())
        return None
    b1, b2 = group["betas"]
    clip = state["step"] ** 0.25
    normal: Tensor = (gradient / state["exp_avg_sq"].sqrt().clamp_(min=group["eps"])).clamp_(-clip, clip)
    state["exp_avg"].mul_(b1).add_(normal, alpha=1 - b1)
    state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    state["step"] += 1
    return normal


def step_along(parameter: Tensor, direction: Tensor, group: Group) -> None:
    """Decay, then the step."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])


# ---- quasi-hyperbolic ADOPT ----
#
# A step along a mixture of this gradient and of a momentum so slow that it outlives a round:
#
# n = clip(g / max(sqrt(v), eps), t**(1/4)) ;  u <- b1*u + (1-b1)*n ;  x <- x - lr*((1-w)*n + w*u + wd*x)
#
# v as in ADOPT. w = 1 is ADOPT, w = 0 has no momentum. Between two outer steps u changes little (its half-life is 69
# steps at b1 = 0.99, and 693 at 0.999), so its mean over the peers stays worth what it cost (``mt_dao``), while 1-w of
# the fresh gradient keeps the step quick.
#
# The papers do it otherwise. QHAdam mixes the raw gradient and its mean, and divides by sqrt(v) afterwards, v with this
# gradient in it; MT-DAO prints that form and trains with ADOPT, whose order, above, this has.
#
# Source: Iacob et al., "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates", 2025,
# arXiv:2510.05361: b1 0.99 to 0.999, b2 0.9999, w to be tuned; w = 0.7 as in Ma, Yarats, "Quasi-hyperbolic Momentum and
# Adam for Deep Learning", 2018, arXiv:1810.06801.


class QHADOPT(PerParameter):
    """State of a parameter: step, exp_avg (u), exp_avg_sq (v)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.9999),
        mixing: float = 0.7,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= mixing <= 1:
            raise ConfigError(f"QHADOPT(mixing={mixing}): mixing, the share of the momentum, must be in [0, 1]")
        super().__init__(params, {"lr": lr, "betas": betas, "mixing": mixing, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step by the equations above."""
        if (normal := adopt_direction(gradient, state, group)) is not None:
            share = group["mixing"]
            step_along(parameter, normal * (1 - share) + state["exp_avg"] * share, group)


# ---- optimizers that learn an average ----
#
# The average is x: gradients are taken at y, between x and the sequence z that steps are made on.
#
# y = s*x + (1-s)*z
#
# While such an optimizer trains, the parameters hold y; after ``eval()`` they hold x, which is what is evaluated, sent
# and kept, and after ``train()`` y again. x itself is not stored: it follows from y and z. It would be lost in the
# rounding of bfloat16, so parameters with less than float32 are refused.

_WIDE = (torch.float32, torch.float64)


class Averaging(PerParameter):
    """A group has ``mixing``, s above, in (0, 1], and ``train_mode``; a parameter's state ``z`` from its first step."""

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, {**defaults, "train_mode": True})  # x = y = z before the first step

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not 0 < group["mixing"] <= 1:
            raise ConfigError(f"{type(self).__name__}(mixing={group['mixing']}): the share of x in y must be in (0, 1]")
        if narrow := {str(p.dtype) for p in group["params"]} - {str(dtype) for dtype in _WIDE}:
            raise ConfigError(
                f"{type(self).__name__}: parameters in {', '.join(sorted(narrow))}: the average would be lost in their "
                "rounding; keep the parameters in float32, and let autocast compute in less"
            )

    @torch.no_grad()
    def eval(self) -> None:
        """Let the parameters hold x."""
        self._switch(to_train=False)

    @torch.no_grad()
    def train(self) -> None:
        """Let the parameters hold y, as a step wants them."""
        self._switch(to_train=True)

    def _switch(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            weight = 1 - group["mixing"] if to_train else 1 - 1 / group["mixing"]
            for parameter in group["params"]:
                if "z" in (state := self.state.get(parameter, {})):
                    parameter.lerp_(state["z"], weight)
            group["train_mode"] = to_train

    def begin(self, group: Group) -> None:
        """Refuse a gradient of elsewhere than y."""
        if not group["train_mode"]:
            raise ConfigError(
                f"{type(self).__name__}: a step in eval mode, where the parameters hold the average; call "
                "optimizer.train() after optimizer.eval(), before the next forward pass"
            )

    @staticmethod
    def _advance(parameter: Tensor, z: Tensor, direction: Tensor, fresh: float, group: Group) -> None:
        """z <- z - lr*d ; x <- (1-c)*x + c*z ; y of both, in place and without x: c is ``fresh``, what z adds to x."""
        parameter.lerp_(z, fresh)
        parameter.add_(direction, alpha=group["lr"] * (group["mixing"] * (1 - fresh) - 1))
        z.sub_(direction, alpha=group["lr"])

    @staticmethod
    def _begun(state: dict[str, Any], parameter: Tensor, moments: tuple[str, ...]) -> None:
        if "z" not in state:
            state.update({name: torch.zeros_like(parameter) for name in moments}, step=0, z=parameter.clone())


# ---- Schedule-Free AdamW ----
#
# The average of all iterates takes the place of a learning rate that falls:
#
# d = g / (sqrt(v_hat) + eps) + wd*y ;  z <- z - lr*d ;  x <- (1-c)*x + c*z ;  y = s*x + (1-s)*z
# c = w / sum(w), w = max(lr)**2
#
# v is Adam's second moment with its bias corrected, g the gradient at y, and s takes the place of Adam's beta1. During
# a warm-up w grows with the rate, so that first iterates count little. Decay is taken at y, as in the authors' package.
#
# Source: Defazio et al., "The Road Less Scheduled", 2024, arXiv:2405.15682; s 0.9, beta2 0.999 in its package.


class ScheduleFree(Averaging):
    """State of a parameter: step, z, exp_avg_sq (v); of a group: the sum of w, and the largest rate."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.5e-3,
        beta2: float = 0.999,
        mixing: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = {"lr": lr, "betas": (0.0, beta2), "mixing": mixing, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**own, "lr_max": 0.0, "weight_sum": 0.0, "fresh": 0.0})

    def begin(self, group: Group) -> None:
        """Set the weight of z in x in this step."""
        super().begin(group)
        group["lr_max"] = max(group["lr_max"], group["lr"])
        weight = group["lr_max"] ** 2
        group["weight_sum"] += weight
        group["fresh"] = weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step by the equations above."""
        self._begun(state, parameter, ("exp_avg_sq",))
        beta2 = group["betas"][1]
        state["step"] += 1
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        direction = (gradient / size).add_(parameter, alpha=group["weight_decay"])
        self._advance(parameter, state["z"], direction, group["fresh"], group)


# ---- GPA, generalised primal averaging ----
#
# The inner steps of AdamW and a smooth average of them, as DiLoCo's of one peer:
#
# y = s*x + (1-s)*z ;  z <- (1-lr*wd)*z - lr*Adam(grad(y)) ;  x <- a*x + (1-a)*z
#
# s = 0.7; a = 0.9**(1/H) is what DiLoCo of one peer with H inner steps does, 0.9967 for 32. It sends nothing and has no
# second loop, so it is the fair baseline of a peer that trains alone; plain AdamW is a weaker one.
#
# The authors' code does it otherwise. There decay shrinks z after y was made of it, so that the x which y implies moves
# by (1-s)/s of what z lost, away from zero. Here x, y and z obey the equations above, with decay as without.
#
# Source: Defazio et al., "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs", 2025, arXiv:2512.17131.


class GPA(Averaging):
    """State of a parameter: step, z, exp_avg, exp_avg_sq."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        mixing: float = 0.7,
        averaging: float = 0.9967,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= averaging < 1:
            raise ConfigError(f"GPA(averaging={averaging}): what x keeps in a step must be in [0, 1); 0.9967 is usual")
        own = {"mixing": mixing, "averaging": averaging, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, **own})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step by the equations above."""
        self._begun(state, parameter, ("exp_avg", "exp_avg_sq"))
        (b1, b2), z = group["betas"], state["z"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        size = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        direction = (state["exp_avg"] / (1 - b1 ** state["step"])).div_(size)
        shrink = group["lr"] * group["weight_decay"]
        parameter.sub_(z, alpha=shrink * (1 - group["mixing"]))  # y of the z that decay leaves
        z.mul_(1 - shrink)
        self._advance(parameter, z, direction, 1 - group["averaging"], group)


# ---- SPSA, by losses alone ----
#
# Descent along one random direction a step, by two losses and no backward pass:
#
# g = (L(x + eps*z) - L(x - eps*z)) / (2*eps) ;  x <- x - lr*level(g)*z        z of random signs, level: g in one byte
#
# It needs no gradients, no activations and no moments: the parameters once more, to put them back exactly, and z. What
# a step did is a seed, a number and a byte, which ``derivatives`` has: who knows them can make the step again. The more
# parameters, the noisier is each one's step, so rates are small, and a small model learns fastest.
#
# A loss that is NaN or Inf makes the parameters NaN, as its gradients would, and no derivative is noted of it.
#
# The closure gives the loss, and the same one for the same parameters: no dropout between its two calls, so ``eval()``.
#
# Source: Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient Approximation", 1992;
# for language models Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO), 2023,
# arXiv:2305.17333: eps 1e-3, Gaussian z; the byte is of "Just One Byte", 2023, arXiv:2306.10015.

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
        """Step once, and return the mean of the two losses. ``closure``: the loss, a number or a tensor of one."""
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
    """Go to the parameters plus and minus eps times the signs, and back to the very bits, whatever happens."""
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
    """Step an optimizer that needs no backward pass, and return the mean of the losses that it saw."""
    seen: list[Tensor] = []

    def closure() -> Tensor:
        seen.append(loss().detach())
        return seen[-1]

    optimizer.step(closure)  # the wrapper returns nothing
    return torch.stack(seen).mean()
