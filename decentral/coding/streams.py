"""Arrays of one meaning as one run of bytes: entropy coded when that is shorter, packed when not.

Crosses the wire: a size u32, little-endian. 0: the arrays raw, one after the other. Otherwise so many bytes: the table
of shares (`rans.write_shares`), the symbols of all arrays (`rans.encode`), then each array's side bytes; always fewer
than raw. What is coded has one spelling: the table is the one that the symbols give. A writer chooses by size; a reader
takes raw arrays that coding would have made shorter, for only coding them again would tell.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decentral.coding import bits, rans
from decentral.errors import PayloadError

__all__ = [
    "PREFIX_NBYTES",
    "ElementKind",
    "Floats",
    "Form",
    "Made",
    "Rising",
    "Symbols",
    "decode",
    "encode",
    "raw_nbytes",
]

# ---- kinds of elements ----
#
# They say how the elements of a part may cross the wire: packed as they are, or entropy coded.
#
# A kind turns an array into symbols of one byte, to be entropy coded together with those of other arrays, and side
# bytes that have no pattern worth coding; and back. ``raw`` is the same array without entropy coding, of a size that
# its shape alone gives: it bounds what a peer may send and what is allocated for it.

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
        self.check(symbols)
        array.reshape(-1)[:] = symbols

    def check(self, symbols: Bytes) -> None:
        """Raise PayloadError where one has more bits."""
        if self.bits < 8 and symbols.size and int(symbols.max()) >> self.bits:
            raise PayloadError(f"a code does not fit {self.bits} bits; drop the message and its sender")


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
            raise self._refusal()
        _matrix(array)[:] = rows

    def to_symbols(self, array: Array) -> tuple[Bytes, Iterable[Bytes]]:
        """Gaps; their low bits on the side."""
        symbols = np.empty(array.size, dtype=np.uint8)
        side = np.empty(array.size * array.dtype.itemsize // 4 + 2, dtype="<u4")
        nbits = bits.to_gaps(_matrix(array), symbols, side)
        return symbols, (side.view(np.uint8)[: (nbits + 7) >> 3],)

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """Low bits, filled up to a byte."""
        nbits = bits.side_nbits(symbols)
        if nbits < 0:
            raise self._refusal()
        return int((nbits + 7) >> 3)

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """Sums of gaps, checked."""
        if not bits.from_gaps(symbols, side, self.limit, _matrix(array)):
            raise self._refusal()

    @property
    def _unsigned(self) -> type[np.uint16] | type[np.uint32]:
        return np.uint16 if self.width <= 16 else np.uint32

    def _refusal(self) -> PayloadError:
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
        return bits.highest(numbers), bits.others(numbers)  # type: ignore[arg-type]

    def side_nbytes(self, symbols: Bytes, itemsize: int) -> int:
        """All but one byte of each."""
        return symbols.size * (itemsize - 1)

    def from_symbols(self, symbols: Bytes, side: Bytes, array: Array) -> None:
        """Put together again; every combination is a float."""
        bits.put_together(symbols, side, array.reshape(-1))  # type: ignore[arg-type]


def _matrix(array: Array) -> Array:
    return array.reshape(-1, array.shape[-1]) if array.size else array.reshape(0, 1)


# ---- one run of bytes for several arrays ----
Made = tuple[Bytes, Iterable[Bytes]]  # symbols of one array, and its side bytes

_PREFIX = struct.Struct("<I")
PREFIX_NBYTES = _PREFIX.size
_LARGEST = 1 << 32  # what the prefix cannot hold


@dataclass(frozen=True, slots=True)
class Form:
    """The size and kind of an array, known before it arrives."""

    kind: ElementKind
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def raw_nbytes(self) -> int:
        """Size without entropy coding."""
        return self.kind.raw_nbytes(self.shape, self.dtype.itemsize)


def raw_nbytes(forms: Sequence[Form]) -> int:
    """Size of the arrays without entropy coding; what a stream takes at most, after its prefix."""
    return sum(form.raw_nbytes for form in forms)


def encode(
    kinds: Sequence[ElementKind], arrays: Sequence[Array], made: Sequence[Made] | None = None
) -> Iterator[bytes | memoryview]:
    """The stream of these arrays, in pieces to be joined, made as they are asked for.

    ``made``: what each kind's ``to_symbols`` gave for its array, where that was asked before.
    """
    limit = sum(kind.raw_nbytes(a.shape, a.dtype.itemsize) for kind, a in zip(kinds, arrays, strict=True))
    pieces, sides, size = _code(kinds, arrays, made)
    if size < min(limit, _LARGEST):
        yield _PREFIX.pack(size)
        yield from (piece.data for piece in pieces)
        yield from (piece.data for side in sides for piece in side)
    else:
        yield _PREFIX.pack(0)
        yield from (kind.to_raw(array).data for kind, array in zip(kinds, arrays, strict=True))


def decode(forms: Sequence[Form], data: Bytes) -> tuple[list[Array], int]:
    """The arrays at the start of ``data``, and the bytes they took. Raises PayloadError; nothing is allocated then
    that the forms do not ask for.
    """
    if data.size < PREFIX_NBYTES:
        raise _refusal("it ends before its size")
    (size,) = _PREFIX.unpack(data[:PREFIX_NBYTES].tobytes())
    limit = raw_nbytes(forms)
    if size and size >= limit:
        raise _refusal(f"{size} bytes, raw it has {limit}")
    taken = size or limit
    if data.size - PREFIX_NBYTES < taken:
        raise _refusal(f"{data.size - PREFIX_NBYTES} bytes are there of {taken}")
    body = data[PREFIX_NBYTES : PREFIX_NBYTES + taken]
    arrays = _from_coded(forms, body) if size else _from_raw(forms, body)
    return arrays, PREFIX_NBYTES + taken


def _code(
    kinds: Sequence[ElementKind], arrays: Sequence[Array], made: Sequence[Made] | None
) -> tuple[list[Bytes], list[Iterable[Bytes]], int]:
    """Table and symbols, the arrays' side bytes still to be made, and the bytes of it all."""
    symbols, sides, size = _symbols(kinds, arrays, made)
    shares = rans.shares_of(rans.counts(symbols))
    pieces = [rans.write_shares(shares), *rans.encode(symbols, shares)]
    return pieces, sides, size + sum(piece.size for piece in pieces)


