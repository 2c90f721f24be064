"""How often each symbol comes, as 14-bit shares: made from counts, written in some ten bits each, read back.

Written: the number of symbols present less one (8 bits), then for each of them how many absent ones stand before it
and its share, both as Exp-Golomb numbers. Shares add up to 2**14 and are made from the counts by one rule, so equal
data has equal bytes; a reader that counts what it decoded can tell a table that this rule did not make.
"""

import numpy as np
from numpy.typing import NDArray

from decentral.coding.bits import pull, push
from decentral.tensors.compiled import compiled

__all__ = ["SHARE_BITS", "counts", "read_shares", "shares_of", "write_shares"]

SHARE_BITS = 14
_TOTAL = 1 << SHARE_BITS
_GAP_ORDER, _SHARE_ORDER = 0, 6  # Exp-Golomb orders: gaps are short, shares are tens to hundreds
_LONGEST_TABLE = 1 + 256 * 8  # bytes

Shares = NDArray[np.uint32]


@compiled
def counts(symbols):  # type: ignore[no-untyped-def]
    """Occurrences (256,) of each byte."""
    found = np.zeros(256, dtype=np.int64)
    lanes = np.zeros((4, 256), dtype=np.int64)  # four: equal neighbours would wait for each other's store
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        lanes[0, symbols[i]] += 1
        lanes[1, symbols[i + 1]] += 1
        lanes[2, symbols[i + 2]] += 1
        lanes[3, symbols[i + 3]] += 1
    for i in range(whole, symbols.size):
        lanes[0, symbols[i]] += 1
    for s in range(256):
        found[s] = lanes[0, s] + lanes[1, s] + lanes[2, s] + lanes[3, s]
    return found


def shares_of(count: NDArray[np.int64]) -> Shares:
    """Shares (256,) that add up to 2**14; a symbol that occurs has at least one."""
    present = count > 0
    shares = np.where(present, np.maximum(1, count * _TOTAL // max(1, int(count.sum()))), 0)
    rest = _TOTAL - int(shares.sum())
    while rest:  # what rounding left goes to the largest; what the rare ones took comes from it
        largest = int(shares.argmax())
        step = max(rest, 1 - int(shares[largest])) if rest < 0 else rest
        step = max(step, -(int(shares[largest]) + 1) // 2)
        shares[largest] += step
        rest -= step
    return shares.astype(np.uint32)


def write_shares(shares: Shares) -> NDArray[np.uint8]:
    """The table as bytes."""
    bits = np.zeros(_LONGEST_TABLE, dtype=np.uint8)
    return bits[: int(_write(shares, np.count_nonzero(shares), bits))]


def read_shares(data: NDArray[np.uint8]) -> tuple[Shares, int]:
    """The shares at the start of ``data`` and how many bytes they took; 0 bytes when there is no valid table."""
    shares = np.zeros(256, dtype=np.uint32)
    return shares, int(_read(data, shares))


@compiled
def _write(shares, present, bits):  # type: ignore[no-untyped-def]
    at = push(bits, np.int64(0), np.int64(present) - 1, np.int64(8))
    absent = np.int64(0)
    for share in shares:
        if share == 0:
            absent += np.int64(1)
            continue
        at = _push_golomb(bits, at, absent, np.int64(_GAP_ORDER))
        at = _push_golomb(bits, at, np.int64(share) - 1, np.int64(_SHARE_ORDER))
        absent = np.int64(0)
    return (at + 7) >> 3


@compiled
def _read(data, shares):  # type: ignore[no-untyped-def]
    present = pull(data, np.int64(0), np.int64(8)) + 1  # 0 when there is no byte
    at, symbol, total = np.int64(8), -1, 0
    for _ in range(present):
        absent, at = _pull_golomb(data, at, np.int64(_GAP_ORDER))
        share, at = _pull_golomb(data, at, np.int64(_SHARE_ORDER))
        symbol += absent + 1
        if absent < 0 or share < 0 or symbol > 255 or share >= _TOTAL:
            return 0
        shares[symbol] = share + 1
        total += share + 1
    padding = -at & 7
    if present == 0 or total != _TOTAL or pull(data, at, padding) != 0:
        return 0
    return (at + padding) >> 3


@compiled
def _push_golomb(bits, at, number, order):  # type: ignore[no-untyped-def]
    number += 1 << order
    width = np.int64(0)
    while number >> (width + 1):
        width += 1
    at += width - order  # zeros
    at = push(bits, at, np.int64(1), np.int64(1))
    return push(bits, at, number & ((1 << width) - 1), width)


@compiled
def _pull_golomb(data, at, order):  # type: ignore[no-untyped-def]
    """The number and the place behind it; -1 for a number cut short or beyond 16 bits."""
    width = order
    while True:
        bit = pull(data, at, np.int64(1))
        at += 1
        if bit == 1:
            break
        width += 1
        if bit < 0 or width > 16:
            return -1, at
    low = pull(data, at, width)
    if low < 0:
        return -1, at
    return (1 << width) + low - (1 << order), at + width
