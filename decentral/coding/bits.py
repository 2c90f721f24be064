"""Numbers in few bits: of a fixed width, rising ones as gaps, floats taken apart."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from decentral.tensors.compiled import compiled

__all__ = [
    "from_gaps",
    "highest",
    "others",
    "pack",
    "packed_nbytes",
    "pull",
    "push",
    "put_together",
    "side_nbits",
    "to_gaps",
    "unpack",
]

# ---- streams of bits ----
#
# Numbers of a fixed width, and Exp-Golomb numbers; the first bit is a byte's lowest.
#
# What is left over in the last byte is zero, and is checked: there is one spelling for every list of numbers.

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


# ---- rising numbers as gaps ----
#
# The gaps between them: a symbol for how long a gap is, and bits for how long exactly.
#
# A gap of v + 1 has the symbol v below 16; above, three bits after the leading one belong to the symbol and the e bits
# below them go to the side: symbol = 8 e + (v >> e). Gaps of any 32-bit number fit 232 symbols, and inside a symbol
# all gaps are nearly equally likely, whatever their mean: 0.02 bits per gap above the entropy of the gaps themselves.

_MOST_SYMBOLS = 232
_SHORT = 1 << 12  # gaps whose extra bits are looked up: all of a chunk's
_EXTRA = np.array([max(0, v.bit_length() - 4) for v in range(_SHORT)], dtype=np.uint8)


@compiled
def to_gaps(rows, symbols, side):  # type: ignore[no-untyped-def]
    """Fill symbols (rows * columns,) and words of side bytes from rising rows; returns the bits written."""
    held, pending, at, n = np.uint64(0), np.uint64(0), np.int64(0), 0
    for r in range(rows.shape[0]):
        before = np.int64(-1)
        for c in range(rows.shape[1]):
            v = np.int64(rows[r, c]) - before - 1
            before = np.int64(rows[r, c])
            e = _extra(v)
            symbols[n] = np.uint8((v >> e) + 8 * e)
            n += 1
            held |= np.uint64(v & ((1 << e) - 1)) << pending
            pending += np.uint64(e)
            side[at] = np.uint32(held)  # written always, kept sometimes: a branch here is a coin toss
            full = pending >> np.uint64(5)
            held >>= full << np.uint64(5)
            pending &= np.uint64(31)
            at += np.int64(full)
    side[at] = np.uint32(held)
    return 32 * at + np.int64(pending)


@compiled
def _extra(v):  # type: ignore[no-untyped-def]
    """Bits of a gap that go to the side."""
    if 0 <= v < _SHORT:
        return np.int64(_EXTRA[v])
    e = np.int64(0)
    while v >> e >= 16:
        e += 1
    return e


@compiled
def side_nbits(symbols):  # type: ignore[no-untyped-def]
    """Bits that these symbols have on the side; -1 when one of them is no symbol."""
    bits = 0
    for s in symbols:
        if s >= _MOST_SYMBOLS:
            return -1
        bits += (int(s) >> 3) - 1 if s >= 16 else 0
    return bits


@compiled
def from_gaps(symbols, side, limit, rows):  # type: ignore[no-untyped-def]
    """Fill the rows; False when a number reaches ``limit`` or bits are left over that are not zero.

    ``side`` has the bytes that `side_nbits` asks for.
    """
    at, n = np.uint64(0), 0  # bits and symbols behind us
    for r in range(rows.shape[0]):
        number = np.int64(-1)
        for c in range(rows.shape[1]):
            s = np.int64(symbols[n])
            n += 1
            e = (s >> 3) - 1 if s >= 16 else 0
            low = np.int64(_ahead(side, at) & np.uint64((1 << e) - 1))
            at += np.uint64(e)
            number += 1 + (((s - 8 * e) << e) | low)
            if number >= limit:
                return False
            rows[r, c] = number
    return _ahead(side, at) == 0


@compiled
def _ahead(side, at):  # type: ignore[no-untyped-def]
    """57 bits from bit ``at`` on, or all that are left: one load, but for the last bytes of all."""
    first, found = at >> np.uint64(3), np.uint64(0)
    if first + np.uint64(8) <= np.uint64(side.size):
        return _word(side, first) >> (at & np.uint64(7))
    else:
        for i in range(side.size - np.int64(first)):
            found |= np.uint64(side[first + np.uint64(i)]) << np.uint64(8 * i)
    return found >> (at & np.uint64(7))


@compiled
def _word(data, i):  # type: ignore[no-untyped-def]
    """Eight bytes: spelled out, they are one load."""
    return _half(data, i) | _half(data, i + np.uint64(4)) << np.uint64(32)


@compiled
def _half(data, i):  # type: ignore[no-untyped-def]
    a, b = np.uint64(data[i]), np.uint64(data[i + np.uint64(1)])
    c, d = np.uint64(data[i + np.uint64(2)]), np.uint64(data[i + np.uint64(3)])
    return a | b << np.uint64(8) | c << np.uint64(16) | d << np.uint64(24)


# ---- floats taken apart ----
#
# The byte of the exponent, which has a pattern, and everything else, which has none.
#
# The bits of a float are turned left by one, so that the sign comes last and the highest byte holds the exponent: all
# of it for float32 and bfloat16, and three bits of mantissa beside it for float16. The other bytes follow, lowest
# first.
#
# One loop per width, over flat arrays and unsigned places: a loop over the bytes of a number took 2.3 ms for 2**20 of
# float32, as the compiler could not turn it into vector instructions; this takes 0.2 ms.

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
