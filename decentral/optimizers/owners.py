"""Parts of the parameters that only some peers train: freezing the rest, and a mean that counts owners alone.

mean over the owners of a part = mean over all who came * (sum of all weights) / (sum of the owners' weights)

for whoever does not train a part sends zeros there. So no row of each peer is needed: a reduce will do, and a swarm of
any size costs one fragment of memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from decentral.optimizers.live import Live

__all__ = ["hold", "put_back", "scaled_to_owners"]

# Shape suffix: N = elements of one fragment, flat float32.

_HELD = "held"
Span = tuple[int, int]  # start and stop in the flat fragment
Part = Sequence[Span]


def hold(live: Live, fragment: int) -> None:
    """Before an inner step: remember the parameters."""
    live.own(fragment)[_HELD] = live.read(fragment)


def put_back(live: Live, fragment: int, others: Iterable[Span]) -> None:
    """After it: what ``others`` train becomes what it was, whatever the inner optimizer did, decay for one."""
    held_N, live_N = live.own(fragment).pop(_HELD), live.read(fragment)
    for start, stop in others:
        live_N[start:stop] = held_N[start:stop]
    live.write(fragment, live_N)


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
