"""A fragment in equal slices, and which of them a peer says it trained: in a summary, uint16 each, little-endian."""

import struct
from collections.abc import Sequence

from decentral.optimizers.base import MAX_SUMMARY_NBYTES
from decentral.optimizers.owners import Span
from decentral.optimizers.round_info import Contributor

__all__ = ["span_of", "trained_by", "written"]

_SLICE = struct.Struct("<H")
_NAMED = MAX_SUMMARY_NBYTES // _SLICE.size


def span_of(number: int, slices: int, numel: int) -> Span:
    """Where slice ``number`` of so many begins and stops."""
    return numel * number // slices, numel * (number + 1) // slices


def written(named: Sequence[int]) -> bytes:
    """The first 32; what moves in a slice that is not named counts nothing."""
    return b"".join(map(_SLICE.pack, named[:_NAMED]))


def trained_by(contributor: Contributor, slices: int) -> tuple[int, ...]:
    """The slices that it names; none where it names one that there is not, or one twice."""
    if len(contributor.summary) % _SLICE.size:
        return ()
    named = tuple(int(number) for (number,) in _SLICE.iter_unpack(contributor.summary))
    return named if len(set(named)) == len(named) and all(number < slices for number in named) else ()
