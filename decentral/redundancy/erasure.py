"""Reed-Solomon: K rows of bytes become n pieces, of which any K give the rows back.

Systematic: the first K pieces are the rows themselves, so only what stands for lost ones costs arithmetic. The others
are sums over GF(2**8) with the coefficients of a Cauchy matrix, every square part of which can be inverted.

Our own, as no library fits: zfec is GPL, pyeclib has wheels for Linux alone, galois multiplies 31 MB/s where this does
eight bytes in one word. Source: Bloemer et al., "An XOR-Based Erasure-Resilient Coding Scheme", 1995.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from decentral.tensors.compiled import compiled

__all__ = ["MOST_PIECES", "WORD", "join_pieces", "pieces_of"]

# Shape suffixes: K = rows, W = bytes of a row, n = pieces, w = words of eight bytes of a row.

Rows = NDArray[np.uint8]

MOST_PIECES = 256  # elements of the field
WORD = 8  # bytes: rows are a multiple of it
_POLYNOMIAL = 0x11D  # x**8 + x**4 + x**3 + x**2 + 1, under which 2 generates the field


def pieces_of(row_KW: Rows, count: int) -> Rows:
    """Return ``count`` pieces of these rows: (count, W), the rows first."""
    needed, nbytes = row_KW.shape
    assert 1 <= needed <= count <= MOST_PIECES, f"{needed} of {count} pieces"
    assert nbytes % WORD == 0, f"rows of {nbytes} bytes"
    piece_nW = np.zeros((count, nbytes), np.uint8)
    piece_nW[:needed] = row_KW
    _add_products(piece_nW[needed:], [_coefficients(number, needed) for number in range(needed, count)], row_KW)
    return piece_nW


def join_pieces(piece_W: Mapping[int, Rows], needed: int) -> Rows:
    """Return the rows of any ``needed`` pieces, by their numbers: (needed, W). More pieces are not looked at."""
    numbers = sorted(piece_W)[:needed]
    assert len(numbers) == needed, f"{len(piece_W)} of {needed} pieces"
    given_KW = np.stack([piece_W[number] for number in numbers])
    inverse = _inverse([_coefficients(number, needed) for number in numbers])
    row_KW = np.zeros_like(given_KW)
    _add_products(row_KW, inverse, given_KW)
    return row_KW


def _coefficients(number: int, needed: int) -> list[int]:
    """Return what piece ``number`` takes of each row."""
    if number < needed:
        return [int(row == number) for row in range(needed)]
    return [_EXPONENTIALS[(255 - _LOGARITHMS[number ^ row]) % 255] for row in range(needed)]


def _add_products(into_nW: Rows, factors: Sequence[Sequence[int]], row_KW: Rows) -> None:
    for into_W, own in zip(into_nW, factors, strict=True):
        for row_W, factor in zip(row_KW, own, strict=True):
            if factor:
                _add_product(into_W.view(np.uint64), row_W.view(np.uint64), factor)


@compiled
def _add_product(into_w: NDArray[np.uint64], row_w: NDArray[np.uint64], factor: int) -> None:
    """Add ``factor`` times a row, eight bytes at once: doubling is a shift, and the polynomial where a bit fell out.

    Every bit of ``factor`` is a mask, so that no lap branches and several words go at once.
    """
    for at in range(into_w.size):
        doubled, total = row_w[at], np.uint64(0)
        for bit in range(8):
            total ^= doubled & np.uint64(-((factor >> bit) & 1))
            fell_out = (doubled >> np.uint64(7)) & np.uint64(0x0101010101010101)
            doubled = ((doubled & np.uint64(0x7F7F7F7F7F7F7F7F)) << np.uint64(1)) ^ (fell_out * np.uint64(0x1D))
        into_w[at] ^= total


def _product(a: int, b: int) -> int:
    return _EXPONENTIALS[(_LOGARITHMS[a] + _LOGARITHMS[b]) % 255] if a and b else 0


def _inverse(matrix: list[list[int]]) -> list[list[int]]:
    """Invert by elimination; such a matrix always has an inverse."""
    size = len(matrix)
    rows = [[*row, *(int(other == number) for other in range(size))] for number, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(number for number in range(column, size) if rows[number][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = _EXPONENTIALS[(255 - _LOGARITHMS[rows[column][column]]) % 255]
        rows[column] = [_product(scale, value) for value in rows[column]]
        for number in range(size):
            factor = rows[number][column]
            if number != column and factor:
                pairs = zip(rows[number], rows[column], strict=True)
                rows[number] = [value ^ _product(factor, other) for value, other in pairs]
    return [row[size:] for row in rows]


def _tables() -> tuple[list[int], list[int]]:
    """Return the powers of 2, and the power that each value is."""
    powers, value = list[int](), 1
    for _ in range(255):
        powers.append(value)
        value = value << 1 ^ (_POLYNOMIAL if value & 0x80 else 0)
    return powers, [0, *(powers.index(one) for one in range(1, 256))]


_EXPONENTIALS, _LOGARITHMS = _tables()
