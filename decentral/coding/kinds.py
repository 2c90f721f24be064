"""What the elements of a part are, and so how they may cross the wire: packed as they are, or entropy coded.

A kind turns an array into symbols of one byte, to be entropy coded together with those of other arrays, and side bytes
that have no pattern worth coding; and back. ``raw`` is the same array without entropy coding, of a size that its shape
alone gives: it bounds what a peer may send and what is allocated for it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decentral.coding import bits, exponents, gaps
from decentral.errors import PayloadError

__all__ = ["ElementKind", "Floats", "Rising", "Symbols"]

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]


class ElementKind(Protocol):
    """How one array becomes bytes."""

    def raw_nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Size without entropy coding."""

    def to_raw(self, array: Array) -> Bytes:
        """The array without entropy coding."""

    def from_raw(self, data: Bytes, array: Array) -> None:
        """Fill the array; PayloadError when no array has these bytes."""

    def to_symbols(self, array: Array) -> tuple[Bytes, Iterable[Bytes]]:
        """Symbols, one per element, and side bytes in pieces, made as they are asked for."""

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """Size of the side bytes that belong to these symbols."""

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """Fill the array; PayloadError when no array has these symbols and side bytes."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """uint8 below ``2**bits``."""

    bits: int

    def raw_nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """``bits`` each."""
        return bits.packed_nbytes(math.prod(shape), self.bits)

    def to_raw(self, array: Array) -> Bytes:
        """Packed."""
        return bits.pack(array.reshape(-1), self.bits)  # type: ignore[arg-type]  # uint8 by the layout

    def from_raw(self, data: Bytes, array: Array) -> None:
        """Unpacked."""
        if not bits.unpack(data, self.bits, array.reshape(-1)):  # type: ignore[arg-type]
            raise PayloadError("the bits after the last code must be zero; drop the message and its sender")

    def to_symbols(self, array: Array) -> tuple[Bytes, Iterable[Bytes]]:
        """The array itself."""
        return array.reshape(-1), ()  # type: ignore[return-value]

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """None."""
        return 0

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """The symbols themselves, once they are known to be small enough."""
        if self.bits < 8 and symbols.size and int(symbols.max()) >> self.bits:
            raise PayloadError(f"a code does not fit {self.bits} bits; drop the message and its sender")
        array.reshape(-1)[:] = symbols


@dataclass(frozen=True, slots=True)
class Rising:
    """Rows of integers that rise strictly within ``[0, limit)``, at most 2**31."""

    limit: int

    @property
    def width(self) -> int:
        """Bits of one number sent raw."""
        return max(1, (self.limit - 1).bit_length())

    def raw_nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """``width`` bits each."""
        return bits.packed_nbytes(math.prod(shape), self.width)

    def to_raw(self, array: Array) -> Bytes:
        """Packed."""
        return bits.pack(array.reshape(-1).astype(self._unsigned), self.width)  # type: ignore[arg-type]

    def from_raw(self, data: Bytes, array: Array) -> None:
        """Unpacked, and checked."""
        numbers = np.empty(array.size, dtype=self._unsigned)
        if not bits.unpack(data, self.width, numbers):  # type: ignore[arg-type]
            raise PayloadError("the bits after the last index must be zero; drop the message and its sender")
        rows = numbers.reshape(_matrix(array).shape)
        if rows.size and ((rows[:, -1] >= self.limit).any() or (rows[:, 1:] <= rows[:, :-1]).any()):
            raise self._refused()
        _matrix(array)[:] = rows

    def to_symbols(self, array: Array) -> tuple[Bytes, Iterable[Bytes]]:
        """Gaps; their low bits on the side."""
        symbols = np.empty(array.size, dtype=np.uint8)
        side = np.empty(array.size * array.dtype.itemsize // 4 + 2, dtype="<u4")
        nbits = gaps.to_gaps(_matrix(array), symbols, side)
        return symbols, (side.view(np.uint8)[: (nbits + 7) >> 3],)

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """Low bits, filled up to a byte."""
        nbits = gaps.side_nbits(symbols)
        if nbits < 0:
            raise self._refused()
        return int((nbits + 7) >> 3)

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """Sums of gaps, checked."""
        if not gaps.from_gaps(symbols, side, self.limit, _matrix(array)):
            raise self._refused()

    @property
    def _unsigned(self) -> type[np.uint16] | type[np.uint32]:
        return np.uint16 if self.width <= 16 else np.uint32

    def _refused(self) -> PayloadError:
        return PayloadError(f"indices must rise strictly within [0, {self.limit}); drop the message and its sender")


@dataclass(frozen=True, slots=True)
class Floats:
    """float32, bfloat16 or float16, seen as unsigned integers: exponents have a pattern, signs and mantissas none."""

    def raw_nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """As they are."""
        return math.prod(shape) * itemsize

    def to_raw(self, array: Array) -> Bytes:
        """Little-endian."""
        return array.reshape(-1).astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8)

    def from_raw(self, data: Bytes, array: Array) -> None:
        """Little-endian."""
        array.reshape(-1)[:] = np.frombuffer(data.tobytes(), dtype=array.dtype.newbyteorder("<"))

    def to_symbols(self, array: Array) -> tuple[Bytes, Iterable[Bytes]]:
        """The eight bits below the sign; then, element by element, the others with the sign last."""
        numbers = array.reshape(-1)  # unsigned by the layout
        return exponents.highest(numbers), exponents.others(numbers)  # type: ignore[arg-type]

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """All but one byte of each."""
        return symbols.size * (itemsize - 1)

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """Put together again; every combination is a float."""
        exponents.put_together(symbols, side, array.reshape(-1))  # type: ignore[arg-type]


def _matrix(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1]) if array.size else array.reshape(0, 1)
