"""Entropy coding of bytes with fixed shares: range asymmetric numeral systems, four states side by side.

Crosses the wire: four states u32, then words u16 in the order the decoder takes them. 2**31 > state >= 2**15; symbol i
belongs to state i mod 4. A decoder ends with every state at 2**15 and every word taken, or refuses.
Costs the entropy of the shares plus 16 bytes: 7.094 bits for 8-bit codes of Gaussian values, whose entropy is 7.090.

Not the package `constriction` 0.5, which makes bodies shorter by less than 0.1 %, those of a few KB by 0.2 to 0.4 %
(topk >> signmag2: 11,576 bytes, ours 11,622), but encodes 220 million symbols/s where this does 850, and decodes 51
where this does 830; its bytes would be a wire form of somebody else's (experiments/coding/measure.py, LOG.md).

Source: Duda, "Asymmetric numeral systems", 2013, arXiv:1311.2540; interleaving and division by reciprocals as in
Giesen, "Interleaved entropy coders", 2014, arXiv:1402.3392.
"""

import numpy as np
from numpy.typing import NDArray

from decentral.coding.bits import pull, push
from decentral.tensors.compiled import compiled

__all__ = ["SHARE_BITS", "counts", "decode", "encode", "read_shares", "shares_of", "write_shares"]

# ---- table of shares ----
#
# How often each symbol comes, as 14-bit shares: made from counts, written in some ten bits each, read back.
#
# Written: the number of symbols present less one (8 bits), then for each of them how many absent ones stand before it
# and its share, both as Exp-Golomb numbers. Shares add up to 2**14 and are made from the counts by one rule, so equal
# data has equal bytes; a reader that counts what it decoded can tell a table that this rule did not make.

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
    return bits[: int(_write_table(shares, np.count_nonzero(shares), bits))]


def read_shares(data: NDArray[np.uint8]) -> tuple[Shares, int]:
    """The shares at the start of ``data`` and how many bytes they took; 0 bytes when there is no valid table."""
    shares = np.zeros(256, dtype=np.uint32)
    return shares, int(_read_table(data, shares))


@compiled
def _write_table(shares, present, bits):  # type: ignore[no-untyped-def]
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
def _read_table(data, shares):  # type: ignore[no-untyped-def]
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


# ---- coder with four states ----
_STATE_WORDS = 8
_BLOCK = 1 << 16  # symbols; a multiple of four, so that every block begins at state 0
_LOWEST = 1 << 15
_MASK = (1 << SHARE_BITS) - 1


