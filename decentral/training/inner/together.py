"""The optimizers that a training loop steps, as one: checked, hooked, watched, saved and restored together.

One inner step is one more step of each of them, Muon for the matrices and AdamW for the rest, say. What else the loop
does with its optimizers is its own business, so an optimizer that it never steps is only seen by what goes on without
it: then the parameters change between two backward passes, and no step of the optimizer that was given came between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.errors import ConfigError

# Two, not one: sharpness-aware methods move the parameters once inside each step, between their two backward passes.
UNSEEN_CHANGES = 2  # backward passes in a row that find the parameters changed by somebody else
ONLY_OTHERS = 100  # steps of one optimizer while another of the list has made none


@dataclass(frozen=True, slots=True)
class Together:
    """Optimizers, or schedulers, that are saved and restored in their order. ``Any``: schedulers share no base."""

    parts: tuple[Any, ...]

    @classmethod
    def of(cls, given: Any, attribute: str) -> Together:
        """One or several, without accelerate's wrapper, which keeps the bare one under ``attribute``."""
        several = given if isinstance(given, list | tuple) else [given]
        parts = tuple(getattr(one, attribute, one) for one in several)
        for one in parts:
            if not hasattr(one, "state_dict") or (attribute == "optimizer" and not hasattr(one, "param_groups")):
                raise ConfigError(f"join: the {attribute} is a {type(one).__name__}; pass what the loop calls step of")
        return cls(parts)

    def state_dict(self) -> list[Any]:
        """The state of each."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: Any) -> None:
        """Restore each. ConfigError for another number of them."""
        for part, state in zip(self.parts, self.listed(states), strict=True):
            part.load_state_dict(state)

    def listed(self, states: Any) -> list[Any]:
        """One state for each; a single state that is no list is of a checkpoint with one. ConfigError otherwise."""
        saved = states if isinstance(states, list) else [states]
        if len(saved) != len(self.parts):
            raise ConfigError(
                f"the checkpoint holds {len(saved)} optimizers or schedulers, join was given {len(self.parts)}; "
                "give it the same ones in the same order, or choose another run directory"
            )
        return saved


def check_covers(optimizers: Sequence[torch.optim.Optimizer], trained: Mapping[str, Tensor]) -> None:
    """ConfigError unless every optimizer holds some of the model's trained parameters, and all of them are held."""
    held = [{id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
    wanted = {id(parameter) for parameter in trained.values()}
    if not held:
        raise ConfigError("join: an empty list of optimizers; give those that the loop steps")
    for optimizer, ids in zip(optimizers, held, strict=True):
        if not ids & wanted:
            raise ConfigError(
                f"join: the {type(optimizer).__name__} holds none of the model's {len(trained)} trained parameters; "
                "give join the model, and the optimizer that was made from its parameters()"
            )
    missing = [name for name, parameter in trained.items() if id(parameter) not in set().union(*held)]
    if missing:
        raise ConfigError(
            f"join: {len(missing)} of {len(trained)} trained parameters are in none of the optimizers, {missing[0]} "
            "first; give all optimizers as a list, or freeze what is not trained with requires_grad_(False)"
        )


@dataclass(slots=True)
class _Watch:
    """Looks at one parameter of one optimizer in every backward pass."""

    stepped: bool = True  # a step of the optimizer began since the last backward pass
    version: int = -1  # of the parameter then: in-place steps of any optimizer raise it
    changes: int = 0  # passes in a row that found a change
    inside: bool = False  # the step: LBFGS evaluates its closure there, at one trial point after the other

    def step_begins(self, *_: object) -> None:
        self.stepped, self.changes, self.inside = True, 0, True

    def step_ends(self, *_: object) -> None:
        self.inside = False

    def backward(self, parameter: Tensor) -> None:
        """ConfigError once the loop is seen to step something else. What this peer writes falls into its step."""
        if self.inside:
            return
        if not self.stepped:  # accumulated gradients change nothing in between
            self.changes = self.changes + 1 if parameter._version != self.version else 0
        self.stepped, self.version = False, parameter._version
        if self.changes >= UNSEEN_CHANGES:
            raise ConfigError(
                "the model's parameters change, but the optimizer that was given to join does not step: "
                "give join the one that the loop steps"
            )


@dataclass(slots=True)
class InnerSteps:
    """Counts: ``on_step`` is called inside the ``step`` that makes each optimizer have stepped once more, and
    ``on_begin``, if there is one, before the first of those steps: all of them go by the gradients of that moment.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    on_step: Callable[[], None]
    on_begin: Callable[[], None] | None = None
    _since: set[int] = field(default_factory=set)  # optimizers that stepped since the last inner step
    _times: list[int] = field(default_factory=list)  # steps of each

    def hooked(self, trained: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Hook all until the returned context ends. ``trained``: the model's parameters."""
        self._times = [0] * len(self.optimizers)
        wanted = {id(parameter) for parameter in trained.values()}
        with ExitStack() as stack:
            for number, optimizer in enumerate(self.optimizers):
                watch, mine = _Watch(), _first_of(optimizer, wanted)
                stack.callback(optimizer.register_step_pre_hook(watch.step_begins).remove)
                stack.callback(optimizer.register_step_pre_hook(self._begins).remove)
                stack.callback(optimizer.register_step_post_hook(watch.step_ends).remove)
                stack.callback(optimizer.register_step_post_hook(lambda *_, n=number: self._stepped(n)).remove)
                added = mine.register_post_accumulate_grad_hook(watch.backward)  # type: ignore[no-untyped-call]
                stack.callback(added.remove)
            return stack.pop_all()

    def _begins(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.on_begin is None or self._since:
            return
        by_losses = getattr(optimizer, "derivatives", None) is not None
        if not by_losses and any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ConfigError(
                f"{type(optimizer).__name__}.step was given a closure, which makes the gradients inside the step; the "
                "run's outer method changes them before: call backward() in the loop, and step() without a closure"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                f"{type(optimizer).__name__} is fused, and its gradients are still multiplied by a GradScaler, but the "
                "run's outer method changes them: call scaler.unscale_(optimizer) before the step, or use fused=False"
            )
        self.on_begin()

    def _stepped(self, number: int) -> None:
        self._times[number] += 1
        self._since.add(number)
        if len(self._since) == len(self.optimizers):
            self._since.clear()
            self.on_step()
        elif self._times[number] >= ONLY_OTHERS and 0 in self._times:
            idle = type(self.optimizers[self._times.index(0)]).__name__
            raise ConfigError(
                f"of the optimizers given to join one made {self._times[number]} steps and the {idle} none, so no "
                "inner step is complete; give join those that the loop steps"
            )


def _first_of(optimizer: torch.optim.Optimizer, wanted: set[int]) -> Tensor:
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    return next(parameter for parameter in parameters if id(parameter) in wanted)
