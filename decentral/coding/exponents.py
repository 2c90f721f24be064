"""Floats taken apart: the byte of the exponent, which has a pattern, and everything else, which has none.

The bits of a float are turned left by one, so that the sign comes last and the highest byte holds the exponent: all of
it for float32 and bfloat16, and three bits of mantissa beside it for float16. The other bytes follow, lowest first.

One loop per width, over flat arrays and unsigned places: a loop over the bytes of a number took 2.3 ms for 2**20 of
float32, as the compiler could not turn it into vector instructions; this takes 0.2 ms.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from decentral.tensors.compiled import compiled

__all__ = ["highest", "others", "put_together"]

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.unsignedinteger]

_1, _8, _15, _16, _24, _31, _BYTE = (np.uint32(number) for number in (1, 8, 15, 16, 24, 31, 255))
_AT_ONCE = 1 << 16  # numbers


def highest(numbers: Numbers) -> Bytes:
    """The highest bytes (N,) of unsigned integers (N,) of 2 or 4 bytes, after turning."""
    high = np.empty(numbers.size, dtype=np.uint8)
    (_highest_of_words if numbers.itemsize == 4 else _highest_of_halves)(numbers, high)
    return high


def others(numbers: Numbers) -> Iterator[Bytes]:
    """The w-1 other bytes of each, in pieces: all of them together are as long as what is sent."""
    take = _others_of_words if numbers.itemsize == 4 else _others_of_halves
    for start in range(0, numbers.size, _AT_ONCE):
        piece = numbers[start : start + _AT_ONCE]
        rest = np.empty(piece.size * (piece.itemsize - 1), dtype=np.uint8)
        take(piece, rest)
        yield rest


def put_together(high: Bytes, rest: Bytes, numbers: Numbers) -> None:
    """The inverse: fill ``numbers``."""
    (_put_words_together if numbers.itemsize == 4 else _put_halves_together)(high, rest, numbers)


@compiled
def _highest_of_words(numbers, high):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        high[i] = (numbers[i] >> np.uint32(23)) & _BYTE


@compiled
def _highest_of_halves(numbers, high):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        high[i] = (numbers[i] >> np.uint32(7)) & _BYTE


@compiled
def _others_of_words(numbers, rest):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        turned = (numbers[i] << _1) | (numbers[i] >> _31)
        place = np.uint64(3) * np.uint64(i)
        rest[place] = turned & _BYTE
        rest[place + np.uint64(1)] = (turned >> _8) & _BYTE
        rest[place + np.uint64(2)] = (turned >> _16) & _BYTE


@compiled
def _others_of_halves(numbers, rest):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        rest[i] = ((numbers[i] << _1) | (numbers[i] >> _15)) & _BYTE


@compiled
def _put_words_together(high, rest, numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        place = np.uint64(3) * np.uint64(i)
        turned = np.uint32(high[i]) << _24
        turned |= np.uint32(rest[place + np.uint64(2)]) << _16
        turned |= (np.uint32(rest[place + np.uint64(1)]) << _8) | np.uint32(rest[place])
        numbers[i] = (turned >> _1) | (turned << _31)


@compiled
def _put_halves_together(high, rest, numbers):  # type: ignore[no-untyped-def]
    for i in range(numbers.size):
        turned = (np.uint32(high[i]) << _8) | np.uint32(rest[i])
        numbers[i] = (turned >> _1) | (turned << _15)
