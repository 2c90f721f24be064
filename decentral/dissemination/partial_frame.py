"""What is here of a frame that did not come whole, and what a holder's answer makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from decentral.wire.frames import frame_hash
from decentral.wire.pieces import Range


@dataclass(frozen=True, slots=True)
class Part:
    """``data`` is as long as the frame; in ``missing`` it holds nothing. Without ``missing``, nothing came."""

    data: bytes
    missing: tuple[Range, ...]

    def filled(self, answer: bytes, frame: bytes) -> bytes | None:
        """The frame with that hash; None when the answer makes another of it, or what is here was forged."""
        whole = self._with(answer) if self.missing else answer
        return whole if whole is not None and frame_hash(whole) == frame else None

    def _with(self, answer: bytes) -> bytes | None:
        if len(answer) != sum(stop - start for start, stop in self.missing):
            return None
        whole, at = bytearray(self.data), 0
        for start, stop in self.missing:
            whole[start:stop] = answer[at : at + stop - start]
            at += stop - start
        return bytes(whole)


NOTHING = Part(b"", ())
