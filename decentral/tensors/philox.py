"""Philox4x32-10: random words that are a pure function of a counter and a key, the same on every machine.

Ten rounds of two 32-bit products; no state, so that word n of a stream costs what the first does, and no float, so that
no library rounds it otherwise. A block of 4 words takes some 30 ns of one core.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (SC11), and its Random123,
whose known answers the tests have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox_4x32"]

# Shape suffix: B = blocks.

Words = NDArray[np.uint32]
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the two halves of the key grow by from round to round
_ROUNDS = 10
_HIGH, _MASK = np.uint64(32), 0xFFFFFFFF


def philox_4x32(counter_4B: Words, key: tuple[int, int]) -> Words:
    """The blocks of these counters, (4, B). ``key``: its two halves, of 32 bits each."""
    c0, c1, c2, c3 = (row.astype(np.uint64) for row in counter_4B)
    for number in range(_ROUNDS):
        k0, k1 = (np.uint64((half + number * step) & _MASK) for half, step in zip(key, _WEYL, strict=True))
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 by 32 bits: exact in 64
        c0, c1, c2, c3 = (
            (product_1 >> _HIGH) ^ c1 ^ k0,
            product_1 & np.uint64(_MASK),
            (product_0 >> _HIGH) ^ c3 ^ k1,
            product_0 & np.uint64(_MASK),
        )
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)
