"""Numbers of a fixed width, and Exp-Golomb numbers, in a stream of bits; the first bit is a byte's lowest.

What is left over in the last byte is zero, and is checked: there is one spelling for every list of numbers.
"""

import numpy as np
from numpy.typing import NDArray

from decentral.tensors.compiled import compiled

__all__ = ["pack", "packed_nbytes", "pull", "push", "unpack"]

Bytes = NDArray[np.uint8]
Unsigned = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]


def packed_nbytes(count: int, width: int) -> int:
    """Bytes that hold ``count`` numbers of ``width`` bits each."""
    return (count * width + 7) // 8


def pack(numbers: Unsigned, width: int) -> Bytes:
    """Numbers below ``2**width``, width 1 to 32, one after the other."""
    packed = np.zeros(packed_nbytes(numbers.size, width), dtype=np.uint8)
    if width == 8 and numbers.dtype == np.uint8:
        packed[:] = numbers
    else:
        _pack(numbers, width, packed)
    return packed


def unpack(packed: Bytes, width: int, numbers: Unsigned) -> bool:
    """Fill ``numbers`` from exactly as many bytes as `pack` makes of them; False when left-over bits are set."""
    if width == 8 and numbers.dtype == np.uint8:
        numbers[:] = packed
        return True
    return bool(_unpack(packed, width, numbers))


@compiled
def _pack(numbers, width, packed):  # type: ignore[no-untyped-def]  # numba reads the types of the arguments
    held, pending, at = np.uint64(0), 0, 0
    for number in numbers:
        held |= np.uint64(number) << np.uint64(pending)
        pending += width
        while pending >= 8:
            packed[at] = held & np.uint64(255)
            held >>= np.uint64(8)
            pending -= 8
            at += 1
    if pending:
        packed[at] = held & np.uint64(255)


@compiled
def _unpack(packed, width, numbers):  # type: ignore[no-untyped-def]
    held, pending, at = np.uint64(0), 0, 0
    mask = np.uint64((1 << width) - 1)
    for i in range(numbers.size):
        while pending < width:
            held |= np.uint64(packed[at]) << np.uint64(pending)
            pending += 8
            at += 1
        numbers[i] = held & mask
        held >>= np.uint64(width)
        pending -= width
    return held == 0


@compiled
def push(bits, at, number, width):  # type: ignore[no-untyped-def]
    """Write ``width`` bits at bit ``at`` of zeroed bytes; returns the place behind them."""
    for i in range(width):
        if (number >> i) & 1:
            bits[(at + i) >> 3] |= np.uint8(1 << ((at + i) & 7))
    return at + width


@compiled
def pull(bits, at, width):  # type: ignore[no-untyped-def]
    """Read ``width`` bits at bit ``at``: the number, or -1 when the bytes end before it."""
    if width > 32 or at + width > bits.size * 8:
        return -1
    number = 0
    for i in range(width):
        number |= ((np.int64(bits[(at + i) >> 3]) >> ((at + i) & 7)) & 1) << i
    return number
