"""Whether a tensor holds NaN or Inf: one pass over it at the speed of memory, and no copy."""

import numpy as np
import torch
from torch import Tensor

from decentral.coding.compiled import compiled

__all__ = ["is_finite"]

_EXPONENT = np.uint32(0x7F800000)  # all ones in NaN and Inf, and in nothing else


def is_finite(tensor: Tensor) -> bool:
    """True when every element of a float32 tensor is finite. One device sync."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return bool(_is_finite(tensor.detach().reshape(-1).numpy().view(np.uint32)))
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN propagates through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


@compiled
def _is_finite(bits):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(bits.size):
        found |= np.uint32((bits[i] & _EXPONENT) == _EXPONENT)
    return found == 0
