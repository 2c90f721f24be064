"""Measures of one contribution: its norm and sketch, made where its frame is checked, and a sample of its coordinates.

Shape suffixes: N = elements of one fragment, K = contributions, S = numbers of a sketch or places of a sample, V =
values that are not zero; flat float32.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import Payload
from decentral.compressors.base import Decoded
from decentral.errors import PayloadError
from decentral.optimizers.aggregation.base import SquareSum
from decentral.optimizers.aggregation.gram import Sketching
from decentral.replica.codec import Codec, numel
from decentral.tensors.device import on_device_of
from decentral.tensors.ops import rows_of

__all__ = ["MOST_PLACES", "Measure", "Measures", "Sample", "norm_of"]

# ---- the norm and the sketch of each contribution ----
#
# They are made where its frame is checked anyway: few numbers, kept by its hash.
#
# Straight from the parts where they say places and values (64 of 4096: 3 ms for 31 million parameters, 40 through a
# dense tensor); else one pass over what each tensor decompresses to. Which of the two is the compressor's alone, for
# squares add up in another order, and every peer must get the same bits. A sum of squares finds NaN and Inf, too. An
# outer step must not depend on what happens to be here: what is missing is measured again, to the same bits.

KEPT = 1024  # frames, 4 KiB each: a round of the largest membership


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of one contribution, or of one slice of it."""

    norm: float
    sketch_S: Tensor  # see ``Sketching``

    @classmethod
    def of(cls, pieces: Iterable[Tensor], numel: int) -> Measure:
        """Measure float32 tensors of ``numel`` values in all, one behind the other. PayloadError when one is NaN or
        Inf.
        """
        squares, sketching = SquareSum(), Sketching(numel)
        for value_RL in rows_of(pieces):
            squares.add(value_RL)
            sketching.add(value_RL)
        return cls._from_sums(squares, sketching)

    @classmethod
    def of_payloads(cls, codec: Codec, payloads: Sequence[Payload]) -> tuple[Measure, Sequence[Decoded]]:
        """Measure what a change's payloads hold; return what they decompress to, too. PayloadError when one does not,
        or is NaN or Inf.
        """
        decoded = codec.compressor.decompress(payloads)
        return cls._of_decoded(codec, payloads, decoded), decoded

    @classmethod
    def _of_decoded(cls, codec: Codec, payloads: Sequence[Payload], decoded: Sequence[Decoded]) -> Measure:
        whole = numel([payload.shape for payload in payloads])
        squares, sketching, values = SquareSum(), Sketching(whole), list[Tensor]()
        for found in codec.supports(payloads, decoded):  # one at a time: places are longer than what was sent
            if found is None:
                return cls.of(codec.pieces(payloads), whole)
            place_V, value_V = found
            sketching.add_at(place_V.numpy(), value_V.numpy())
            values.append(value_V)
        for value_RL in rows_of(values):
            squares.add(value_RL)
        return cls._from_sums(squares, sketching)

    @classmethod
    def _from_sums(cls, squares: SquareSum, sketching: Sketching) -> Measure:
        norm = squares.root()
        if not math.isfinite(norm):  # one NaN in a mean would reach every peer
            raise PayloadError("body decodes to NaN or Inf; drop it and its sender")
        return cls(norm, sketching.sketch())


class Measures:
    """The measures of the newest frames, by hash. Called from the threads that measure."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Measure] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, frame: bytes) -> Measure | None:
        """Return the measure of a frame, while it is remembered."""
        return self._known.get(frame)

    def add(self, frame: bytes, made: Measure) -> Measure:
        """Remember what was measured of a frame."""
        with self._lock:
            self._known[frame] = made
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made


# ---- a sample of each fragment's coordinates ----
#
# A few are looked at for all: which of them anybody has sent yet, how large is what is owed.
#
# One random place in each of S equal ranges, the same on every peer: of 16,384 a share is off by 0.4 % at most and a
# norm of Gaussian values by 0.6 % (one standard deviation). All of a fragment that is no larger. A pass over every
# coordinate would be a sizeable part of the outer step.

MOST_PLACES = 1 << 14  # places of one fragment
_SEED = 1  # any, the same on all peers


class Sample:
    """The coordinates of one fragment that are looked at."""

    def __init__(self, numel: int, most: int = MOST_PLACES) -> None:
        self.numel, self._place_S = numel, _places(numel, most) if numel > most else None

    @property
    def size(self) -> int:
        """Return how many coordinates it has."""
        return self.numel if self._place_S is None else len(self._place_S)

    def of(self, value: Tensor) -> Tensor:
        """Return the sample's values of (N,) or (K, N), no copy where it is all of them."""
        return value if self._place_S is None else value.index_select(-1, on_device_of(self._place_S, value))

    def of_part(self, value: Tensor, start: int) -> Tensor:
        """Return the sample's values of what lies at ``start`` of the fragment, flat; of parts in order they make up
        `of`.
        """
        if self._place_S is None:
            return value
        place_S = self._place_S.numpy()  # of a band it takes numpy microseconds, and torch a hundred
        first, last = place_S.searchsorted((start, start + value.shape[0]))
        return torch.from_numpy(value.numpy()[place_S[first:last] - start])

    def nonzero(self, change: Tensor) -> Tensor:
        """Return where something was sent, bool (S,), of a change (N,) in which only what nobody sent is zero; or of
        rows (K, N) of each.
        """
        came = self.of(change) != 0
        return came if came.dim() == 1 else came.any(0)

    def norm(self, value_N: Tensor) -> float:
        """Return the norm of the sample alone: for ratios of two."""
        return norm_of(self.of(value_N))


def norm_of(value_S: Tensor) -> float:
    """Return the norm of values, summed in float64."""
    return float(torch.linalg.vector_norm(value_S, dtype=torch.float64))


def _places(numel: int, count: int) -> Tensor:
    """Return rising places, one in each of ``count`` ranges that differ in length by one at most."""
    bound = torch.arange(count + 1, dtype=torch.int64, device="cpu") * numel // count
    within = torch.rand(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64, device="cpu")
    return bound[:-1] + (within * bound.diff()).long()
