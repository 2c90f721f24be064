"""4-bit codes, evenly spaced, with one scale per block of values.

Parts: codes uint8 below 16 (N,), 1..15 for -7..7; scales bfloat16 (B,). At most 4 + 16/block bits per value, entropy
coded 3.3 on Gaussian data, at an error of 0.127 of the norm (block=64: 3.6 and 0.108; block=4096: 3.0 and 0.158).
scale = largest magnitude of the block / 7, rounded up to 8 significant bits; code = round(value / scale). The error is
at most scale / 2 per value (2**-134 more where scales are denormals), and at most the value itself.

Source: the linear code of MuLoCo's compression study (Therien et al., "MuLoCo", 2025, arXiv:2505.23725), there per
tensor or row and without a coder; blockwise absmax from Dettmers et al., 2022, arXiv:2110.02861.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from decentral.compressors.base import About
from decentral.compressors.quantizers.linear import Linear

__all__ = ["Int4"]


@dataclass(frozen=True, slots=True)
class Int4(Linear):
    """Blockwise linear 4-bit absmax; ``block`` values share a scale."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Therien et al., "MuLoCo", 2025, arXiv:2505.23725; Dettmers et al., 2022, arXiv:2110.02861',
        bound="|error| <= min(|value|, largest of the block / 13.8 + 2**-134) per value",
    )
    block: int = 256
