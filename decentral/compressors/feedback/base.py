"""What feedback is: how what a compressor loses is sent later, as pure functions of explicit state.

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
# Shape suffixes: N = values of the fragment.

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.compressors.at_once import AtOnce, accumulate_all, compress_each
from decentral.compressors.base import Compressor, Payload
from decentral.errors import ConfigError
from decentral.parameters import split
from decentral.tensors.threads import elements_here

__all__ = ["Feedback", "Receiving", "Sending", "Shapes", "State", "add_sent", "compress_flat", "slot"]

State = Mapping[str, Tensor]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Sending:
    """One payload per shape, and the sender's state to book if, and only if, a commit names them."""

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
        """What one sender's gradient is taken for, from what was decoded of it and the state kept of that sender."""


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
    """One payload per shape: on the processor on as many threads as torch may use, on a device at once if it can."""
    if not elements_here(flat_N) and isinstance(compressor, AtOnce):
        found = compressor.compress_flat(flat_N, shapes)
        if found is not None:
            return found
    return compress_each(compressor, split(flat_N, shapes), elements_here(flat_N))


def add_sent(compressor: Compressor, total_N: Tensor, payloads: Sequence[Payload], weight: float = 1.0) -> None:
    """``total += weight * what a receiver decodes``, in place, of payloads that this process made."""
    if not elements_here(total_N) and isinstance(compressor, AtOnce) and compressor.add_flat(total_N, payloads, weight):
        return
    accumulate_all(compressor, split(total_N, [payload.shape for payload in payloads]), payloads, weight)