def encode(symbols: NDArray[np.uint8], shares: Shares) -> list[NDArray[np.uint8]]:
    """The symbols, each of which has a share above zero, as pieces of bytes.

    Block by block from the end: the scratch space stays small and in cache, whatever is encoded.
    """
    state, step = np.full(4, _LOWEST, dtype=np.uint64), _steps(shares)
    words = np.empty(min(symbols.size, _BLOCK) + 1, dtype="<u2")  # at most one word per symbol
    pieces: list[NDArray[np.uint8]] = []
    for stop in _ends(symbols.size):
        block = symbols[(stop - 1) // _BLOCK * _BLOCK : stop]
        pieces.append(words[int(_encode(block, step, words, state)) :].view(np.uint8).copy())
    pieces.append(state.astype("<u4").view(np.uint8))
    return pieces[::-1]


def _ends(size: int) -> list[int]:
    """Where blocks end, last first; all but the last begin and end at multiples of the block."""
    return [size, *range((size - 1) // _BLOCK * _BLOCK, 0, -_BLOCK)] if size else []


def decode(data: NDArray[np.uint8], shares: Shares, symbols: NDArray[np.uint8]) -> int:
    """Fill ``symbols`` from the start of ``data``; how many bytes they took, 0 when they are not well formed."""
    if data.size < 2 * _STATE_WORDS:
        return 0
    states = np.frombuffer(data[: 2 * _STATE_WORDS].tobytes(), dtype="<u4").astype(np.uint64)
    if (states < _LOWEST).any() or (states >= _LOWEST << 16).any():
        return 0
    symbol_of = np.repeat(np.arange(256, dtype=np.uint8), shares)
    taken = int(_decode(data[2 * _STATE_WORDS :], states, symbol_of, shares, _starts(shares), symbols))
    return 2 * (_STATE_WORDS + taken) if taken >= 0 else 0


def _starts(shares: Shares) -> Shares:
    return (np.cumsum(shares) - shares).astype(np.uint32)


def _steps(shares: Shares) -> NDArray[np.uint64]:
    step = np.zeros((256, 5), dtype=np.uint64)
    _fill_steps(shares.astype(np.uint64), _starts(shares).astype(np.uint64), step)
    return step


@compiled
def _encode(symbols, step, words, state):  # type: ignore[no-untyped-def]
    """Backwards over the symbols, so that the decoder goes forwards; returns the index of the first word."""
    at, i = np.uint64(words.size), np.uint64(symbols.size)
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    while i % four:
        i -= one
        state[i & three], at = _push(state[i & three], step, symbols[i], words, at)
    a, b, c, d = state[0], state[1], state[2], state[3]
    while i:
        i -= four
        d, at = _push(d, step, symbols[i + three], words, at)
        c, at = _push(c, step, symbols[i + two], words, at)
        b, at = _push(b, step, symbols[i + one], words, at)
        a, at = _push(a, step, symbols[i], words, at)
    state[0], state[1], state[2], state[3] = a, b, c, d
    return at


@compiled
def _fill_steps(shares, starts, step):  # type: ignore[no-untyped-def]
    """Return the numbers of a step with one symbol: the state to renormalise at, reciprocal, its shift, start, 2**14 -
    share.
    """
    one = np.uint64(1)
    for s in range(256):
        share, shift = shares[s], np.uint64(0)
        while (one << shift) < share:
            shift += one
        shift += np.uint64(31)
        step[s, 0] = share << np.uint64(17)
        step[s, 1] = ((one << shift) + share - one) // share if share else np.uint64(0)
        step[s, 2], step[s, 3], step[s, 4] = shift, starts[s], (one << np.uint64(SHARE_BITS)) - share


@compiled
def _push(x, step, s, words, at):  # type: ignore[no-untyped-def]
    """The state with one more symbol. A word is written always and kept sometimes: a branch here is a coin toss."""
    full = np.uint64(x >= step[s, 0])
    words[at - np.uint64(1)] = x & np.uint64(0xFFFF)
    at -= full
    x >>= full << np.uint64(4)
    whole = (x * step[s, 1]) >> step[s, 2]  # x // share, exact below 2**31
    return x + step[s, 3] + whole * step[s, 4], at


@compiled
def _decode(data, state, symbol_of, shares, starts, symbols):  # type: ignore[no-untyped-def]
    """How many words were taken; -1 when they run out, or when a state is not where the encoder began."""
    at, i, size, given = np.uint64(0), np.uint64(0), np.uint64(symbols.size), np.uint64(data.size >> 1)
    one, two, three, four = np.uint64(1), np.uint64(2), np.uint64(3), np.uint64(4)
    a, b, c, d = state[0], state[1], state[2], state[3]
    while i + four <= size and at + four <= given:
        symbols[i], a, at = _pop(a, symbol_of, shares, starts, _word(data, at), at)
        symbols[i + one], b, at = _pop(b, symbol_of, shares, starts, _word(data, at), at)
        symbols[i + two], c, at = _pop(c, symbol_of, shares, starts, _word(data, at), at)
        symbols[i + three], d, at = _pop(d, symbol_of, shares, starts, _word(data, at), at)
        i += four
    state[0], state[1], state[2], state[3] = a, b, c, d
    while i < size:
        word = _word(data, at) if at < given else np.uint64(0)
        symbols[i], state[i & three], at = _pop(state[i & three], symbol_of, shares, starts, word, at)
        i += one
        if at > given:
            return -1
    for lane in range(4):
        if state[lane] != np.uint64(_LOWEST):
            return -1
    return np.int64(at)


@compiled
def _word(data, at):  # type: ignore[no-untyped-def]
    """The word there, wherever the bytes begin: one load."""
    place = at << np.uint64(1)
    return np.uint64(data[place]) | (np.uint64(data[place + np.uint64(1)]) << np.uint64(8))


@compiled
def _pop(x, symbol_of, shares, starts, word, at):  # type: ignore[no-untyped-def]
    """The next symbol, the state without it, and the place of the next word, which is taken when the state is short."""
    slot = x & np.uint64(_MASK)
    s = symbol_of[slot]
    x = np.uint64(shares[s]) * (x >> np.uint64(SHARE_BITS)) + slot - np.uint64(starts[s])
    short = np.uint64(x < np.uint64(_LOWEST))
    more = (x << np.uint64(16)) | word
    return s, (more if short else x), at + short
