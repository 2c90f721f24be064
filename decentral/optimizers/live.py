"""What a method may see and change of a peer that trains: its parameters, its inner optimizer, and notes of its own.

All of it is this peer's alone. What all peers hold alike is the shared state of `OuterMethod.init`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["NO_MOMENTS", "Derivative", "InnerOptimizer", "Layout", "Live", "NoMoments", "Own"]

# Shape suffix: N = elements of one fragment, flat float32, on the processor.

Layout = dict[str, tuple[int, ...]]
Own = dict[str, Tensor]  # tensors are replaced, never written to: a contribution in flight remembers the ones it had


@dataclass(frozen=True, slots=True)
class Derivative:
    """Of the loss along one random direction, over all fragments: see `decentral.optimizers.zeroth_order`."""

    seed: int
    number: int
    byte: int  # which says how large it is


class InnerOptimizer(Protocol):
    """Moments and gradients, fragment by fragment."""

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """``optimizer.state[...][name]`` over one fragment (N,), a copy: zeros where a parameter has none; None while
        none has, or the first step is still to make it.
        """
        ...

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite it where it is; False when there is none to overwrite yet."""
        ...

    def read_gradient(self, fragment: int) -> Tensor | None:
        """What the next inner step goes by (N,), a copy, zero where there is none; None where no gradient is shown."""
        ...

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Let the next inner step go by so much more; for ``before_inner_step``, as there the gradients are made."""
        ...

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """Those that the last inner step went by; None where inner steps go by gradients."""
        ...


class Live(InnerOptimizer, Protocol):
    """One peer that trains."""

    @property
    def peer(self) -> bytes:
        """Its id, as records name it."""
        ...

    @property
    def loss(self) -> float | None:
        """The newest training loss that the loop logged; None: it logged none."""
        ...

    def layout(self, fragment: int) -> Layout:
        """The tensors of a fragment, in order: by name in the model their shapes. Empty where no model is known."""
        ...

    def read(self, fragment: int) -> Tensor:
        """The live parameters of a fragment (N,), a copy."""
        ...

    def write(self, fragment: int, live_N: Tensor) -> None:
        """Overwrite them."""
        ...

    def steps(self, fragment: int) -> int:
        """Inner steps behind the next contribution of a fragment."""
        ...

    def counted(self, fragment: int) -> int:
        """How many of them the one that is being taken stands for: fewer after an absence, all of them else."""
        ...

    def own(self, fragment: int) -> Own:
        """Tensors of the method's, by names of its choice: in this peer's checkpoints, never in a snapshot."""
        ...


class NoMoments:
    """An inner optimizer that has none, or shows none."""

    derivatives = None

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """None."""
        return None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Nothing to write."""
        return False

    def read_gradient(self, fragment: int) -> Tensor | None:
        """None."""
        return None

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Nothing to add to."""


NO_MOMENTS = NoMoments()
