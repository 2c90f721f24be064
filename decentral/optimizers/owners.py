"""Parts of a model that only some peers train, its owners: a mean over them, and experts of a mixture as parts."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.base import MAX_SUMMARY_NBYTES, Contributor, Layout, Live, Part, Span

__all__ = [
    "ALL",
    "Layers",
    "Place",
    "by_expert",
    "experts_of",
    "hold",
    "is_still",
    "merge_owners",
    "owns",
    "pack_places",
    "put_back",
    "read_places",
    "scale_to_owners",
]

# ---- parts that only some peers train ----
#
# The rest is frozen at each of them, and a mean counts owners alone.
#
# mean over the owners of a part = mean over all who came * (sum of all weights) / (sum of the owners' weights)
#
# for whoever does not train a part sends zeros there, and anything else that it sends is taken for zeros. So no row of
# each peer is needed: a reduce will do, and a swarm of any size costs one fragment of memory.

_HELD = "held"
_AHEAD = "z_minus_x"  # of inner optimizers that train elsewhere than they learn (`decentral.training.copies.Z_MINUS_X`)


def hold(live: Live, fragment: int, others: Part) -> None:
    """Before an inner step: remember what is trained by others."""
    if others:
        live_N = live.read(fragment)
        live.own(fragment)[_HELD] = torch.cat([live_N[start:stop] for start, stop in others])


def put_back(live: Live, fragment: int, others: Part) -> None:
    """After it: that becomes what it was, whatever the inner optimizer did, decay for one."""
    if others:
        live_N, held = live.read(fragment), live.own(fragment).pop(_HELD)
        pieces = torch.split_with_sizes(held, [stop - start for start, stop in others])
        for (start, stop), piece in zip(others, pieces, strict=True):
            live_N[start:stop] = piece
        live.write(fragment, live_N)
        _hold_back(live, fragment, others)


def _hold_back(live: Live, fragment: int, others: Part) -> None:
    """Keep what is not trained from going ahead of what is learnt, or its owner's gradients would see it move."""
    ahead_N = live.read_moment(_AHEAD, fragment)
    if ahead_N is not None:
        for start, stop in others:
            ahead_N[start:stop] = 0.0
        live.write_moment(_AHEAD, fragment, ahead_N)


def is_still(sent_N: Tensor, part: Part) -> bool:
    """Return whether nothing moves in a part."""
    return not any(bool(sent_N[start:stop].any()) for start, stop in part)


