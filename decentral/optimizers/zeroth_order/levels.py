"""A derivative in one byte: its sign, and its magnitude to the nearest eighth of a power of two.

byte = 128*(g < 0) + m ;  |g| = 2**((m - 64)/8)        m from 1 to 127: 0.0043 to 234; a byte of 0 is zero

At most 4.5 % off inside that range; what lies beyond it is cut to its ends, so that no byte of a hostile peer is worth
more than another's largest. Levels are float32 numbers of a table, for no two machines need have the same 2**x.

Source: "Just One Byte (per gradient)", 2023, arXiv:2306.10015, whose byte is round(16 ln|g|) in all 8 bits: the sign
has no place in it, and the authors' code sends a float in JSON. Here the steps are 1/8 of an octave, 1.4 times as wide.
"""

from __future__ import annotations

import math
from typing import Final

from decentral.tensors.ops import float32

__all__ = ["LARGEST", "byte_of", "level_of"]

_NEGATIVE = 128
_ONE = 64  # the byte of 1.0
_MOST = 127
_EIGHTHS: Final = (1.0, 1.09050773, 1.18920712, 1.29683955, 1.41421356, 1.54221083, 1.68179283, 1.83400809)  # 2**(j/8)


def byte_of(derivative: float) -> int:
    """The byte of a finite derivative."""
    if abs(derivative) < 2.0 ** -(_ONE / 8):
        return 0
    m = max(1, min(_MOST, round(8 * math.log2(abs(derivative))) + _ONE))
    return m + _NEGATIVE * (derivative < 0)


def _level(byte: int) -> float:
    octave, eighth = divmod((byte & _MOST) - _ONE, 8)
    size = math.ldexp(float32(_EIGHTHS[eighth]), octave) if byte & _MOST else 0.0
    return -size if byte & _NEGATIVE else size


_LEVELS: Final = tuple(_level(byte) for byte in range(256))
LARGEST: Final = _LEVELS[_MOST]


def level_of(byte: int) -> float:
    """What a byte says: a float32 number."""
    return _LEVELS[byte]
