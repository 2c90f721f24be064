"""A simulated peer's inner optimizer: plain descent, with moments for the methods that average them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

__all__ = ["Descent"]

BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.95}  # by torch's names; decays of tens of steps show within a few rounds

# Shape suffix: N = elements of one fragment, flat float32.


class Descent:
    """Steps at rate 1, so that gradient and step are one. See decentral.optimizers.InnerOptimizer.

    The moments are means of steps and of their squares, as Adam keeps them of gradients.
    """

    derivatives = None

    def __init__(self, *, averages: bool = True) -> None:
        """``averages``: whether anybody asks for moments."""
        self._averages = averages
        self._held: dict[str, list[Tensor]] = {}
        self._gradients: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], begins: Callable[[], None]) -> list[Tensor]:
        """What one inner step subtracts; ``begins`` may change the gradients."""
        self._gradients = list(gradients)
        begins()
        if self._averages:
            self._follow(self._gradients)
        return self._gradients

    def _follow(self, steps: Sequence[Tensor]) -> None:
        """The first step finds zeros."""
        for name, beta in BETAS.items():
            powers = [step_N if name == "exp_avg" else step_N.square() for step_N in steps]
            before = self._held.get(name) or [power_N * 0.0 for power_N in powers]
            self._held[name] = [old_N * beta + new_N * (1 - beta) for old_N, new_N in zip(before, powers, strict=True)]

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """See InnerOptimizer."""
        return self._held[name][fragment].clone() if name in self._held else None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """See InnerOptimizer."""
        if name not in self._held:
            return False
        self._held[name][fragment] = moment_N.clone()
        return True

    def read_gradient(self, fragment: int) -> Tensor | None:
        """See InnerOptimizer."""
        return self._gradients[fragment].clone()

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """See InnerOptimizer."""
        self._gradients[fragment] = self._gradients[fragment] + added_N
