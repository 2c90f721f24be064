"""How tensors lie in memory, for loops that go over several of them side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["LANES", "flat", "lie_alike"]

LANES = 64  # sums of squares side by side: with 32 to 128 they cost the pass nothing, with 8 two thirds more


def lie_alike(*tensors: Tensor) -> bool:
    """Whether all are float32 on the processor, of one shape, and lie in a row."""
    return all(
        one.device.type == "cpu"
        and one.dtype == torch.float32
        and one.is_contiguous()
        and one.shape == tensors[0].shape
        for one in tensors
    )


def flat(tensor: Tensor) -> Any:  # Any: numpy's
    """The same memory as a flat array, for compiled loops."""
    return tensor.detach().view(-1).numpy()
