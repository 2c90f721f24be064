"""What the bodies of gathered frames hold, read from their bytes once: checked, measured and added from the same parts.

Kept for as long as the round is open, of each sender the newest frame of a round, and within so many bytes: a sparse
contribution to 31 million parameters takes 1.5 MB. What found no room is read again. What was measured stays longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from decentral.compressors import Payload
from decentral.replica.received.measures import Measures
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId

CAPACITY = 1 << 26  # bytes, of the 256 MiB for frames: most of a round's, where sparse ones take a hundredth of it each
GATHERED = (FrameKind.CONTRIBUTION, FrameKind.MERGE)  # what every peer adds up itself

Payloads = Sequence[Payload]


class Unpacked:
    """By round and sender. Called from the threads that decode."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity, self.nbytes, self.measures = capacity, 0, Measures()
        self._kept: dict[tuple[int, PeerId], tuple[bytes, Payloads]] = {}  # with the frame's hash
        self._lock = threading.Lock()

    def get(self, frame: Frame) -> Payloads | None:
        """What was read of a frame, while it is kept."""
        hash_, payloads = self._kept.get(_key(frame), (b"", ()))
        return payloads if hash_ == frame.hash else None

    def add(self, frame: Frame, payloads: Payloads) -> bool:
        """Keep what a frame holds; False when there is no room for it, even without those of rounds before its own."""
        with self._lock:
            self._drop(_key(frame))
            for past in sorted(key for key in self._kept if key[0] < frame.header.round):
                if self._fits(payloads):
                    break
                self._drop(past)
            if not self._fits(payloads):
                return False
            self._kept[_key(frame)] = frame.hash, payloads
            self.nbytes += nbytes_of(payloads)
            return True

    def forget_before(self, round_: int) -> None:
        """Drop what is of rounds before ``round_``."""
        with self._lock:
            for key in [key for key in self._kept if key[0] < round_]:
                self._drop(key)

    def _fits(self, payloads: Payloads) -> bool:
        return self.nbytes + nbytes_of(payloads) <= self.capacity

    def _drop(self, key: tuple[int, PeerId]) -> None:
        _, payloads = self._kept.pop(key, (b"", ()))
        self.nbytes -= nbytes_of(payloads)


def nbytes_of(payloads: Payloads) -> int:
    """What their parts take in memory."""
    return sum(part.nbytes for payload in payloads for part in payload.parts)


def _key(frame: Frame) -> tuple[int, PeerId]:
    return frame.header.round, frame.header.sender
