"""What came of each channel, as the outer step takes it: one mean over all who contributed, or a row of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentral.optimizers import Aggregation, Channel
from decentral.optimizers.aggregation.mean import Adder, mean_of
from decentral.replica.rule_output import row_of
from decentral.tensors.memory import fresh_zeros

# Shape suffixes: N = elements of one fragment, K = contributors; flat float32.

OfChannel = tuple[
    Channel, Sequence[Adder]
]  # an adder adds one contributor's vector, and has its weight in this channel


def combined(channels: Sequence[OfChannel], numel: int, by_rows: Aggregation | None = None) -> dict[str, Tensor]:
    """By channel its weighted mean (N,), or the rows of all (K, N) in the order of their peers' ids; nothing of a mean
    in which nobody counts.

    Rows of all need K times a fragment's memory, so methods that can do with the mean ask for that. ``by_rows``: a rule
    that makes the first channel of rows, instead of a mean. Raises NonFiniteError when a contribution is not finite,
    Unusable when what the rule gave is none of its kind.
    """
    first, adders = channels[0]
    counted = [adder for adder in adders if adder[2] > 0]
    if by_rows is not None and len(counted) >= by_rows.least:
        made = {first.name: row_of(by_rows, _rows(counted, numel))}
        return made | combined(channels[1:], numel) if channels[1:] else made
    return {
        channel.name: mean_of(fresh_zeros(numel), adders) if channel.combine == "mean" else _rows(adders, numel)
        for channel, adders in channels
        if channel.combine == "each" or any(weight for _, _, weight in adders)
    }


def _rows(adders: Sequence[Adder], numel: int) -> Tensor:
    return torch.stack([_row(add, numel) for _, add, _ in sorted(adders, key=lambda adder: adder[0])])


def _row(add: Callable[..., None], numel: int) -> Tensor:
    row_N = fresh_zeros(numel)
    add(row_N, weight=1.0)
    return row_N
