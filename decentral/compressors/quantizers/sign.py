"""1 bit per value, its sign, and one magnitude per block of values: their mean.

Parts: codes uint8 below 2 (N,), 1 for negative (-0.0 too, so that -x always decodes to minus what x does); scales
bfloat16 (B,), the mean magnitude of the block, cut to 8 significant bits. 1 + 16/block bits per value: signs have no
pattern, so entropy coding gains nothing. Of all magnitudes the mean loses least: |error|**2 = |x|**2 - (sum of |x|)**2
/ block, which for Gaussian data is 0.363 |x|**2, an error of 0.603 of the norm. The cut costs up to 2**-14 of what the
mean saves, and a mean below 2**-133 is cut to zero. A zero decodes to +-scale unless its
whole block is zero. Use error feedback: the largest values always arrive too small.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
arXiv:1901.09847 (one scale per tensor; a block is ours).
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About
from decentral.compressors.kernels import tables
from decentral.compressors.kernels.blocks import check_block, to_blocks
from decentral.tensors.device import one_kernel

__all__ = ["Sign"]

_CODE = tables.Code(1, tables.table([1.0, -1.0]), 1, "codes must be below 2")
_SHORT_BITS = ~0xFFFF  # the bits that a bfloat16 keeps of a float32


@dataclass(frozen=True, slots=True)
class Sign(tables.Tabled):
    """Scaled sign; ``block`` values share a magnitude."""

    name: ClassVar[str] = "sign"
    about: ClassVar[About] = About(
        layout="codes 1 bit (N), scales bfloat16 (N/block)",
        biased=True,
        source='Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, arXiv:1901.09847',
        bound="|error|**2 <= |x|**2 - (1 - 2**-14) * sum(|x|)**2 / block + block * 2**-266, per block",
    )
    block: int = 1024

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def code(self) -> tables.Code:
        """Plus and minus."""
        return _CODE

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Signs, and mean magnitudes."""
        return _signs_and_means(value_N, self.block)


@one_kernel
def _signs_and_means(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return torch.signbit(value_N).to(torch.uint8), _cut(_means(value_N, block))


def _means(value_N: Tensor, block: int) -> Tensor:
    """Mean magnitude of each block, float32; what fills up the last one does not count."""
    size_BL = to_blocks(value_N.abs(), block)
    start_B = block * torch.arange(len(size_BL), device=value_N.device)
    sum_B = size_BL.sum(dim=1, dtype=torch.float64)  # float64: 4096 times 1e38 has to fit
    return (sum_B / (value_N.numel() - start_B).clamp(max=block)).float()


def _cut(size_B: Tensor) -> Tensor:
    """The next smaller float32 of 8 significant bits: too small a scale loses as much as one as much too large, and
    never more than sending nothing.
    """
    return (size_B.view(torch.int32) & _SHORT_BITS).view(torch.float32)
