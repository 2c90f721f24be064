"""The inner optimizer's moments and gradients, fragment by fragment, for the methods that share or correct them.

A parameter without a moment has zeros: one that got no gradient yet, where Adam's moments are zeros of themselves, and
one whose optimizer keeps no such moment, as Muon of matrices, where nobody reads them. Only where a step is still to
make the moment is there nothing to share yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import Derivative
from decentral.parameters import split
from decentral.training.live_model import LiveModel

# Shape suffix: N = elements of one fragment, flat float32, on the processor.


class Moments:
    """``optimizer.state[parameter][name]`` over the fragments of a model, whatever optimizer has the parameter."""

    def __init__(self, model: LiveModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """A copy (N,); None while no parameter has one of that name and shape, or a step is still to make one."""
        held = self._held(name, fragment)
        if held is None:
            return None
        found = [torch.zeros_like(like) if one is None else one for like, one in held]
        return torch.cat([one.detach().float().cpu().flatten() for one in found])

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite it in place where it is, each in its own dtype; False where ``read_moment`` has None."""
        held = self._held(name, fragment)
        if held is None:
            return False
        with torch.no_grad():
            pieces = split(moment_N, [tuple(like.shape) for like, _ in held])
            for (_, one), given in zip(held, pieces, strict=True):
                if one is not None:
                    one.copy_(given)
        return True

    def read_gradient(self, fragment: int) -> Tensor | None:
        """A copy (N,): as backward, and the loop's clipping, left it; zero for a parameter that has none.

        ConfigError beside an optimizer that goes by losses alone.
        """
        if self._measures is not None:
            raise ConfigError(
                f"{type(self._optimizers[0]).__name__} makes no gradients, and the run's outer method goes by them; "
                "step another inner optimizer, or choose another outer method"
            )
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._of(fragment)]
        return torch.cat([one.detach().float().cpu().flatten() for one in found])

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Each in its parameter's dtype and place. A parameter without a gradient gets one: zero, and so much more."""
        parameters = self._of(fragment)
        with torch.no_grad():
            pieces = split(added_N, [tuple(one.shape) for one in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += piece.to(parameter.grad)

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """Those of the last step; ConfigError where others could not make its directions again."""
        measures = self._measures
        return None if measures is None else list(measures.derivatives)

    @cached_property
    def _measures(self) -> Any | None:  # Any: whatever optimizer has derivatives
        """The optimizer that goes by losses alone; its parameters' names are checked once."""
        if all(getattr(optimizer, "derivatives", None) is None for optimizer in self._optimizers):
            return None
        optimizer, *others = self._optimizers
        names = {name for group in optimizer.param_groups for name in group.get("param_names", ())}
        if others or names != set(self._model.trained):
            raise ConfigError(
                f"{type(optimizer).__name__}: others make its directions again by the names that the model has, "
                f"{next(iter(self._model.trained))} first; give it alone, made of the bare model's named_parameters()"
            )
        return optimizer

    def _of(self, fragment: int) -> list[Tensor]:
        trained = self._model.trained
        return [trained[spec.name] for spec in self._model.schema.fragments[fragment].parameters]

    def _held(self, name: str, fragment: int) -> list[tuple[Tensor, Tensor | None]] | None:
        """Each parameter with its moment."""
        held = [(parameter, self._moment_of(parameter, name)) for parameter in self._of(fragment)]
        nobody = all(one is None for _, one in held)
        return None if nobody or any(self._awaits(parameter) for parameter, _ in held) else held

    def _awaits(self, parameter: Tensor) -> bool:
        """Whether its optimizer has not made the step yet that its gradient is for: that makes what it keeps."""
        stepped = any(optimizer.state.get(parameter) for optimizer in self._optimizers)
        return parameter.grad is not None and not stepped

    def _moment_of(self, parameter: Tensor, name: str) -> Tensor | None:
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter, {})
            if name in state:
                moment: Tensor = state[name]
                return moment if moment.shape == parameter.shape else None
        return None
