"""The norm and the sketch of each contribution, made where its frame is checked anyway: few numbers, kept by its hash.

One pass over what it decompresses to, tensor by tensor: the sum of squares finds NaN and Inf, too, and no dense copy of
the whole is made. Straight from the parts of a sparse frame the squares would be added tile by tile, to other bits.
An outer step must not depend on what happens to be here: what is missing is measured again, to the same bits.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from decentral.errors import PayloadError
from decentral.optimizers.aggregation.norm_clip import SquareSum
from decentral.optimizers.aggregation.sketches import Sketching
from decentral.tensors.rows import rows_of

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
        if not math.isfinite(squares.root()):  # one NaN in a mean would reach every peer
            raise PayloadError("body decodes to NaN or Inf; drop it and its sender")
        return cls(squares.root(), sketching.sketch())


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
