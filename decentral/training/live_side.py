"""The training of one peer as a method sees and changes it, and the moments at which the method is asked.

Beside a shipped peer, a simulated one and those of the tests. Everything here happens on the training thread. The
method's own tensors are in the peer's checkpoints; what a contribution changes of them is booked with its commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from decentral.consensus.chain import contributions
from decentral.errors import ConfigError
from decentral.optimizers import NO_MOMENTS, InnerOptimizer, OuterMethod
from decentral.optimizers.base import Derivative, Layout, Own, State
from decentral.parameters import Schema, split
from decentral.rounds.local_state import CommittedUpdate
from decentral.tensors.memory import fresh
from decentral.training.live_model import LiveModel

# Shape suffix: N = elements of one fragment, flat float32; moments and gradients on the processor.

OWN = "own/"  # FRAGMENT/NAME, in a checkpoint


class Parameters(Protocol):
    """The live parameters, fragment by fragment: a model, or its stand-in in a simulation."""

    def read(self, fragment: int) -> Tensor:
        """Copy one fragment."""
        ...

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment."""
        ...

    def keeps(self, fragment: int) -> bool:
        """Tell whether reading gives the very bits that were written: not where parameters have less than float32."""
        ...

    def in_place(self, fragment: int) -> Sequence[Tensor] | None:
        """Return the parameters of a fragment where they lie, each flat, to be read and changed; None: only copies."""
        ...


class _NoParameters:
    """Parameters of a schedule beside which nothing trains."""

    def read(self, fragment: int) -> Tensor:
        return fresh(0)

    def write(self, fragment: int, flat_N: Tensor) -> None:
        pass

    def keeps(self, fragment: int) -> bool:
        return True

    def in_place(self, fragment: int) -> None:
        return None


