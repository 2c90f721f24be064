"""What each contributor's change is taken for, where receivers remember: what came, with what is kept of its sender.

Under ef21 a frame holds how the sender's gradient differs from what it sent before, so a mean of frames would say
nothing. The mean is that of the estimates of those whom the record names; who is absent is not in it, as ever. Norms
that clip and warn are those of the estimates, too: a difference is long when its sender is new, and that is no fault.

One member could end every round otherwise: the sum of two frames of values near 2e38 is beyond float32. Its sender is
taken for new then, and starts anew as all hold it; a rule that clips sees one long estimate.

One estimate is in memory at a time, beside what is kept. It is made twice: to measure and keep, then to add.
"""
# Shape suffix: N = elements of one fragment, flat float32.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from decentral.compressors.feedback import Receiving, State
from decentral.replica.received.frame_contents import FrameContents
from decentral.replica.received.measures import Measure
from decentral.replica.received.senders import Senders
from decentral.tensors.ops import float32, is_finite
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId


@dataclass(frozen=True, slots=True)
class KeptOfSenders:
    """What a record's contributions leave with every receiver."""

    states: dict[PeerId, State] = field(default_factory=dict)  # to keep of each sender
    measures: dict[PeerId, Measure] = field(default_factory=dict)  # of the estimates


NOTHING_KEPT = KeptOfSenders()


@dataclass(frozen=True, slots=True)
class Estimates:
    """Of contributions. Pure: what is kept of senders is not changed."""

    contents: FrameContents
    senders: Senders

    def told(self, frames: Iterable[Frame]) -> KeptOfSenders:
        """What there is to keep of their senders."""
        states: dict[PeerId, State] = {}
        measures: dict[PeerId, Measure] = {}
        for frame in frames:
            peer, receiving = frame.header.sender, self._receiving(frame)
            states[peer] = receiving.state
            measures[peer] = Measure.of([receiving.estimate_N], receiving.estimate_N.numel())
        return KeptOfSenders(states, measures)

    def add(self, frame: Frame, scale: float, total_N: Tensor, weight: float) -> None:
        """``total += weight * scale * change``."""
        total_N += self._receiving(frame).estimate_N * (weight if scale == 1.0 else float32(weight * scale))

    def _receiving(self, frame: Frame) -> Receiving:
        """A sender that has sent beyond float32 in all is taken for new: what came is finite, and the round goes on."""
        kept, feedback = self.senders.of(frame.header.fragment, frame.header.sender), self.contents.codec.feedback
        arrived_N = self.contents.change(frame)
        receiving = feedback.receive(arrived_N, kept)
        return receiving if is_finite(receiving.estimate_N) else feedback.receive(arrived_N, {})
