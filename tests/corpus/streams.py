"""Coded streams: tables of shares, states and words, gaps, side bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from decentral.coding import bits
from tests.kit.builders import ACCEPTED, LOWEST, SHARES, Entry, coded, ramp, shares_table, sized, states

GAP_295 = b"\x31"  # the symbol of gaps of 288 to 319 less one, five bits on the side


def streams() -> Iterator[Entry]:
    target, table_words, symbol_words = "stream symbols 8", "its table of shares is damaged", "its symbols are damaged"
    one = shares_table((7, SHARES))  # forty sevens: no word at all
    good = sized(one + states(*[LOWEST] * 4))
    tail = states(*[LOWEST] * 4)
    yield target, "forty sevens", good, ACCEPTED
    yield target, "raw", bytes(4) + bytes(range(40)), ACCEPTED
    yield target, "empty", b"", "it ends before its size"
    yield target, "three bytes", b"\0\0\0", "it ends before its size"
    yield target, "size alone", bytes(4), "0 bytes are there of 40"
    yield target, "size 2**31", struct.pack("<I", 2**31) + one, "2147483648 bytes, raw it has 40"
    yield target, "size 2**32-1", struct.pack("<I", 2**32 - 1) + bytes(10), "4294967295 bytes, raw it has 40"
    yield target, "size as raw", struct.pack("<I", 40) + bytes(40), "40 bytes, raw it has 40"
    yield target, "size beyond the end", struct.pack("<I", 39) + bytes(10), "10 bytes are there of 39"
    yield target, "size one", sized(b"\0"), table_words
    yield target, "table alone", sized(one), symbol_words
    yield target, "table of zeros", sized(bytes(30)), table_words
    yield target, "table of ones", sized(b"\xff" * 30), table_words
    yield target, "share 0 in all", sized(shares_table((7, 1)) + tail), table_words
    yield target, "shares one too few", sized(shares_table((7, SHARES - 1)) + tail), table_words
    yield target, "share too large", sized(shares_table((7, SHARES + 1)) + tail), table_words
    yield target, "symbol 256", sized(shares_table((256, SHARES)) + tail), table_words
    yield target, "symbol 65535", sized(shares_table((65535, SHARES)) + tail), table_words
    yield target, "table names 256 and ends", sized(shares_table((7, SHARES), present=256)), table_words
    yield target, "endless zeros", sized(b"\0" * 39), table_words
    loose = bytearray(one)
    loose[-1] |= 0x80
    yield target, "dirty bits after the table", sized(bytes(loose) + tail), table_words
    yield target, "state below", sized(one + states(LOWEST - 1, LOWEST, LOWEST, LOWEST)), symbol_words
    yield target, "state 2**31", sized(one + states(LOWEST, LOWEST, LOWEST, 1 << 31)), symbol_words
    yield target, "state zero", sized(one + bytes(16)), symbol_words
    yield target, "state not at its end", sized(one + states(LOWEST + 1, LOWEST, LOWEST, LOWEST)), symbol_words
    yield target, "three states", sized(one + tail[:12]), symbol_words
    yield target, "a word too many", sized(one + tail + b"\1\0"), "2 bytes are left over"
    yield target, "a byte too many", sized(one + tail + b"\1"), "1 bytes are left over"
    two = np.zeros(256, dtype=np.uint32)
    two[7], two[9] = SHARES - 1, 1
    yield target, "a table with a symbol that never comes", coded(bytes([7] * 40), shares=two), "not the one of its"
    two[7], two[9] = SHARES // 2, SHARES // 2
    mixed = coded(bytes([7] * 39 + [9]))
    yield target, "thirty nine and one", mixed, ACCEPTED
    yield target, "a word too few", sized(mixed[4:-2]), symbol_words
    yield target, "a table of other shares", coded(bytes([7] * 39 + [9]), shares=two), "not the one of its"
    yield "stream symbols 2", "forty threes", sized(shares_table((3, SHARES)))[:4] + bytes(10), "refused"
    yield "stream symbols 2", "raw", bytes(4) + b"\xe4" * 10, ACCEPTED
    yield from _code_streams()
    yield from _float_streams()


def _code_streams() -> Iterator[Entry]:
    target = "stream rising"  # 4 rows of 5 below 300, a row of 7 below 7: 23 + 3 bytes raw
    rows = [[0, 1, 2, 3, 4], [0, 10, 20, 30, 40], [295, 296, 297, 298, 299], [5, 6, 7, 8, 299]]
    words = "indices must rise strictly within [0, "
    yield target, "last is n-1", rising(rows), ACCEPTED
    for name, place, row in [
        ("last is n", 2, [295, 296, 297, 298, 300]),
        ("511", 3, [5, 6, 7, 8, 511]),
        ("duplicate first", 0, [0, 0, 2, 3, 4]),
        ("duplicate last", 0, [0, 1, 2, 4, 4]),
        ("descending", 1, [40, 30, 20, 10, 0]),
        ("unsorted middle", 1, [0, 20, 10, 30, 40]),
        ("first too large", 1, [300, 301, 302, 303, 304]),
    ]:
        yield target, name, rising([*rows[:place], row, *rows[place + 1 :]]), words
    yield target, "dirty bits after the last index", rising(rows, dirty=0x10), "bits after the last index must be zero"
    yield target, "seven of seven out of order", rising(rows, [0, 1, 2, 3, 4, 6, 5]), words
    yield target, "gaps", gapped([bytes(20), bytes(7)]), ACCEPTED
    yield target, "gap to n-1", gapped([bytes(19) + GAP_295, bytes(7)], b"\x07"), ACCEPTED
    yield target, "gap to n", gapped([bytes(19) + GAP_295, bytes(7)], b"\x08"), words
    yield target, "gap symbol 231 without a side", gapped([bytes(19) + b"\xe7", bytes(7)]), "side bytes end too early"
    yield target, "gap symbol 232", gapped([bytes(19) + b"\xe8", bytes(7)]), words
    yield target, "gap symbol 255", gapped([bytes(19) + b"\xff", bytes(7)]), words
    yield target, "gap in the full row", gapped([bytes(20), bytes(6) + b"\1"]), words
    yield target, "side byte missing", gapped([bytes(19) + b"\x10", bytes(7)]), "its side bytes end too early"
    yield target, "side byte too many", gapped([bytes(20), bytes(7)], b"\0"), "1 bytes are left over"
    yield target, "dirty side bits", gapped([bytes(19) + b"\x10", bytes(7)], b"\2"), words


def rising(rows: list[list[int]], last: list[int] | None = None, dirty: int = 0) -> bytes:
    """Rows of indices as they are sent raw."""
    first = bits.pack(np.array(rows, dtype=np.uint16).reshape(-1), 9)
    first[-1] |= dirty
    second = bits.pack(np.array(last or list(range(7)), dtype=np.uint16), 3)
    return bytes(4) + first.tobytes() + second.tobytes()


def gapped(symbols: list[bytes], side: bytes = b"") -> bytes:
    """Rows of gaps, coded."""
    return coded(b"".join(symbols), side)


def _float_streams() -> Iterator[Entry]:
    target = "stream float32"  # 24 of 4 bytes
    yield target, "zeros", coded(bytes(24), bytes(72)), ACCEPTED
    yield target, "raw", bytes(4) + ramp(24).numpy().tobytes(), ACCEPTED
    yield target, "raw less one", bytes(4) + bytes(95), "95 bytes are there of 96"
    yield target, "side bytes less one", coded(bytes(24), bytes(71))[:4] + bytes(92), "table of shares is damaged"
    small = coded(bytes([9] * 24))
    yield target, "no side bytes", small, "its side bytes end too early"
    yield "stream bfloat16", "side bytes less one", coded(bytes([9] * 27), bytes(26)), "side bytes end too early"
    yield "stream bfloat16", "side bytes and one", coded(bytes([9] * 27), bytes(28)), "1 bytes are left over"
    yield "stream bfloat16", "as it should be", coded(bytes([9] * 27), bytes(27)), ACCEPTED