def scale_to_owners(
    mean_N: Tensor, parts: Sequence[Part], owned: Sequence[Collection[int]], weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """The mean over the owners of each part, and where there is an owner (bool); zero where there is none.

    Args:
        mean_N: over all contributors.
        parts: where each part is; together they need not be everything, and what is in none belongs to all.
        owned: the parts of each contributor, by their numbers.
        weights: what each contributor counted.

    """
    scaled_N, has_owner_N = mean_N.clone(), torch.ones_like(mean_N, dtype=torch.bool)
    whole = math.fsum(weights)
    for number, part in enumerate(parts):
        of_owners = math.fsum(weight for own, weight in zip(owned, weights, strict=True) if number in own)
        for start, stop in part:
            has_owner_N[start:stop] = of_owners > 0
            scaled_N[start:stop] *= whole / of_owners if of_owners > 0 else 0.0
    return scaled_N, has_owner_N


# ---- experts of a mixture, by names ----
#
# The experts of a mixture-of-experts model are found by the names of its tensors, and warmed up by merging.
#
# ``layers.0.mlp.experts.3.w1`` is of expert 3 of the layer ``layers.0.mlp``; of ``layers.0.mlp.experts.gate_up_proj``,
# whose first dimension counts experts, each has an equal part.

# Shape suffixes: N = elements of one fragment, E = elements of one expert in one layer; flat float32.

Layers = dict[str, dict[int, list[Span]]]  # by layer and expert, where its tensors are in the fragment
_WORD = "experts"
_DONORS = 4  # as the authors' code


def experts_of(layout: Layout) -> Layers:
    """Where the experts of each layer are; what is in none of them is shared."""
    layers: Layers = {}
    start = 0
    for name, shape in layout.items():
        words, numel = name.split("."), math.prod(shape)
        if _WORD in words[:-1]:
            at = words.index(_WORD)
            layer = layers.setdefault(".".join(words[:at]), {})
            for expert, span in _spans(words[at + 1], shape, start):
                layer.setdefault(expert, []).append(span)
        start += numel
    return layers


def _spans(word: str, shape: tuple[int, ...], start: int) -> list[tuple[int, Span]]:
    numel = math.prod(shape)
    if word.isdecimal():
        return [(int(word), (start, start + numel))]
    count = shape[0] if len(shape) > 1 else 0  # a vector says nothing of whose it is
    each = numel // count if count else 0
    return [(expert, (start + expert * each, start + (expert + 1) * each)) for expert in range(count)]


def by_expert(layers: Layers) -> dict[int, Part]:
    """By number where an expert is, in all layers: who owns it owns it in each."""
    numbers = sorted({expert for experts in layers.values() for expert in experts})
    return {e: [span for experts in layers.values() for span in experts.get(e, [])] for e in numbers}


def merge_owners(anchor_N: Tensor, layers: Layers, rate: float) -> Tensor:
    """Each expert moved by ``rate`` towards the mean of its nearest, a new tensor; all moves go by them as they were.

    Nearest is, within a layer, whose first tensor has the largest cosine with its own; of equal ones the lower number.
    """
    after_N = anchor_N.clone()
    for experts in layers.values():
        whole = {expert: torch.cat([anchor_N[a:b] for a, b in spans]) for expert, spans in sorted(experts.items())}
        first = {expert: anchor_N[slice(*experts[expert][0])] for expert in whole}
        if len({one.numel() for one in whole.values()}) > 1:
            continue  # these are no experts of one another's kind
        lengths = {expert: norm(one_E) for expert, one_E in first.items()}
        for expert, spans in experts.items():
            near = sorted(
                (other for other in whole if other != expert),
                key=lambda other: (-_cosine(first, lengths, expert, other), other),
            )
            if near:
                _move(after_N, spans, whole[expert], [whole[other] for other in near[:_DONORS]], rate)
    return after_N


def _cosine(first: dict[int, Tensor], lengths: dict[int, float], one: int, other: int) -> float:
    """By three norms, whose bits no machine and no number of threads changes."""
    a, b, apart = lengths[one], lengths[other], norm(first[one] - first[other])
    return (a * a + b * b - apart * apart) / (2 * a * b) if a * b > 0 else 0.0


def _move(after_N: Tensor, spans: Sequence[Span], own_E: Tensor, donors: Sequence[Tensor], rate: float) -> None:
    total_E = donors[0]
    for donor_E in donors[1:]:
        total_E = total_E + donor_E
    moved_E = own_E + (total_E / float(len(donors)) - own_E) * rate
    at = 0
    for start, stop in spans:
        after_N[start:stop] = moved_E[at : at + stop - start]
        at += stop - start


# ---- which experts are whose: places ----
#
# A peer's own are those whose number, modulo so many peers, is its place among them.
#
# In the summary of an offer: places one after the other, each two uint16, little-endian: the place, and of how many.
# Of more peers than there are experts, a place names one expert.

Place = tuple[int, int]
ALL: Place = (0, 1)
_PLACE = struct.Struct("<HH")
_NAMED_PLACES = MAX_SUMMARY_NBYTES // _PLACE.size


def owns(named: Sequence[Place], expert: int) -> bool:
    """Return whether one of these places has the expert."""
    return any(expert % count == place for place, count in named)


def pack_places(now: Place, before: Place, moved: Sequence[int], num_experts: int) -> bytes:
    """The place, and the others that ``moved``: one by one, or where they are too many the place before with what it
    does not have, or else all. What is named without having moved counts as zero in the mean of its owners.
    """
    for named in ([now], [now, before]):
        named += [(e, num_experts) for e in moved if not owns(named, e)]
        if len(named) <= _NAMED_PLACES:
            return b"".join(_PLACE.pack(*place) for place in named)
    return _PLACE.pack(*ALL)


def read_places(contributor: Contributor) -> list[Place]:
    """Its places; none where there is one that cannot be, or too many."""
    if len(contributor.summary) % _PLACE.size or len(contributor.summary) > _NAMED_PLACES * _PLACE.size:
        return []
    named = [(int(place), int(count)) for place, count in _PLACE.iter_unpack(contributor.summary)]
    return named if all(place < count for place, count in named) else []
