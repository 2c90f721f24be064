"""Many tensors at once: a model has hundreds, and to tell torch of any operation takes microseconds, of a device more.

A compressor may have ``compress_flat`` and ``add_flat``, for tensors that lie one behind the other on a device, whose
payloads are this process's own. Anywhere it may have ``compress_many`` and ``accumulate_many``, and a quantiser behind
a sparsifier ``compress_all`` and ``decompress_all``. What they make decodes, bit for bit, as what one tensor at a time
does, and what they are given to decode is checked as it is there.
"""
# Shape suffix: N = values of all tensors.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.compressors.base import Compressor, Payload, Shape, accumulate
from decentral.tensors.threads import lumps, spread

__all__ = ["AtOnce", "accumulate_all", "compress_all", "compress_each", "decompress_all"]

_LEAST = 1 << 17  # values that are a job for a thread
_LUMP = 1 << 21  # values of tensors that are handled together: a few dozen calls to torch are little beside that


@runtime_checkable
class AtOnce(Protocol):
    """A compressor that takes all tensors of a fragment in a few operations."""

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """One payload per shape; None: one at a time, please. NonFiniteError as ``compress``."""

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """``total += weight * decompress`` of its own payloads in place; False, and nothing is added: one at a time."""


def compress_each(compressor: Compressor, tensors: Sequence[Tensor], numel: int) -> tuple[Payload, ...]:
    """One payload for each, on as many threads as torch may use; ``numel``: elements that the processor works on."""
    own = getattr(compressor, "compress_many", None)
    if own is None:
        return tuple(spread(compressor.compress, tensors, numel))
    sizes = [one.numel() for one in tensors]
    least = min(_LUMP, max(_LEAST, sum(sizes) // (4 * torch.get_num_threads())))  # for each thread several jobs
    jobs = [tensors[lump] for lump in lumps(sizes, least)]
    return tuple(chain.from_iterable(spread(own, jobs, numel)))


def accumulate_all(
    compressor: Compressor, totals: Sequence[Tensor], payloads: Sequence[Payload], weight: float
) -> None:
    """`accumulate` of each in its contiguous total. PayloadError; some have been added then."""
    own = getattr(compressor, "accumulate_many", None)
    if own is None:
        for total, payload in zip(totals, payloads, strict=True):
            accumulate(compressor, total, payload, weight)
        return
    for lump in lumps([math.prod(payload.shape) for payload in payloads], _LUMP):
        own(totals[lump], payloads[lump], weight)


def compress_all(quantiser: Compressor, tensors: Sequence[Tensor]) -> list[Payload]:
    """One payload for each, by the quantiser's own way if it has one."""
    own = getattr(quantiser, "compress_all", None)
    found: list[Payload] = own(tensors) if own is not None else [quantiser.compress(one) for one in tensors]
    return found


def decompress_all(quantiser: Compressor, payloads: Sequence[Payload]) -> list[Tensor]:
    """What each holds. PayloadError when a part breaks a rule."""
    own = getattr(quantiser, "decompress_all", None)
    found: list[Tensor] = own(payloads) if own is not None else [quantiser.decompress(one) for one in payloads]
    return found
