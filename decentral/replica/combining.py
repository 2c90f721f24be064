"""What came of each channel, as the outer step takes it: one mean over all who contributed, or a row of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentral.optimizers import Channel
from decentral.optimizers.aggregation.mean import Adder, mean_of
from decentral.tensors.alloc import fresh_zeros

# Shape suffixes: N = elements of one fragment, C = channels that are due, K = contributors; flat float32.


def combined(due: Sequence[Channel], numel: int, adders: Sequence[Adder]) -> dict[str, Tensor]:
    """By channel its weighted mean (N,), or the rows of all (K, N) in the order of their peers' ids.

    An adder adds all channels of one contribution, (C * N,). Rows of all need K times a fragment's memory, so methods
    that can do with the mean ask for that. Raises NonFiniteError when finite contributions sum beyond float32.
    """
    if all(channel.combine == "mean" for channel in due):
        mean_CN = mean_of(fresh_zeros(len(due) * numel), adders).view(len(due), -1)
        return {channel.name: mean_N for channel, mean_N in zip(due, mean_CN, strict=True)}
    ordered = sorted(adders, key=lambda adder: adder[0])
    rows_KCN = torch.stack([_row(add, len(due) * numel) for _, add, _ in ordered]).view(len(ordered), len(due), numel)
    return {channel.name: _of_channel(channel, rows_KCN[:, c], ordered) for c, channel in enumerate(due)}


def _row(add: Callable[..., None], numel: int) -> Tensor:
    row_N = fresh_zeros(numel)
    add(row_N, weight=1.0)
    return row_N


def _of_channel(channel: Channel, rows_KN: Tensor, ordered: Sequence[Adder]) -> Tensor:
    if channel.combine == "each":
        return rows_KN.contiguous()
    adders: list[Adder] = [
        (peer, _Row(row_N), weight) for (peer, _, weight), row_N in zip(ordered, rows_KN, strict=True)
    ]
    return mean_of(fresh_zeros(rows_KN.shape[1]), adders)


class _Row:
    """A contribution that is dense already, as one that adds itself."""

    def __init__(self, row_N: Tensor) -> None:
        self._row_N = row_N

    def __call__(self, total_N: Tensor, weight: float) -> None:
        total_N += self._row_N * weight
