"""What gathered frames hold, read from their bytes once: payloads by channel, norms and sketches, and sums of them.

Where there is no room to keep what frames hold, it is here of one frame at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.compressors import Payload
from decentral.compressors.chain import AddBand
from decentral.parameters import Schema
from decentral.replica.buffers import Tail
from decentral.replica.codec import Codec, FixedShapes
from decentral.replica.received.measures import Measure
from decentral.replica.received.unpacked import Payloads, Unpacked
from decentral.tensors.ops import float32
from decentral.wire.frames import Frame, FrameKind

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class FrameContents:
    """Of one run's contributions and merges."""

    schema: Schema
    codec: Codec
    merge_codec: Codec  # of the merge that ends a gossip run
    tail: Tail
    unpacked: Unpacked = field(default_factory=Unpacked)

    def payloads(self, frame: Frame) -> Payloads:
        """All that a frame holds, read again when that is not kept. Raises PayloadError."""
        known = self.unpacked.get(frame)
        if known is not None:
            return known
        body, _ = self.tail.split(frame)
        made = self._codec_of(frame).unpack(body, self._shapes(frame) * frame.header.channels, frame.header.channels)
        self.unpacked.add(frame, made)
        return made

    def channel(self, frame: Frame, channel: int) -> Sequence[Payload]:
        """The payloads of one channel; the change is channel 0."""
        each = len(self._shapes(frame))
        return self.payloads(frame)[channel * each : (channel + 1) * each]

    def change(self, frame: Frame) -> Tensor:
        """The change (N,), as all decode it."""
        return self.codec.decompress(self.channel(frame, 0))

    def moved(self, frames: Sequence[Frame], numel: int) -> Tensor:
        """Where one of the changes has a value, bool (N,)."""
        moved_N = torch.zeros(numel, dtype=torch.bool)
        for frame in frames:
            moved_N |= self.change(frame) != 0
        return moved_N

    def measure(self, frame: Frame) -> Measure:
        """The change's norm and sketch, made again when they are not known. Raises PayloadError."""
        known = self.unpacked.measures.get(frame.hash)
        if known is not None:
            return known
        return self.unpacked.measures.add(frame.hash, Measure.of_payloads(self.codec, self.channel(frame, 0)))

    def add(self, frame: Frame, channel: int, scale: float, total_N: Tensor, weight: float) -> None:
        """``total += weight * scale * what the channel holds``, in place."""
        self._codec_of(frame).of(channel).add(total_N, self.channel(frame, channel), _counted(scale, weight))

    def opened(self, payloads: Payloads, scale: float, these: slice) -> list[AddBand]:
        """What adds some tensors of a contribution's change, of those that ``payloads`` holds, in bands."""
        return [_scaled(add, scale) for add in self.codec.opened(payloads[these])]

    def _shapes(self, frame: Frame) -> FixedShapes:
        return tuple(self.schema.fragments[frame.header.fragment].shapes)

    def _codec_of(self, frame: Frame) -> Codec:
        return self.merge_codec if frame.header.kind == FrameKind.MERGE else self.codec


def _scaled(add: AddBand, scale: float) -> AddBand:
    return lambda start, total_n, weight: add(start, total_n, _counted(scale, weight))


def _counted(scale: float, weight: float) -> float:
    return weight if scale == 1.0 else float32(weight * scale)  # two float32 make an exact float64: rounded once
