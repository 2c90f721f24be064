"""The buffers of a model behind the body of a frame: BatchNorm's running means, for instance.

Crosses the wire: little-endian float32, in the schema's order, after what the compressor wrote, under the same hash
and signature. They ride with fragment 0: on contributions, on slices and results of part 0, on both halves of a pair,
and on what gossip merges in the end. No length is read: the local schema gives it.

They are not compressed, for an error in a running variance is not averaged away. That costs 4 bytes a value, and
buffers are few; a mask as large as the context is better registered with ``persistent=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decentral.errors import NonFiniteError, PayloadError
from decentral.parameters import BufferSpec, Schema, first_non_finite, split
from decentral.tensors.ops import is_finite
from decentral.wire.frames import Frame, Header
from decentral.wire.keys import Digest
from decentral.wire.messages import Record

# Shape suffix: B = elements of all buffers, flat float32.

_FLOAT = np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Tail:
    """What crosses of the buffers. Without any, as where each peer keeps its own, frames have no tail."""

    buffers: tuple[BufferSpec, ...] = ()
    numel: int = 0
    takes_first: bool = False  # what the first contributor has, instead of the mean

    @classmethod
    def of(cls, schema: Schema, policy: str) -> Tail:
        """``policy``: average, first or own, as the manifest says."""
        shared = policy != "own"
        return cls(schema.buffers if shared else (), schema.buffer_numel if shared else 0, policy == "first")

    def nbytes(self, fragment: int, part: int = 0) -> int:
        """Bytes behind the body of a frame."""
        return 4 * self.numel if fragment == 0 and part == 0 else 0

    def nbytes_of(self, header: Header) -> int:
        """The same for a frame with this header."""
        return self.nbytes(header.fragment, header.part)

    def pack(self, buffers_B: Tensor) -> bytes:
        """The bytes that tell these buffers; none where nothing crosses. NonFiniteError names one with NaN or Inf."""
        if not self.numel:
            return b""
        if (culprit := first_non_finite(buffers_B, self.buffers)) is not None:
            raise NonFiniteError(
                f"NaN or Inf in the buffer {culprit}; nothing was sent: lower the learning rate, or, where it belongs "
                'there (a mask), register it with persistent=False or set buffers = "own" in [model]'
            )
        return buffers_B.numpy().astype(_FLOAT).tobytes()

    def split(self, frame: Frame) -> tuple[memoryview, Tensor | None]:
        """What the compressor wrote, and the sender's buffers (B,) if the frame carries them. Raises PayloadError."""
        body, nbytes = frame.body, self.nbytes_of(frame.header)
        if not nbytes:
            return body, None
        if len(body) < nbytes:
            raise PayloadError(f"body of {len(body)} bytes, its buffers alone take {nbytes}; drop it and its sender")
        return body[:-nbytes], self.unpack(body[-nbytes:])

    def unpack(self, tail: bytes | memoryview) -> Tensor:
        """The buffers (B,) that these bytes tell, new. Raises PayloadError."""
        tail_B = torch.from_numpy(np.frombuffer(tail, _FLOAT).astype(np.float32))
        if not is_finite(tail_B):
            raise PayloadError("buffers with NaN or Inf; drop the frame and its sender")
        return tail_B

    def opened(self, record: Record, frames: Mapping[Digest, Frame]) -> tuple[list[memoryview], Tensor | None]:
        """What the compressor wrote into each frame that a record names, and what the buffers become; None: they stay.

        Of a reduce the owner of part 0 has merged them.
        """
        opened = [(ref.peer, *self.split(frames[ref.frame])) for ref in record.frames]
        tails = [tail_B for _, _, tail_B in sorted(opened, key=lambda one: one[0]) if tail_B is not None]
        merged = None if not tails else tails[0] if record.contributors else self.merged(tails)
        return [body for _, body, _ in opened], merged

    def packed_merge(self, tails: Sequence[Tensor]) -> bytes:
        """The tail that tells what the contributors' buffers become; none where they told none."""
        return self.pack(self.merged(tails)) if tails else b""

    def merged(self, tails: Sequence[Tensor]) -> Tensor:
        """What the contributors' buffers become, given in the order of their ids: the same bits on every peer.

        The mean counts all alike, whatever ``outer.weighting`` says; summed in float64, so that it is finite.
        Whole numbers are rounded, half to even.
        """
        if self.takes_first:
            return tails[0]
        total_B = torch.zeros(self.numel, dtype=torch.float64)
        for tail_B in tails:
            total_B += tail_B
        mean_B = (total_B / torch.full_like(total_B[:1], len(tails))).to(torch.float32)
        for spec, piece in zip(self.buffers, split(mean_B, [spec.shape for spec in self.buffers]), strict=True):
            if spec.kind == "integer":
                piece.round_()
        return mean_B


NO_TAIL = Tail()
