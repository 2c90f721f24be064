"""What came of each channel, as the outer step takes it: one mean over all who contributed, or a row of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentral.errors import NonFiniteError
from decentral.optimizers import Aggregation, Channel
from decentral.optimizers.aggregation.mean import Adder, mean_of
from decentral.tensors.alloc import fresh_zeros
from decentral.tensors.finite import is_finite

# Shape suffixes: N = elements of one fragment, C = channels that are due, K = contributors; flat float32.


def combined(
    due: Sequence[Channel], numel: int, adders: Sequence[Adder], by_rows: Aggregation | None = None
) -> dict[str, Tensor]:
    """By channel its weighted mean (N,), or the rows of all (K, N) in the order of their peers' ids.

    An adder adds all channels of one contribution, (C * N,). Rows of all need K times a fragment's memory, so methods
    that can do with the mean ask for that. ``by_rows``: a rule that makes the first channel of rows, instead of a mean.
    Raises NonFiniteError when one is not finite.
    """
    if by_rows is None and all(channel.combine == "mean" for channel in due):
        mean_CN = mean_of(fresh_zeros(len(due) * numel), adders).view(len(due), -1)
        return {channel.name: mean_N for channel, mean_N in zip(due, mean_CN, strict=True)}
    ordered = sorted(adders, key=lambda adder: adder[0])
    rows_KCN = torch.stack([_row(add, len(due) * numel) for _, add, _ in ordered]).view(len(ordered), len(due), numel)
    made = {channel.name: _of_channel(channel, rows_KCN[:, c], ordered) for c, channel in enumerate(due)}
    counted = [place for place, (_, _, weight) in enumerate(ordered) if weight > 0]
    if by_rows is not None and len(counted) >= by_rows.least:
        made[due[0].name] = _finite(by_rows.combine(rows_KCN[counted, 0]))
    return made


def _finite(value_N: Tensor) -> Tensor:
    if not is_finite(value_N):
        raise NonFiniteError("the values of some contributions sum beyond float32; drop those near 1e38")
    return value_N


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
