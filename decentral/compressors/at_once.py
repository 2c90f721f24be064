"""Many tensors at once, for devices: they take microseconds to be told of any operation, and a model has many tensors.

A compressor may have ``compress_flat`` and ``add_flat``, for tensors that lie one behind the other, and a quantiser
behind a sparsifier ``compress_all`` and ``decompress_all``. What they make decodes as what one tensor at a time does;
none of them checks what it is given, as that is this process's own.
"""
# Shape suffix: N = values of all tensors.

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from decentral.compressors.base import Compressor, Payload, Shape

__all__ = ["AtOnce", "compress_all", "decompress_all"]


@runtime_checkable
class AtOnce(Protocol):
    """A compressor that takes all tensors of a fragment in a few operations."""

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """One payload per shape; None: one at a time, please. NonFiniteError as ``compress``."""

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """``total += weight * decompress`` of its own payloads in place; False, and nothing is added: one at a time."""


def compress_all(quantiser: Compressor, tensors: Sequence[Tensor]) -> list[Payload]:
    """One payload for each, by the quantiser's own way if it has one."""
    own = getattr(quantiser, "compress_all", None)
    found: list[Payload] = own(tensors) if own is not None else [quantiser.compress(one) for one in tensors]
    return found


def decompress_all(quantiser: Compressor, payloads: Sequence[Payload]) -> list[Tensor]:
    """What each holds."""
    own = getattr(quantiser, "decompress_all", None)
    found: list[Tensor] = own(payloads) if own is not None else [quantiser.decompress(one) for one in payloads]
    return found
