"""The norm and the sketch of each contribution, made where its frame is checked anyway: few numbers, kept by its hash.

Straight from the parts where they say places and values (64 of 4096: 3 ms for 31 million parameters, 40 through a dense
tensor); else one pass over what each tensor decompresses to. Which of the two is the compressor's alone, for squares
add up in another order, and every peer must get the same bits. A sum of squares finds NaN and Inf, too.
An outer step must not depend on what happens to be here: what is missing is measured again, to the same bits.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from decentral.compressors import Payload
from decentral.errors import PayloadError
from decentral.optimizers.aggregation.norm_clip import SquareSum
from decentral.optimizers.aggregation.sketches import Sketching
from decentral.replica.codec import Codec, numel
from decentral.tensors.ops import rows_of

# Shape suffixes: S = numbers of a sketch, V = values that are not zero.

KEPT = 1024  # frames, 4 KiB each: a round of the largest membership


@dataclass(frozen=True, slots=True)
class Measure:
    """What is known of one contribution, or of one slice of it."""

    norm: float
    sketch_S: Tensor  # see optimizers.sketches

    @classmethod
    def of(cls, pieces: Iterable[Tensor], numel: int) -> Measure:
        """Of float32 tensors of ``numel`` values in all, one behind the other. PayloadError when one is NaN or Inf."""
        squares, sketching = SquareSum(), Sketching(numel)
        for value_RL in rows_of(pieces):
            squares.add(value_RL)
            sketching.add(value_RL)
        return cls._made(squares, sketching)

    @classmethod
    def of_payloads(cls, codec: Codec, payloads: Sequence[Payload]) -> Measure:
        """Of what a change's payloads hold. PayloadError when one does not decompress, or is NaN or Inf."""
        whole = numel([payload.shape for payload in payloads])
        found = codec.supports(payloads)
        if found is None:
            return cls.of(codec.pieces(payloads), whole)
        squares, sketching = SquareSum(), Sketching(whole)
        for place_V, value_V in found:
            sketching.add_at(place_V.numpy(), value_V.numpy())
        for value_RL in rows_of(value_V for _, value_V in found):
            squares.add(value_RL)
        return cls._made(squares, sketching)

    @classmethod
    def _made(cls, squares: SquareSum, sketching: Sketching) -> Measure:
        norm = squares.root()
        if not math.isfinite(norm):  # one NaN in a mean would reach every peer
            raise PayloadError("body decodes to NaN or Inf; drop it and its sender")
        return cls(norm, sketching.sketch())


class Measures:
    """The newest frames', by hash. Called from the threads that measure."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Measure] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, frame: bytes) -> Measure | None:
        """What was measured of a frame, while it is remembered."""
        return self._known.get(frame)

    def add(self, frame: bytes, made: Measure) -> Measure:
        """Remember what was measured of a frame."""
        with self._lock:
            self._known[frame] = made
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made
