"""Parts of the parameters that only some peers train: freezing the rest, and a mean that counts owners alone.

mean over the owners of a part = mean over all who came * (sum of all weights) / (sum of the owners' weights)

for whoever does not train a part sends zeros there, and anything else that it sends is taken for zeros. So no row of
each peer is needed: a reduce will do, and a swarm of any size costs one fragment of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from decentral.optimizers.live import Layout, Live

__all__ = ["Part", "Span", "hold", "is_still", "numel_of", "put_back", "scaled_to_owners", "within"]

# Shape suffix: N = elements of one fragment, flat float32.

_HELD = "held"
_AHEAD = "z_minus_x"  # of an inner optimizer that trains at other parameters than it learns (training/inner/averages)
Span = tuple[int, int]  # start and stop in the flat fragment
Part = Sequence[Span]


def numel_of(layout: Layout) -> int:
    """Elements of a fragment."""
    return sum(math.prod(shape) for shape in layout.values())


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
    """What is not trained does not go ahead of what is learnt either, or its owner's gradients would see it move."""
    ahead_N = live.read_moment(_AHEAD, fragment)
    if ahead_N is not None:
        for start, stop in others:
            ahead_N[start:stop] = 0.0
        live.write_moment(_AHEAD, fragment, ahead_N)


def is_still(sent_N: Tensor, part: Part) -> bool:
    """Whether nothing moves in a part."""
    return not any(bool(sent_N[start:stop].any()) for start, stop in part)


def within(add: Callable[..., None], outside: Part, total_N: Tensor, weight: float) -> None:
    """``add(total_N, weight=weight)`` that changes nothing ``outside``: who does not own a part has no say in it."""
    before = [total_N[start:stop].clone() for start, stop in outside]
    add(total_N, weight=weight)
    for (start, stop), part in zip(outside, before, strict=True):
        total_N[start:stop] = part


def scaled_to_owners(
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
