"""Rising numbers as the gaps between them: a symbol for how long a gap is, and bits for how long exactly.

A gap of v + 1 has the symbol v below 16; above, three bits after the leading one belong to the symbol and the e bits
below them go to the side: symbol = 8 e + (v >> e). Gaps of any 32-bit number fit 232 symbols, and inside a symbol
all gaps are nearly equally likely, whatever their mean: 0.02 bits per gap above the entropy of the gaps themselves.
"""

import numpy as np

from decentral.tensors.compiled import compiled

__all__ = ["from_gaps", "side_nbits", "to_gaps"]

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
