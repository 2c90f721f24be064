"""``anchor - mean * rate`` tensor by tensor: sums stay in the cache, and nothing new but the result is as long as it.

The same bits as `mean_of` and a step after it. Four sparse contributions fall on nearly every line of memory: added one
after the other over the whole fragment, each goes through all of it.
"""
# Shape suffix: N = elements of one fragment, flat float32.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from decentral.optimizers.aggregation.mean import in_order
from decentral.tensors.alloc import fresh, fresh_zeros
from decentral.tensors.elementwise import minus_quotient
from decentral.tensors.threads import spread

__all__ = ["AddPiece", "Seen", "minus_mean"]

AddPiece = Callable[[int, Tensor, float], None]  # add(number, total, weight): what one sent of that tensor
Seen = Callable[[int, Tensor], None]  # seen(start, total): of one tensor, before it is divided
Adders = Sequence[tuple[bytes, AddPiece, float]]  # peer id, what adds, weight >= 0
Piece = tuple[int, int, int]  # number, start, stop


def minus_mean(anchor_N: Tensor, sizes: Sequence[int], adders: Adders, rate: float, seen: Seen) -> Tensor | None:
    """The next anchor, new; None where a sum, or what comes of it, is beyond float32.

    ``sizes``: elements of each tensor, in order; ``seen`` is shown their sums, from several threads.
    """
    ordered, divisor = in_order(adders)
    made_N = fresh(anchor_N.numel())

    def move(pieces: Sequence[Piece]) -> bool:
        spare = fresh_zeros(max(stop - start for _, start, stop in pieces))
        return all([_move(piece, spare) for piece in pieces])

    def _move(piece: Piece, spare: Tensor) -> bool:
        number, start, stop = piece
        total = spare[: stop - start]
        for _, add, weight in ordered:
            add(number, total, weight)
        seen(start, total)
        return minus_quotient(anchor_N[start:stop], total, made_N[start:stop], divisor, rate)

    with torch.no_grad():
        is_finite = all(spread(move, _shares(sizes), anchor_N.numel()))
    return made_N if is_finite else None


def _shares(sizes: Sequence[int]) -> list[list[Piece]]:
    """Pieces in order, for each thread about as many elements."""
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    pieces = [(number, start, stop) for number, (start, stop) in enumerate(bounds) if stop > start]
    threads = torch.get_num_threads()
    shares: list[list[Piece]] = [[] for _ in range(threads)]
    for piece in pieces:
        shares[piece[1] * threads // sum(sizes)].append(piece)
    return [share for share in shares if share]
