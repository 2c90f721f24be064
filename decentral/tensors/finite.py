"""Whether a tensor holds NaN or Inf: one pass over it at the speed of memory, and no copy."""

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.compiled import compiled

__all__ = ["is_finite"]

# The bits of the exponent: all ones in NaN and Inf, and in nothing else.
_EXPONENTS = {
    torch.float32: (torch.uint32, np.uint32(0x7F800000)),
    torch.float16: (torch.uint16, np.uint16(0x7C00)),
    torch.bfloat16: (torch.uint16, np.uint16(0x7F80)),
}


def is_finite(tensor: Tensor) -> bool:
    """True when every element of a tensor of floats is finite. One device sync."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _EXPONENTS:
        unsigned, exponent = _EXPONENTS[tensor.dtype]
        return bool(_is_finite(tensor.detach().reshape(-1).view(unsigned).numpy(), exponent))
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN propagates through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


@compiled
def _is_finite(bits, exponent):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(bits.size):
        found |= np.uint32((bits[i] & exponent) == exponent)
    return found == 0
