"""Parameters that are drawn by a round's number, the same on every peer without a word or a generator.

Of each run of ``parts`` consecutive parameters one, and in ``parts`` rounds each of them once: from a place on that is
another one, by a hash of counters, in each run and for each pass through it.
"""

import math

import torch
from torch import Tensor

from decentral.compressors.random import below, hash32

__all__ = ["MOST_PARTS", "one_of_each", "only_drawn"]

# Shape suffixes: N = elements of one fragment; R = runs.

MOST_PARTS = 1 << 20
_MASK = (1 << 32) - 1


def one_of_each(parts: int, step: int, numel: int) -> Tensor:
    """What is drawn in outer step ``step``, bool (N,); a last run that is shorter may have none."""
    turn, place = divmod(step, parts)
    run_R = torch.arange(-(-numel // parts))
    at_R = below(hash32(hash32(run_R & _MASK) ^ (turn & _MASK)), parts)
    one_R = run_R * parts + (at_R + place) % parts
    drawn_N = torch.zeros(numel, dtype=torch.bool)
    drawn_N[one_R[one_R < numel]] = True
    return drawn_N


def only_drawn(drawn_N: Tensor, base_N: Tensor, local_N: Tensor) -> tuple[Tensor, float]:
    """The parameters as a contribution speaks of them: what is not drawn is as it was written, so that what it learnt
    stays progress; and how much longer a change of all would be.
    """
    return torch.where(drawn_N, local_N, base_N), math.sqrt(len(local_N) / max(1, int(drawn_N.sum())))
