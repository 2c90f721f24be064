"""Random directions once more, by Python's whole numbers: what zeroth-order methods are judged by.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011: Philox4x32-10.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["signs"]

_WORD = (1 << 32) - 1


def signs(seed: int, number: int, name: str, numel: int) -> Tensor:
    """1 of a bit that is not set, else -1: flat float64, (numel,)."""
    named = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = 0
    for block in range(-(-numel // 128)):
        words = _philox((block, number & _WORD, named & _WORD, named >> 32), (seed & _WORD, seed >> 32))
        bits |= sum(word << 32 * place for place, word in enumerate(words)) << 128 * block
    return torch.tensor([-1.0 if bits >> place & 1 else 1.0 for place in range(numel)], dtype=torch.float64)


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ left, second & _WORD, first >> 32 ^ d ^ right, first & _WORD
        left, right = left + 0x9E3779B9 & _WORD, right + 0xBB67AE85 & _WORD
    return a, b, c, d
