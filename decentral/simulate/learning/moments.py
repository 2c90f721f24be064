"""The moments of a simulated peer's inner optimizer, for the methods that average them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["RunningMoments"]

BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.95}  # by torch's names; decays of tens of steps show within a few rounds

# Shape suffix: N = elements of one fragment, flat float32.


class RunningMoments:
    """Means of steps and of their squares, as Adam keeps them of gradients. See decentral.optimizers.Live."""

    def __init__(self) -> None:
        self._held: dict[str, list[Tensor]] = {}

    def follow(self, steps: Sequence[Tensor]) -> None:
        """One inner step was made; the first finds zeros."""
        for name, beta in BETAS.items():
            powers = [step_N if name == "exp_avg" else step_N.square() for step_N in steps]
            before = self._held.get(name) or [power_N * 0.0 for power_N in powers]
            self._held[name] = [old_N * beta + new_N * (1 - beta) for old_N, new_N in zip(before, powers, strict=True)]

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """See Live."""
        return self._held[name][fragment].clone() if name in self._held else None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """See Live."""
        if name not in self._held:
            return False
        self._held[name][fragment] = moment_N.clone()
        return True
