"""What a boundary reads and writes of the live model, in as few passes as there can be: training is held.

One each where the model lies in this process's memory as peers send it (`Parameters.in_place`). Of a model in another
dtype or order, sharded, or on a device, copies are read and written, and what is made of them is made in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.optimizers import OuterMethod, carry
from decentral.tensors.device import beside
from decentral.tensors.ops import carry_and_copy, carry_rows, copy_and_difference, copy_and_norm
from decentral.training.live_side import Parameters
from decentral.training.schedule.detours import Detours
from decentral.training.schedule.offers import Spoken, spoken_of

__all__ = ["Passes", "as_written"]

# Shape suffix: N = elements of one fragment, flat float32; live ones where the model's copies lie.


@dataclass(frozen=True, slots=True)
class _Copied:
    """A fragment as a merge left it, for a contribution at the same boundary."""

    fragment: int
    base_N: Tensor  # what its progress is measured from
    live_N: Tensor
    norm: float  # of ``base_N - live_N``
    state: Sequence[tuple[int, int]]  # of the live model's memory then

    def is_of(self, fragment: int, base_N: Tensor, rows: Sequence[Tensor]) -> bool:
        """Whether nobody has written to the fragment since, and its progress is measured from there."""
        return self.fragment == fragment and self.base_N is base_N and self.state == _state_of(rows)


class Passes:
    """Of one peer's schedule."""

    def __init__(self, method: OuterMethod, detours: Detours, num_fragments: int) -> None:
        self._method, self._detours = method, detours
        touches = method.inner or any(map(method.overrides, ("drawn", "adopt", "after_commit")))
        self._may_copy = num_fragments == 1 and not touches  # else a merge may not be the last that moves what is taken
        self._copied: _Copied | None = None

    def forget(self) -> None:
        """The live parameters move, or are overwritten."""
        self._copied = None

    def spoken(
        self, model: Parameters, fragment: int, step: int, anchor_N: Tensor, rounding_N: Tensor | None, *, late: bool
    ) -> Spoken:
        """What outer step ``step`` of the fragment speaks of; ``rounding_N``: see ``as_written``.

        ``late``: what is sent is made when somebody asks for it, and not while training stands still.
        """
        copied, self._copied = self._copied, None
        own_way = fragment in self._detours or self._method.overrides("drawn")
        rows = None if own_way else model.in_place(fragment)
        if rows is None:
            live_N = self._detours.live(model, fragment)
            return spoken_of(self._method, step, as_written(beside(anchor_N, live_N), rounding_N), live_N)
        base_N = as_written(anchor_N, rounding_N)
        if copied is not None and copied.is_of(fragment, base_N, rows):
            return Spoken(base_N, copied.live_N, copied.live_N, copied.norm)
        if late:
            live_N, norm = copy_and_norm(rows, base_N)
            return Spoken(base_N, live_N, live_N, norm)
        live_N, gradient_N, norm = copy_and_difference(rows, base_N)
        return Spoken(base_N, live_N, live_N, norm, made_N=gradient_N)

    def carries(self, fragment: int) -> bool:
        """Whether a merge without an inner step since the contribution gives the anchor, which need not be computed."""
        own = any(map(self._method.overrides, ("merge", "drawn")))
        return not own and fragment not in self._detours

    def carried(
        self, model: Parameters, fragment: int, sent_N: Tensor, anchor_N: Tensor, *, due: bool
    ) -> Tensor | None:
        """What was learnt since ``sent_N``, on the new anchor, to be written; None: the live model holds it by now.

        ``due``: a contribution may be taken at this boundary.
        """
        self._copied = None
        rows = None if fragment in self._detours else model.in_place(fragment)
        if rows is None:
            live_N = self._detours.live(model, fragment)
            return carry(live_N, beside(sent_N, live_N), beside(anchor_N, live_N))
        if due and self._may_copy:
            live_N, norm = carry_and_copy(rows, sent_N, anchor_N)
            self._copied = _Copied(fragment, anchor_N, live_N, norm, _state_of(rows))
        else:
            carry_rows(rows, sent_N, anchor_N)
        return None


def as_written(anchor_N: Tensor, rounding_N: Tensor | None) -> Tensor:
    """What the live model held after an anchor was written to it; ``rounding_N``: by how much it rounds it."""
    return anchor_N if rounding_N is None else anchor_N + beside(rounding_N, anchor_N)


def _state_of(rows: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
    """Where they lie, and how often torch has written to them."""
    return [(row.data_ptr(), row._version) for row in rows]
