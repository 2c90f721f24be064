"""What feedback is: how what a compressor loses is sent later, as pure functions of explicit state.

A sender turns its gradient and its state into payloads and the next state; a receiver turns the mean of what all sent
into an estimate of the mean gradient. Both return new state and change nothing: the caller books it once a commit names
the frame. Booked earlier, a lost round would be counted twice or not at all; so an aborted round forgets what these
returned, and nothing is lost.

State is a dict of flat float32 tensors as long as the fragment; {} is the start, and stands for zeros. A mechanism with
state on the receiver's side has every peer hold the same of it: it belongs to the anchor, in snapshots and digests, and
its elementwise sums are the same bits everywhere. It also means that the peers whose frames make the mean must be the
same in every round: when they change, both sides empty their state, and the mechanism starts anew.
"""
# Shape suffixes: N = values of the fragment.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.compressors.base import Compressor, Payload, accumulate
from decentral.errors import ConfigError
from decentral.parameters import split
from decentral.tensors.threads import spread

__all__ = ["Feedback", "Sending", "Shapes", "State", "add_sent", "compress_flat", "slot"]

State = Mapping[str, Tensor]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sending:
    """One payload per shape, and the sender's state to book if, and only if, a commit names them."""

    payloads: tuple[Payload, ...]
    state: dict[str, Tensor]


@runtime_checkable
class Feedback(Protocol):
    """A mechanism; ``str()`` is its canonical spelling."""

    sender: ClassVar[tuple[str, ...]]  # names of what a sender keeps
    receiver: ClassVar[tuple[str, ...]]  # names of what every receiver keeps, alike

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress a finite gradient of these shapes together with what the state remembers."""

    def receive(self, mean_N: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """The estimate of the mean gradient from the mean of what was sent, and the receiver's next state."""


def slot(state: State, name: str, like_N: Tensor) -> Tensor:
    """What the state holds under a name: zeros at the start. ConfigError when it was made for another fragment."""
    if name not in state:
        return torch.zeros_like(like_N)
    if state[name].shape != like_N.shape:
        raise ConfigError(
            f"feedback: {name} {tuple(state[name].shape)} and gradient {tuple(like_N.shape)} differ in shape; "
            "start from the state of this fragment, or from {}"
        )
    return state[name]


def compress_flat(compressor: Compressor, flat_N: Tensor, shapes: Shapes) -> tuple[Payload, ...]:
    """One payload per shape, on as many threads as torch may use."""
    return tuple(spread(compressor.compress, split(flat_N, shapes), flat_N.numel()))


def add_sent(compressor: Compressor, total_N: Tensor, payloads: Sequence[Payload], weight: float = 1.0) -> None:
    """``total += weight * what a receiver decodes``, in place."""
    pieces = split(total_N, [payload.shape for payload in payloads])
    for piece, payload in zip(pieces, payloads, strict=True):
        accumulate(compressor, piece, payload, weight)
