"""Arrays of one meaning as one run of bytes: entropy coded when that is shorter, packed when not.

Crosses the wire: a size u32, little-endian. 0: the arrays raw, one after the other. Otherwise so many bytes: the
table of shares (`frequencies`), the symbols of all arrays (`rans`), then each array's side bytes; always fewer than
raw. What is coded has one spelling: the table is the one that the symbols give. A writer chooses by size; a reader
takes raw arrays that coding would have made shorter, for only coding them again would tell.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decentral.coding import frequencies, rans
from decentral.coding.kinds import ElementKind
from decentral.errors import PayloadError

__all__ = ["PREFIX_NBYTES", "Form", "Made", "decode", "encode", "raw_nbytes"]

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
Made = tuple[Bytes, Iterable[Bytes]]  # symbols of one array, and its side bytes

_PREFIX = struct.Struct("<I")
PREFIX_NBYTES = _PREFIX.size
_LARGEST = 1 << 32  # what the prefix cannot hold


@dataclass(frozen=True, slots=True)
class Form:
    """What is known of an array before it arrives."""

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
    pieces, sides, size = _coded(kinds, arrays, made)
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
        raise _refused("it ends before its size")
    (size,) = _PREFIX.unpack(data[:PREFIX_NBYTES].tobytes())
    limit = raw_nbytes(forms)
    if size and size >= limit:
        raise _refused(f"{size} bytes, raw it has {limit}")
    taken = size or limit
    if data.size - PREFIX_NBYTES < taken:
        raise _refused(f"{data.size - PREFIX_NBYTES} bytes are there of {taken}")
    body = data[PREFIX_NBYTES : PREFIX_NBYTES + taken]
    arrays = _from_coded(forms, body) if size else _from_raw(forms, body)
    return arrays, PREFIX_NBYTES + taken


def _coded(
    kinds: Sequence[ElementKind], arrays: Sequence[Array], made: Sequence[Made] | None
) -> tuple[list[Bytes], list[Iterable[Bytes]], int]:
    """Table and symbols, the arrays' side bytes still to be made, and the bytes of it all."""
    symbols, sides, size = _symbols(kinds, arrays, made)
    shares = frequencies.shares_of(frequencies.counts(symbols))
    pieces = [frequencies.write_shares(shares), *rans.encode(symbols, shares)]
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
    shares, start = frequencies.read_shares(body)
    if not start:
        raise _refused("its table of shares is damaged")
    symbols = np.empty(sum(_numel(form) for form in forms), dtype=np.uint8)
    took = rans.decode(body[start:], shares, symbols)
    if not took:
        raise _refused("its symbols are damaged")
    if not np.array_equal(frequencies.shares_of(frequencies.counts(symbols)), shares):
        raise _refused("its table is not the one of its symbols")
    return _from_symbols(forms, symbols, body[start + took :])


def _from_symbols(forms: Sequence[Form], symbols: Bytes, side: Bytes) -> list[Array]:
    arrays, at, place = [], 0, 0
    for form in forms:
        own = symbols[at : at + _numel(form)]
        at += own.size
        nbytes = form.kind.side_nbytes(own, form.dtype.itemsize)
        if place + nbytes > side.size:
            raise _refused("its side bytes end too early")
        array = np.empty(form.shape, dtype=form.dtype)
        form.kind.from_symbols(own, side[place : place + nbytes], array)
        arrays.append(array)
        place += nbytes
    if place != side.size:
        raise _refused(f"{side.size - place} bytes are left over")
    return arrays


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


def _refused(what: str) -> PayloadError:
    return PayloadError(f"stream refused: {what}; drop the message and its sender")
