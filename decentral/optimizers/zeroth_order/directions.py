"""Random directions that every peer makes alike: of each value 1 or -1, from a seed, a number and a tensor's name.

Bit j of a tensor's Philox words says the sign of its value j: 128 values a block, and no float on the way, so that no
two machines differ. SPSA wants such signs: Gaussian values, which arXiv:2306.10015 draws, have a fourth moment of 3
instead of 1, so that the same estimate is noisier, and are made of logarithms, which differ in a library's last bit.

Source: Spall, "Multivariate Stochastic Approximation Using a Simultaneous Perturbation Gradient Approximation", 1992.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.optimizers.live import Layout
from decentral.tensors.ops import philox_4x32

__all__ = ["MOST_NUMBER", "Direction"]

# Shape suffixes: N = values of a fragment or of one tensor, B = blocks of a tensor.

MOST_NUMBER = (1 << 32) - 1
_BLOCK = 128  # bits
_HALF = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Direction:
    """One of 2**96."""

    seed: int  # 64 bits
    number: int  # 32 bits

    def of(self, name: str, numel: int) -> Tensor:
        """Of the tensor of this name, flat float32 (N,)."""
        blocks = -(-numel // _BLOCK)
        counter_4B = np.empty((4, blocks), dtype=np.uint32)
        counter_4B[0] = np.arange(blocks, dtype=np.uint32)
        counter_4B[1] = self.number & _HALF
        counter_4B[2], counter_4B[3] = _halves(_hash(name))
        words_B4 = philox_4x32(counter_4B, _halves(self.seed)).T.astype("<u4")  # a block's words one behind the other
        return torch.from_numpy(_signs(words_B4.tobytes(), numel))

    def over(self, layout: Layout) -> Tensor:
        """Of a fragment's tensors in order, flat float32 (N,)."""
        return torch.cat([self.of(name, math.prod(shape)) for name, shape in layout.items()])


def _signs(bits: bytes, numel: int) -> NDArray[np.float32]:
    """1 of a bit that is not set, else -1."""
    signs_N = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=numel, bitorder="little").astype(np.float32)
    signs_N *= -2
    signs_N += 1
    return signs_N


def _halves(word: int) -> tuple[int, int]:
    """The lower half first."""
    return word & _HALF, word >> 32 & _HALF


@cache
def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
