"""What a round sees of an optimizer that trains at other parameters than it learns: the average, x.

Schedule-Free and GPA keep y in the parameters, where gradients are taken, and swap it for x in ``eval()``. Peers agree
on x: it is what is contributed, what the anchor is a mean of, and what is evaluated and checkpointed. A commit that
moves x moves z, and with them y, by as much: each peer goes on as far ahead of its x as it was. Were z left behind,
peers would never average what their steps are made on, and x would run back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["AHEAD", "Averages"]

AHEAD = "z_minus_x"  # what stands for z in an optimizer's state while the parameters hold x and may be moved


class Averages:
    """Those of the optimizers that swap: any that has ``train``, ``eval``, ``train_mode`` and ``z`` as ours have."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._swapping: list[Any] = [one for one in optimizers if _swaps(one)]  # Any: such methods have no base
        self._trained: list[bool] | None = None  # modes to go back to, while the parameters hold x

    @property
    def shown(self) -> bool:
        """Whether the parameters hold x, to be read and moved."""
        return self._trained is not None

    @torch.no_grad()
    def show(self) -> None:
        """Let the parameters hold x, to be read and moved, until ``resume``. Nothing is done twice."""
        if self._trained is not None:
            return
        self._trained = [_trains(optimizer) for optimizer in self._swapping]
        for optimizer in self._swapping:
            optimizer.eval()
            for parameter, state in optimizer.state.items():
                if "z" in state:
                    state[AHEAD] = state.pop("z").sub_(parameter)

    @torch.no_grad()
    def resume(self, *, to_train: bool = True) -> None:
        """Go on with y of wherever x is now; else, or where the loop was evaluating, x stays."""
        if self._trained is None:
            return
        for optimizer, trained in zip(self._swapping, self._trained, strict=True):
            for parameter, state in optimizer.state.items():
                if AHEAD in state:
                    state["z"] = state.pop(AHEAD).add_(parameter)
            if to_train and trained:
                optimizer.train()
        self._trained = None

    def stay(self) -> None:
        """Let the parameters hold x for good: after the run they are what was contributed."""
        self.show()
        self.resume(to_train=False)


def _swaps(optimizer: torch.optim.Optimizer) -> bool:
    methods = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
    return methods and all("train_mode" in group for group in optimizer.param_groups)


def _trains(optimizer: torch.optim.Optimizer) -> bool:
    return any(group["train_mode"] for group in optimizer.param_groups)
