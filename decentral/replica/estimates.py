"""What each contributor's change is taken for, where receivers remember: what came, with what is kept of its sender.

Under ef21 a frame holds how the sender's gradient differs from what it sent before, so a mean of frames would say
nothing. The mean is that of the estimates of those whom the record names; who is absent is not in it, as ever. Norms
that clip and warn are those of the estimates, too: a difference is long when its sender is new, and that is no fault.

One estimate is in memory at a time, beside what is kept. It is made twice: to measure and keep, then to add.
"""
# Shape suffix: N = elements of one fragment, of a total those of all channels, flat float32.

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from decentral.compressors.feedback import Receiving, State
from decentral.errors import NonFiniteError
from decentral.replica.codec import Codec
from decentral.replica.measures import Measure
from decentral.replica.senders import Senders
from decentral.replica.unpacked import Payloads
from decentral.tensors.finite import is_finite
from decentral.tensors.rounding import float32
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId


@dataclass(frozen=True, slots=True)
class Told:
    """What a record's contributions leave with every receiver."""

    states: dict[PeerId, State] = field(default_factory=dict)  # to keep of each sender
    measures: dict[PeerId, Measure] = field(default_factory=dict)  # of the estimates


NOTHING_TOLD = Told()


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of gathered contributions. Pure: what is kept of senders is not changed."""

    codec: Codec
    senders: Senders
    payloads: Callable[[Frame], Payloads]  # what a frame holds
    change: Callable[[int], int]  # how many of them the change to a fragment takes; further channels follow

    def told(self, frames: Iterable[Frame]) -> Told:
        """What there is to keep of their senders. NonFiniteError when a sender has sent beyond float32 in all."""
        if not self.senders.names:
            return NOTHING_TOLD
        states: dict[PeerId, State] = {}
        measures: dict[PeerId, Measure] = {}
        for frame in frames:
            peer, receiving = frame.header.sender, self._receiving(frame, self.payloads(frame))
            if not is_finite(receiving.estimate_N):
                raise NonFiniteError(
                    "what a peer sent in all is not finite; drop the contributor with values near 1e38"
                )
            states[peer] = receiving.state
            measures[peer] = Measure.of([receiving.estimate_N], receiving.estimate_N.numel())
        return Told(states, measures)

    def add(self, frame: Frame, scale: float, total_N: Tensor, weight: float) -> None:
        """``total += weight * contribution``; the change, which is the first channel, ``scale`` times as much."""
        payloads, change = self.payloads(frame), self.change(frame.header.fragment)
        estimate_N = self._receiving(frame, payloads).estimate_N
        size = estimate_N.numel()
        total_N[:size] += estimate_N * (weight if scale == 1.0 else float32(weight * scale))
        if payloads[change:]:
            self.codec.add(total_N[size:], payloads[change:], weight)

    def _receiving(self, frame: Frame, payloads: Payloads) -> Receiving:
        arrived_N = self.codec.decompress(payloads[: self.change(frame.header.fragment)])
        return self.codec.feedback.receive(arrived_N, self.senders.of(frame.header.fragment, frame.header.sender))
