"""Controls: an outer method in which one thing has the wrong sign, so that it must come out worse.

"update": the outer step goes as far the other way. "momentum": what the method's state adds to the step counts with
the other sign; for Nesterov momentum x <- x - lr*(g + mu*g - mu^2*m), m itself as ever. A laboratory that finds no
difference between a method and its control could not find any.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from decentral.lab.runs.cell import Flips
from decentral.optimizers import OuterMethod, RoundInfo
from decentral.optimizers.base import State

__all__ = ["flipped"]


def flipped(method: OuterMethod, what: Flips) -> OuterMethod:
    """A method that is ``method`` but for one sign."""
    kind = type(method)

    def outer_step(
        self: OuterMethod, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        after, kept = kind.outer_step(self, anchor, received, state, info)
        if what == "update":
            return 2 * anchor - after, kept
        without = kind.outer_step(self, anchor, received, self.init(anchor), info)[0]
        return 2 * without - after, kept

    turned = type(f"Flipped{kind.__name__}", (kind,), {"outer_step": outer_step, "__slots__": ()})
    made: OuterMethod = turned(**{one.name: getattr(method, one.name) for one in fields(method)})  # type: ignore[arg-type]
    return made
