"""What a payload adds to a total band by band, so that the sum of many contributions stays in the cache.

An embedding does not fit there, and a few sparse contributions touch most lines of it: added one after the other, each
goes through all of it. A band is a run of the flattened tensor; a compressor that cannot cut its payloads has one.
"""
# Shape suffix: n = values of a band.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from decentral.compressors.base import Compressor, Payload, Shape, accumulate

__all__ = ["AddBand", "InBands", "added_whole", "band_of", "opened"]

AddBand = Callable[[int, Tensor, float], None]  # add(start, total_n, weight): what lies in the band from there on


class InBands(Protocol):
    """A compressor whose payloads may be added in bands of the tensor."""

    def band(self, shape: Shape) -> int:
        """Values of each band of a tensor of this shape, but for the last; the whole tensor's where it is not cut."""

    def opened(self, payloads: Sequence[Payload]) -> list[AddBand]:
        """What adds each band of each, contiguous, in place, to the bits of ``accumulate``. PayloadError when a part
        breaks a rule, before anything is added of a payload.
        """


def band_of(compressor: Compressor, shape: Shape) -> int:
    """See `InBands`."""
    own = getattr(compressor, "band", None)  # isinstance costs 40 microseconds, for each tensor of each contribution
    return math.prod(shape) if own is None else int(own(shape))


def opened(compressor: Compressor, payloads: Sequence[Payload]) -> list[AddBand]:
    """See `InBands`; of one that cannot be cut, the whole."""
    own = getattr(compressor, "opened", None)
    found: list[AddBand] = [added_whole(compressor, one) for one in payloads] if own is None else own(payloads)
    return found


def added_whole(compressor: Compressor, payload: Payload) -> AddBand:
    """What adds all of it, and reads it when it does."""
    return lambda start, total_n, weight: accumulate(compressor, total_n.view(payload.shape), payload, weight)
