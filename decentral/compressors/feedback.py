"""Error feedback: how what a compressor loses is sent later, by pure functions of explicit state.

The seam is `Feedback`. The plainest mechanisms are here; those that send changes are in `ef21`, and `dgc` stands beside
the selection that it was made for (`threshold`).

A sender turns its gradient and its state into payloads and the next state. A receiver turns what it decoded of one
sender's payloads, and what it keeps of that sender, into its estimate of that sender's gradient and what to keep next;
the mean of the estimates is the mean gradient. Both return new state and change nothing: the caller books it once a
commit names the frame. Booked earlier, a lost round would be counted twice or not at all; so an aborted round forgets
what these returned, and nothing is lost.

State is a dict of flat float32 tensors as long as the fragment; {} is the start, and stands for zeros. What receivers
keep of a sender has the same bits everywhere, the sender's own ``sent`` among them: both add the same decoded values in
the same order. So it belongs to the anchor, in snapshots, once per sender, who reads it there. It is the sum of what
arrived, under the name ``sent``, and the estimate. A round without a sender changes nothing of its state on either
side; when it is no member any more, both start anew with {}.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.compressors.base import (
    About,
    Compressor,
    Payload,
    Shapes,
    Spelled,
    accumulate,
    add_flat,
    compress_flat,
)
from decentral.errors import ConfigError
from decentral.parameters import split
from decentral.tensors.memory import fresh_like
from decentral.tensors.threads import elements_here, spread

__all__ = [
    "DEBT",
    "SENT",
    "VELOCITY",
    "ErrorFeedback",
    "Feedback",
    "NoFeedback",
    "Receiving",
    "Sending",
    "State",
    "send_more",
    "slot",
]

# Shape suffix: N = values of the fragment.

State = Mapping[str, Tensor]
DEBT = "debt"  # the name in a sender's state of what compression lost, and is to be sent yet
SENT = "sent"  # of what receivers hold of it
VELOCITY = "velocity"  # of the momentum that is made before compression


@dataclass(frozen=True, slots=True)
class Sending:
    """A payload per shape, and the sender's state to book if, and only if, a commit names them."""

    payloads: tuple[Payload, ...]
    state: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Receiving:
    """The estimate of one sender's gradient, and what to keep of it if, and only if, a commit names its frame."""

    estimate_N: Tensor
    state: dict[str, Tensor]


@runtime_checkable
class Feedback(Protocol):
    """A mechanism; ``str()`` is its canonical spelling."""

    sender: ClassVar[tuple[str, ...]]  # names of what a sender keeps
    receiver: ClassVar[tuple[str, ...]]  # names of what every receiver keeps of each sender, alike

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress a finite gradient of these shapes together with what the state remembers."""

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """Estimate one sender's gradient from what was decoded of it and the state kept of that sender."""


def slot(state: State, name: str, like_N: Tensor) -> Tensor:
    """Return the state's tensor of a name, zeros at the start. ConfigError when it was made for another fragment."""
    if name not in state:
        return torch.zeros_like(like_N)
    if state[name].shape != like_N.shape:
        raise ConfigError(
            f"feedback: {name} {tuple(state[name].shape)} and gradient {tuple(like_N.shape)} differ in shape; "
            "start from the state of this fragment, or from {}"
        )
    return state[name]


def send_more(feedback: Feedback, gradient_N: Tensor, state: State, more_N: Tensor) -> tuple[Tensor, State]:
    """Return gradient and state with ``more_N`` to be sent once: past a momentum, which would repeat it."""
    if VELOCITY in feedback.sender:
        return gradient_N, {**state, DEBT: slot(state, DEBT, gradient_N) + more_N}
    return gradient_N + more_N, state


# ---- none: no feedback ----
#
# The losses of a compressor are gone for good.


@dataclass(frozen=True, slots=True)
class NoFeedback(Spelled):
    """``send C(g)``; for compressors without bias, or with so little that it does not matter."""

    name: ClassVar[str] = "none"
    about: ClassVar[About] = About(layout="no state", biased=True, source="-")
    sender: ClassVar[tuple[str, ...]] = ()
    receiver: ClassVar[tuple[str, ...]] = ()

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress the gradient."""
        return Sending(compress_flat(compressor, gradient_N.detach(), shapes), {})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """Take the gradient for what arrived."""
        return Receiving(arrived_N, {})


# ---- ef: what is dropped is owed ----
#
# m = beta * debt + g ; send C(m) ; debt = m - C(m).
#
# Source: Seide et al., "1-bit stochastic gradient descent", 2014; Stich et al., "Sparsified SGD with Memory", 2018,
# arXiv:1809.07599; the decay beta as in Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706.


@dataclass(frozen=True, slots=True)
class ErrorFeedback(Spelled):
    """``beta`` of what is owed is kept from round to round: 1 forgets nothing."""

    name: ClassVar[str] = "ef"
    about: ClassVar[About] = About(
        layout="sender: debt",
        biased=False,
        source='Stich et al., "Sparsified SGD with Memory", 2018, arXiv:1809.07599',
    )
    sender: ClassVar[tuple[str, ...]] = (DEBT,)
    receiver: ClassVar[tuple[str, ...]] = ()
    beta: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"{self}: the debt's decay must be in [0, 1]; 0.95 is usual")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress the gradient and what is owed; the new debt is what that lost."""
        if not elements_here(gradient_N):
            return self._send_from_device(compressor, gradient_N, state, shapes)
        owed_N = fresh_like(gradient_N)
        owed, gradients = split(owed_N, shapes), split(gradient_N.detach(), shapes)
        debts: Sequence[Tensor | None] = [None] * len(shapes)
        if DEBT in state:
            debts = split(slot(state, DEBT, gradient_N), shapes)

        def one(job: tuple[Tensor, Tensor, Tensor | None]) -> Payload:
            return _send(compressor, *job, self.beta)

        payloads = spread(one, list(zip(gradients, owed, debts, strict=True)), elements_here(gradient_N))
        return Sending(tuple(payloads), {DEBT: owed_N})

    def _send_from_device(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Send all tensors at once: a device has no cache in which one of them would wait."""
        owed_N = gradient_N.detach().clone()
        if DEBT in state:
            owed_N.add_(slot(state, DEBT, gradient_N), alpha=self.beta)
        payloads = compress_flat(compressor, owed_N, shapes)
        add_flat(compressor, owed_N, payloads, -1.0)
        return Sending(payloads, {DEBT: owed_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """Take the gradient for what arrived."""
        return Receiving(arrived_N, {})


def _send(compressor: Compressor, gradient: Tensor, owed: Tensor, debt: Tensor | None, beta: float) -> Payload:
    """Send a tensor from beginning to end while it is in the cache; ``owed`` becomes what is still owed after it.
    Rounded once where the machine can, which the sender alone sees.
    """
    if debt is None:
        owed.copy_(gradient)
    else:
        torch.add(gradient, debt, alpha=beta, out=owed)
    (payload,) = compressor.compress([owed])
    accumulate(compressor, owed, payload, -1.0)
    return payload
