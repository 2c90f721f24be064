"""Floats taken apart: the byte of the exponent, which has a pattern, and everything else, which has none.

The bits of a float are turned left by one, so that the sign comes last and the highest byte holds the exponent: all of
it for float32 and bfloat16, and three bits of mantissa beside it for float16. The other bytes follow, lowest first.
"""

import numpy as np

from decentral.coding.compiled import compiled

__all__ = ["put_together", "take_apart"]


@compiled
def take_apart(numbers, high, rest):  # type: ignore[no-untyped-def]
    """Unsigned integers (N,) of w bytes to their highest bytes (N,) and the others (N, w-1), after turning."""
    width = rest.shape[1]
    top = np.uint64(8 * (width + 1) - 1)
    for i in range(numbers.size):
        number = np.uint64(numbers[i])
        turned = (number << np.uint64(1)) | (number >> top)
        for place in range(width):
            rest[i, place] = turned & np.uint64(255)
            turned >>= np.uint64(8)
        high[i] = turned & np.uint64(255)


@compiled
def put_together(high, rest, numbers):  # type: ignore[no-untyped-def]
    """The inverse of `take_apart`."""
    width = rest.shape[1]
    top = np.uint64(8 * (width + 1) - 1)
    for i in range(numbers.size):
        turned = np.uint64(high[i])
        for place in range(width):
            turned = (turned << np.uint64(8)) | np.uint64(rest[i, width - 1 - place])
        numbers[i] = (turned >> np.uint64(1)) | ((turned & np.uint64(1)) << top)