def _symbols(
    kinds: Sequence[ElementKind], arrays: Sequence[Array], made: Sequence[Made] | None
) -> tuple[Bytes, list[Iterable[Bytes]], int]:
    """All symbols in one array, side bytes still to be made, and how many of these there are."""
    symbols, sides, size, at = np.empty(0, dtype=np.uint8), list[Iterable[Bytes]](), 0, 0
    if len(arrays) > 1:
        symbols = np.empty(sum(array.size for array in arrays), dtype=np.uint8)
    for i, (kind, array) in enumerate(zip(kinds, arrays, strict=True)):
        own, side = kind.to_symbols(array) if made is None else made[i]
        sides.append(side)
        size += kind.side_nbytes(own, array.dtype.itemsize)
        if len(arrays) == 1:
            return own, sides, size
        symbols[at : at + own.size] = own
        at += own.size
    return symbols, sides, size


def _from_coded(forms: Sequence[Form], body: Bytes) -> list[Array]:
    shares, start = rans.read_shares(body)
    if not start:
        raise _refusal("its table of shares is damaged")
    symbols = np.empty(sum(_numel(form) for form in forms), dtype=np.uint8)
    took = rans.decode(body[start:], shares, symbols)
    if not took:
        raise _refusal("its symbols are damaged")
    if not np.array_equal(rans.shares_of(rans.counts(symbols)), shares):
        raise _refusal("its table is not the one of its symbols")
    return _from_symbols(forms, symbols, body[start + took :])


def _from_symbols(forms: Sequence[Form], symbols: Bytes, side: Bytes) -> list[Array]:
    arrays: list[Array]
    kind, cut = forms[0].kind, zip(forms, _cut(forms, symbols), strict=True)
    if isinstance(kind, Symbols) and all(form.kind == kind for form in forms):  # they are what was sent
        kind.check(symbols)
        arrays, place = [own.reshape(form.shape) for form, own in cut], 0
    else:
        arrays, place = _with_side(cut, side)
    if place != side.size:
        raise _refusal(f"{side.size - place} bytes are left over")
    return arrays


def _with_side(cut: Iterable[tuple[Form, Bytes]], side: Bytes) -> tuple[list[Array], int]:
    """The arrays of these forms and symbols, and how many side bytes they took."""
    arrays, place = list[Array](), 0
    for form, own in cut:
        nbytes = form.kind.side_nbytes(own, form.dtype.itemsize)
        if place + nbytes > side.size:
            raise _refusal("its side bytes end too early")
        array = np.empty(form.shape, dtype=form.dtype)
        form.kind.from_symbols(own, side[place : place + nbytes], array)
        arrays.append(array)
        place += nbytes
    return arrays, place


def _cut(forms: Sequence[Form], symbols: Bytes) -> Iterator[Bytes]:
    at = 0
    for form in forms:
        yield symbols[at : at + _numel(form)]
        at += _numel(form)


def _from_raw(forms: Sequence[Form], body: Bytes) -> list[Array]:
    arrays, at = [], 0
    for form in forms:
        array = np.empty(form.shape, dtype=form.dtype)
        form.kind.from_raw(body[at : at + form.raw_nbytes], array)
        arrays.append(array)
        at += form.raw_nbytes
    return arrays


def _numel(form: Form) -> int:
    return math.prod(form.shape)


def _refusal(what: str) -> PayloadError:
    return PayloadError(f"stream refused: {what}; drop the message and its sender")
