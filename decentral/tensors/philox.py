"""Philox4x32-10: random words that are a pure function of a counter and a key, the same on every machine.

Ten rounds of two 32-bit products; no state, so that word n of a stream costs what the first does, and no float, so that
no library rounds it otherwise. A block of 4 words takes some 45 ns of one core.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (SC11), and its Random123,
whose known answers the tests have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox_4x32"]

# Shape suffix: B = blocks.

Words = NDArray[np.uint32]
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # what the key's halves grow by from round to round
_GROWN = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_HIGH, _MASK = np.uint64(32), np.uint64(0xFFFFFFFF)


def philox_4x32(counter_4B: Words, key: tuple[int, int]) -> Words:
    """The blocks of these counters, (4, B). ``key``: its two halves, of 32 bits each."""
    even_2B, odd_2B = (counter_4B[start::2].astype(np.uint64) for start in (0, 1))
    for key_21 in (np.array(key, dtype=np.uint64)[:, None] + _GROWN) & _MASK:
        product_2B = even_2B * _MULTIPLIERS  # 32 by 32 bits: exact in 64
        even_2B = (product_2B >> _HIGH)[::-1] ^ odd_2B ^ key_21
        odd_2B = (product_2B & _MASK)[::-1]
    made_4B = np.empty(counter_4B.shape, dtype=np.uint32)
    made_4B[0::2], made_4B[1::2] = even_2B, odd_2B
    return made_4B