class LiveSide:
    """Training as one method sees it (`decentral.optimizers.base.Live`), on one peer, in one of its lives."""

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
        self._steps: Callable[[int], int] = lambda fragment: 0
        self._counted: Callable[[int], int] = self._steps
        self._own: list[Own] = [{}]

    def begin(
        self, num_fragments: int, steps: Callable[[int], int], counted: Callable[[int], int] | None = None
    ) -> None:
        """Begin beside a schedule; ``steps``, ``counted``: see Live. None: all count."""
        self._steps, self._counted = steps, counted or steps
        self._own = [{} for _ in range(num_fragments)]

    def layout(self, fragment: int) -> Layout:
        """Return the layout of a fragment."""
        return {} if self._schema is None else self._schema.fragments[fragment].layout

    def read(self, fragment: int) -> Tensor:
        """Copy the live parameters of a fragment."""
        return self._model.read(fragment)

    def write(self, fragment: int, live_N: Tensor) -> None:
        """Overwrite them."""
        self._model.write(fragment, live_N)

    def steps(self, fragment: int) -> int:
        """Count inner steps in the live model that no commit accounts for."""
        return self._steps(fragment)

    def counted(self, fragment: int) -> int:
        """Count those that count in the contribution in flight."""
        return self._counted(fragment)

    def own(self, fragment: int) -> Own:
        """Return the method's own tensors of a fragment."""
        return self._own[fragment]

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """Derivatives of the last step."""
        return self._inner.derivatives

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """Copy a moment of the inner optimizer; None: it has none."""
        return self._inner.read_moment(name, fragment)

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Overwrite one; tell whether it was there."""
        return self._inner.write_moment(name, fragment, moment_N)

    def read_gradient(self, fragment: int) -> Tensor | None:
        """Copy the gradient of a fragment; None: there is none."""
        return self._inner.read_gradient(fragment)

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Add to it."""
        self._inner.add_to_gradient(fragment, added_N)

    # ---- over a restart ----

    def tensors(self) -> dict[str, Tensor]:
        """Return the method's own, by their names in a checkpoint."""
        return {f"{OWN}{f}/{name}": one for f, own in enumerate(self._own) for name, one in own.items()}

    def recall(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the ``tensors`` of a checkpoint."""
        for f, own in enumerate(self._own):
            start = f"{OWN}{f}/"
            own.clear()
            own.update({name.removeprefix(start): one for name, one in tensors.items() if name.startswith(start)})


# ---- when the method is asked ----


class MethodCalls:
    """Calls the method of one peer: around inner steps, at contributions, and at what becomes of them."""

    def __init__(self, method: OuterMethod, live: LiveSide, num_fragments: int) -> None:
        self._method, self._live, self._fragments = method, live, range(num_fragments)
        self._sent: dict[int, Own] = {}  # by fragment, as they were when the contribution in flight was taken

    def before_step(self) -> None:
        """Tell the method that the gradients of an inner step are made."""
        for fragment in self._fragments:
            self._method.before_inner_step(self._live, fragment)

    def after_step(self) -> None:
        """Tell it that an inner step was made."""
        for fragment in self._fragments:
            self._method.after_inner_step(self._live, fragment)

    def after_take(self, fragment: int) -> None:
        """Keep the method's own tensors as they are now that a contribution of a fragment is taken."""
        self._sent[fragment] = dict(self._live.own(fragment))

    def after_merge(self, update: CommittedUpdate) -> None:
        """Tell the method that a commit is in the live model."""
        named, record = update.contribution is not None, update.record
        if update.taken_N is not None or (named and update.unmoved):
            # A previous incarnation sent it, and its ``own`` is gone; or nothing moved.
            self.after_loss(update.fragment)
            return
        sent = self._sent.pop(update.fragment, None)
        took = named or update.took  # by a record, or by a branch that is adopted, whose peers nobody knows
        peers = () if record is None else tuple(ref.peer for ref in contributions(record))
        self._method.after_commit(self._live, update.fragment, update.state, sent if took else None, peers)

    def after_others(self, fragment: int, state: State) -> None:
        """Tell it that commits which took nothing of this peer's are in; ``state``: the shared one after them."""
        self._sent.pop(fragment, None)
        self._method.after_commit(self._live, fragment, state, None, ())

    def after_swap(self, fragment: int, *, unmoved: bool = False) -> None:
        """Tell it that a gossip step took this peer's contribution; ``unmoved``: in vain, as it could not be used."""
        if unmoved:
            self.after_loss(fragment)
            return
        self._method.after_commit(self._live, fragment, {}, self._sent.pop(fragment, {}), ())

    def after_loss(self, fragment: int) -> None:
        """Tell it that progress of a fragment is dropped."""
        self._sent.pop(fragment, None)
        self._method.progress_lost(self._live, fragment)


# ---- moments and gradients ----
#
# Methods that share or correct the inner optimizer's get them fragment by fragment.
#
# A parameter without a moment has zeros: one that got no gradient yet, where Adam's moments are zeros of themselves,
# and one whose optimizer keeps no such moment, as Muon of matrices, where nobody reads them. Only where a step is still
# to make the moment is there nothing to share yet.


class Moments:
    """``optimizer.state[parameter][name]`` over the fragments of a model, whatever optimizer has the parameter."""

    def __init__(self, model: LiveModel, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """Copy it (N,); None while no parameter has one of that name and shape, or a step is still to make one."""
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
        """Copy it (N,), as backward, and the loop's clipping, left it; zero for a parameter that has none.

        ConfigError beside an optimizer that goes by losses alone.
        """
        if self._measures is not None:
            raise ConfigError(
                f"{type(self._optimizers[0]).__name__} makes no gradients, and the run's outer method goes by them; "
                "step another inner optimizer, or choose another outer method"
            )
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in self._of(fragment)]
        return torch.cat([_dense(one.detach()).float().cpu().flatten() for one in found])

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Add in each parameter's dtype and place. A parameter without a gradient gets one: zero, and so much more.

        ConfigError where a gradient is sparse: what is added to it is not, and who steps by sparse ones takes no other.
        """
        parameters = self._of(fragment)
        self._refuse_sparse(fragment, [one.grad is not None and _is_sparse(one.grad) for one in parameters])
        with torch.no_grad():
            pieces = split(added_N, [tuple(one.shape) for one in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += piece.to(parameter.grad)

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        """Derivatives of the last step; ConfigError where others could not make its directions again."""
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

    def _refuse_sparse(self, fragment: int, sparse: Sequence[bool]) -> None:
        for spec, is_sparse in zip(self._model.schema.fragments[fragment].parameters, sparse, strict=True):
            if is_sparse:
                raise ConfigError(sparse_sentence(spec.name))

    def _of(self, fragment: int) -> list[Tensor]:
        trained = self._model.trained
        return [trained[spec.name] for spec in self._model.schema.fragments[fragment].parameters]

    def _held(self, name: str, fragment: int) -> list[tuple[Tensor, Tensor | None]] | None:
        """Pair each parameter with its moment."""
        held = [(parameter, self._moment_of(parameter, name)) for parameter in self._of(fragment)]
        nobody = all(one is None for _, one in held)
        return None if nobody or any(self._awaits(parameter) for parameter, _ in held) else held

    def _awaits(self, parameter: Tensor) -> bool:
        """Tell whether its optimizer has still to make the step that its gradient is for, and with it the moments."""
        stepped = any(optimizer.state.get(parameter) for optimizer in self._optimizers)
        return parameter.grad is not None and not stepped

    def _moment_of(self, parameter: Tensor, name: str) -> Tensor | None:
        for optimizer in self._optimizers:
            state = optimizer.state.get(parameter, {})
            if name in state:
                moment: Tensor = state[name]
                return moment if moment.shape == parameter.shape else None
        return None


def sparse_sentence(name: str) -> str:
    """Say why a parameter with such a gradient does not fit a method that changes gradients."""
    return (
        f"the gradient of {name} is sparse, and the run's outer method changes all of its values: make the embedding "
        "with sparse=False and step it by another optimizer, or choose another method"
    )


def _is_sparse(gradient: Tensor) -> bool:
    return gradient.layout != torch.strided


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if _is_sparse(gradient) else gradient
