"""A data set that a tiny language model learns in a few steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random token."""

    def __init__(self, count: int, seed: int, length: int = 12) -> None:
        first = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(seed))
        self._rows = (first + torch.arange(length)) % 32

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Watched(Dataset[Any]):
    """Tells what is drawn."""

    def __init__(self, data: Any, order: list[int]) -> None:
        self._data, self._order = data, order

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._order.append(index)
        return self._data[index]
