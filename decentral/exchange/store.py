"""The frames this peer holds: of the round in progress, and of the last commits for those who missed them.

Bounded twice, by bytes in all and by frames per sender and round, so that a peer that sends frames nobody asked
for can fill its own share and no more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from decentral.errors import PayloadError
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId

Digest = bytes

PER_SENDER = 64  # frames of one sender in one round: one contribution, or the slices and results of a few plans


class FrameStore:
    """Frames by hash, oldest round dropped first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes
        self.nbytes = 0
        self._frames: OrderedDict[Digest, Frame] = OrderedDict()
        self._count: Counter[tuple[PeerId, int]] = Counter()

    def __contains__(self, frame: Digest) -> bool:
        return frame in self._frames

    def get(self, frame: Digest) -> Frame | None:
        """The frame with that hash, or None."""
        return self._frames.get(frame)

    def add(self, frame: Frame) -> None:
        """Hold ``frame``. Raises PayloadError when its sender has too many in this round already."""
        if frame.hash in self._frames:
            return
        key = (frame.header.sender, frame.header.round)
        if self._count[key] >= PER_SENDER:
            raise PayloadError(f"more than {PER_SENDER} frames of one sender in round {key[1]}; drop its frames")
        self._frames[frame.hash] = frame
        self._count[key] += 1
        self.nbytes += frame.nbytes
        while self.nbytes > self.capacity and len(self._frames) > 1:
            self._drop(next(iter(self._frames)))

    def forget_before(self, round_: int) -> None:
        """Drop frames of rounds before ``round_``."""
        for key in [key for key, frame in self._frames.items() if frame.header.round < round_]:
            self._drop(key)

    def _drop(self, key: Digest) -> None:
        frame = self._frames.pop(key)
        self.nbytes -= frame.nbytes
        owner = (frame.header.sender, frame.header.round)
        self._count[owner] -= 1
        if self._count[owner] <= 0:
            del self._count[owner]
