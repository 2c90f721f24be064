"""What a method sees and changes of one peer's training, and the moments at which it is asked.

Beside a shipped peer, a simulated one and those of the tests. Everything here happens on the training thread. The
method's own tensors are in the peer's checkpoints; what a contribution changes of them is booked with its commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decentral.consensus.chain import contributions
from decentral.optimizers import NO_MOMENTS, InnerOptimizer, OuterMethod
from decentral.optimizers.base import Derivative, Layout, Own, State
from decentral.parameters import Schema
from decentral.rounds.local_state import CommittedUpdate

# Shape suffix: N = elements of one fragment, flat float32.

OWN = "own/"  # FRAGMENT/NAME, in a checkpoint


class Parameters(Protocol):
    """The live parameters, fragment by fragment: a model, or what stands for one in a simulation."""

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment."""
        ...

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment."""
        ...

    def keeps(self, fragment: int) -> bool:
        """Whether reading gives the very bits that were written: not where parameters have less than float32."""
        ...

    def in_place(self, fragment: int) -> Sequence[Tensor] | None:
        """The parameters of one fragment where they lie, each flat, to be read and changed; None: only copies."""
        ...


class _NoParameters:
    """Of a schedule beside which nothing trains."""

    def read(self, fragment: int) -> Tensor:
        return torch.zeros(0)

    def write(self, fragment: int, flat_N: Tensor) -> None:
        pass

    def keeps(self, fragment: int) -> bool:
        return True

    def in_place(self, fragment: int) -> None:
        return None


class LiveSide:
    """See decentral.optimizers.Live. One method, one peer, one life."""

    def __init__(
        self,
        model: Parameters | None = None,
        inner: InnerOptimizer = NO_MOMENTS,
        peer: bytes = bytes(32),
        schema: Schema | None = None,
    ) -> None:
        self.peer, self._schema = peer, schema
        self.loss: float | None = None  # see Live; written by whoever hears of it
        self._model, self._inner = model or _NoParameters(), inner
        self._method = OuterMethod()
        self._steps: Callable[[int], int] = lambda fragment: 0
        self._counted: Callable[[int], int] = self._steps
        self._own: list[Own] = [{}]
        self._sent: dict[int, Own] = {}  # by fragment, as they were when the contribution in flight was taken

    def begin(
        self,
        method: OuterMethod,
        num_fragments: int,
        steps: Callable[[int], int],
        counted: Callable[[int], int] | None = None,
    ) -> None:
        """Beside a schedule of ``method``; ``steps``, ``counted``: see Live. None: all count."""
        self._method, self._steps, self._counted = method, steps, counted or steps
        self._own = [{} for _ in range(num_fragments)]

    # ---- what the method may touch ----

    def layout(self, fragment: int) -> Layout:
        """See Live."""
        return {} if self._schema is None else self._schema.fragments[fragment].layout

    def read(self, fragment: int) -> Tensor:
        """See Live."""
        return self._model.read(fragment)

    def write(self, fragment: int, live_N: Tensor) -> None:
        """See Live."""
        self._model.write(fragment, live_N)

    def steps(self, fragment: int) -> int:
        """See Live."""
        return self._steps(fragment)

    def counted(self, fragment: int) -> int:
        """See Live."""
        return self._counted(fragment)

    def own(self, fragment: int) -> Own:
        """See Live."""
        return self._own[fragment]

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """See Live."""
        return self._inner.derivatives

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """See Live."""
        return self._inner.read_moment(name, fragment)

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """See Live."""
        return self._inner.write_moment(name, fragment, moment_N)

    def read_gradient(self, fragment: int) -> Tensor | None:
        """See Live."""
        return self._inner.read_gradient(fragment)

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """See Live."""
        self._inner.add_to_gradient(fragment, added_N)

    # ---- when the method is asked ----

    def before_step(self) -> None:
        """The gradients of an inner step are made."""
        if self._method.overrides("before_inner_step"):
            for fragment in range(len(self._own)):
                self._method.before_inner_step(self, fragment)

    def after_step(self) -> None:
        """An inner step was made."""
        if self._method.overrides("after_inner_step"):
            for fragment in range(len(self._own)):
                self._method.after_inner_step(self, fragment)

    def taken(self, fragment: int) -> None:
        """A contribution of a fragment is taken from the live model."""
        self._sent[fragment] = dict(self._own[fragment])

    def merged(self, update: CommittedUpdate) -> None:
        """A commit is in the live model."""
        named, record = update.contribution is not None, update.record
        if update.taken_N is not None or (named and update.unmoved):
            self.lost(update.fragment)  # a previous incarnation sent it, and its ``own`` is gone; or nothing moved
            return
        sent = self._sent.pop(update.fragment, None)
        took = named or update.took  # by a record, or by a branch that is adopted, whose peers nobody knows
        peers = () if record is None else tuple(ref.peer for ref in contributions(record))
        self._method.after_commit(self, update.fragment, update.state, sent if took else None, peers)

    def passed_by(self, fragment: int, state: State) -> None:
        """Commits that took nothing of this peer's are in the live model; ``state``: the shared one after them."""
        self._sent.pop(fragment, None)
        self._method.after_commit(self, fragment, state, None, ())

    def swapped(self, fragment: int, *, unmoved: bool = False) -> None:
        """A gossip step took this peer's contribution; ``unmoved``: in vain, as it could not be used."""
        if unmoved:
            self.lost(fragment)
            return
        self._method.after_commit(self, fragment, {}, self._sent.pop(fragment, {}), ())

    def lost(self, fragment: int) -> None:
        """Progress of a fragment is given up."""
        self._sent.pop(fragment, None)
        self._method.progress_lost(self, fragment)

    # ---- over a restart ----

    def tensors(self) -> dict[str, Tensor]:
        """The method's own, by their names in a checkpoint."""
        return {f"{OWN}{f}/{name}": one for f, own in enumerate(self._own) for name, one in own.items()}

    def recall(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` gave."""
        for f, own in enumerate(self._own):
            start = f"{OWN}{f}/"
            own.clear()
            own.update({name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)})
