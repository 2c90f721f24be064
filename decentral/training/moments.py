"""The inner optimizer's moments, fragment by fragment, for the methods that average or share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.parameters import split
from decentral.training.live_model import LiveModel

# Shape suffix: N = elements of one fragment, flat float32, on the processor.


class Moments:
    """``optimizer.state[parameter][name]`` over the fragments of a model, whatever optimizer has the parameter."""

    def __init__(self, model: LiveModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """A copy (N,); None while one of the parameters has none of that name and shape."""
        held = self._held(name, fragment)
        return None if held is None else torch.cat([one.detach().float().cpu().flatten() for one in held])

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite it in place, each in its own dtype; False when there is none to overwrite."""
        held = self._held(name, fragment)
        if held is None:
            return False
        with torch.no_grad():
            for one, given in zip(held, split(moment_N, [tuple(one.shape) for one in held]), strict=True):
                one.copy_(given)
        return True

    def _held(self, name: str, fragment: int) -> list[Tensor] | None:
        trained = self._model.trained
        found = [
            self._moment_of(trained[spec.name], name) for spec in self._model.schema.fragments[fragment].parameters
        ]
        held = [one for one in found if one is not None]
        return held if len(held) == len(found) else None

    def _moment_of(self, parameter: Tensor, name: str) -> Tensor | None:
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter, {})
            if name in state:
                moment: Tensor = state[name]
                return moment if moment.shape == parameter.shape else None
        return None
