"""Tensors to store."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def some_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "anchor/0": torch.randn(5, generator=generator),
        "half": torch.randn(2, 2, generator=generator).bfloat16(),
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def tensors_of() -> Callable[[int], dict[str, Tensor]]:
    """Small tensors of several dtypes, a function of a number."""
    return some_tensors
