"""Which experts a peer says are its own: those whose number, modulo so many peers, is its place among them.

In a summary: places one after the other, each two uint16, little-endian: the place, and of how many. Of more peers than
there are experts, a place names one expert.
"""

import struct
from collections.abc import Sequence

from decentral.optimizers.base import MAX_SUMMARY_NBYTES
from decentral.optimizers.experts import Layers
from decentral.optimizers.owners import Part
from decentral.optimizers.round_info import Contributor

__all__ = ["ALL", "Place", "by_expert", "named_by", "owns", "written"]

Place = tuple[int, int]
ALL: Place = (0, 1)
_PLACE = struct.Struct("<HH")
_NAMED = MAX_SUMMARY_NBYTES // _PLACE.size


def by_expert(layers: Layers) -> dict[int, Part]:
    """By number where an expert is, in all layers: who owns it owns it in each."""
    numbers = sorted({expert for experts in layers.values() for expert in experts})
    return {e: [span for experts in layers.values() for span in experts.get(e, [])] for e in numbers}


def owns(named: Sequence[Place], expert: int) -> bool:
    """Whether one of these places has the expert."""
    return any(expert % count == place for place, count in named)


def written(now: Place, before: Place, moved: Sequence[int], num_experts: int) -> bytes:
    """The place, and the others that ``moved``: one by one, or where they are too many the place before with what it
    does not have, or else all. What is named without having moved counts as zero in the mean of its owners.
    """
    for named in ([now], [now, before]):
        named += [(e, num_experts) for e in moved if not owns(named, e)]
        if len(named) <= _NAMED:
            return b"".join(_PLACE.pack(*place) for place in named)
    return _PLACE.pack(*ALL)


def named_by(contributor: Contributor) -> list[Place]:
    """Its places; none where there is one that cannot be, or too many."""
    if len(contributor.summary) % _PLACE.size or len(contributor.summary) > _NAMED * _PLACE.size:
        return []
    named = [(int(place), int(count)) for place, count in _PLACE.iter_unpack(contributor.summary)]
    return named if all(place < count for place, count in named) else []
