"""Numbers of a fixed width, and how symbols' shares are counted, rounded and written."""

import itertools

import numpy as np
import pytest

from decentral.coding import bits, rans


def test_numbers_of_every_width_survive() -> None:
    for width, count in itertools.product(range(1, 33), (0, 1, 2, 3, 7, 8, 9, 1000)):
        dtype = np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32
        numbers = np.random.default_rng(0).integers(0, 2**width, count).astype(dtype)
        packed = bits.pack(numbers, width)
        assert packed.size == bits.packed_nbytes(count, width)
        found = np.empty(count, dtype=dtype)
        assert bits.unpack(packed, width, found), (width, count)
        assert np.array_equal(found, numbers), (width, count)


def test_the_first_number_lies_in_the_lowest_bits() -> None:
    assert bits.pack(np.array([1, 2, 3, 0, 1], dtype=np.uint8), 2).tolist() == [0b00111001, 0b01]
    assert bits.pack(np.array([3, 11, 15], dtype=np.uint16), 12).tobytes().hex() == "03b0000f00"


def test_left_over_bits_that_are_set_are_told() -> None:
    assert not bits.unpack(np.array([0x80], dtype=np.uint8), 2, np.empty(3, dtype=np.uint8))


@pytest.mark.parametrize(
    "count",
    [
        [1],
        [1, 1],
        [1, 10**9],
        [0, 0, 5],
        [1] * 256,
        [10**6, *[1] * 255],
        [3, *[0] * 254, 3],
        list(range(256)),
        [2**n for n in range(40)],
    ],
    ids=str,
)
def test_shares_add_up_and_leave_out_no_symbol_that_occurs(count: list[int]) -> None:
    counted = np.array([*count, *[0] * (256 - len(count))], dtype=np.int64)
    shares = rans.shares_of(counted)
    assert int(shares.sum()) == 2**14
    assert np.array_equal(shares > 0, counted > 0)
    table = rans.write_shares(shares)
    found, taken = rans.read_shares(np.concatenate([table, np.full(9, 0xFF, dtype=np.uint8)]))
    assert taken == table.size
    assert np.array_equal(found, shares)


def test_no_table_of_any_bytes_is_read_beyond_its_end_or_adds_up_to_anything_else() -> None:
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        data = rng.integers(0, 256, rng.integers(0, 60), dtype=np.uint8)
        shares, taken = rans.read_shares(data)
        assert taken <= data.size
        if taken:
            assert int(shares.sum()) == 2**14
            assert rans.write_shares(shares).tobytes() == data[:taken].tobytes()


def test_counts_are_those_of_numpy() -> None:
    for size in (0, 1, 2, 3, 4, 5, 1001):
        symbols = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        assert np.array_equal(rans.counts(symbols), np.bincount(symbols, minlength=256))
