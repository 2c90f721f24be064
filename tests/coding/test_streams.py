"""Arrays to bytes and back: the entropy they have, one spelling, and PayloadError for anything else."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from decentral.coding import ElementKind, Floats, Form, Rising, Symbols, bits, decode, encode, raw_nbytes
from decentral.errors import PayloadError

Array = NDArray[np.generic]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rising(rows: int, columns: int, limit: int, seed: int = 0) -> Array:
    """Rows of distinct numbers below the limit, in order."""
    drawn = [rng(seed + row).choice(limit, columns, replace=False) for row in range(rows)]
    return np.sort(np.array(drawn, dtype=np.int64).reshape(rows, columns), axis=1).astype(np.int16)


def long_rising(columns: int, limit: int) -> Array:
    """One row of distinct numbers below the limit, in order."""
    return np.sort(rng().choice(limit, (1, columns), replace=False).astype(np.int32))


def sent(kinds: list[ElementKind], arrays: list[Array]) -> tuple[bytes, list[Array]]:
    data = b"".join(encode(kinds, arrays))
    forms = [Form(kind, array.shape, array.dtype) for kind, array in zip(kinds, arrays, strict=True)]
    found, taken = decode(forms, np.frombuffer(data, dtype=np.uint8))
    assert taken == len(data)
    assert taken <= 4 + raw_nbytes(forms)
    return data, found


def entropy(symbols: Array) -> float:
    """Bits per symbol."""
    count = np.unique(symbols, return_counts=True)[1]
    share = count / count.sum()
    return float(-(share * np.log2(share)).sum())


CASES: dict[str, tuple[list[ElementKind], list[Array]]] = {
    "nothing": ([Symbols(2)], [np.zeros(0, dtype=np.uint8)]),
    "one code": ([Symbols(3)], [np.array([5], dtype=np.uint8)]),
    "all equal": ([Symbols(8)], [np.full(70000, 7, dtype=np.uint8)]),
    "two values": ([Symbols(1)], [(rng().random(5000) < 0.01).astype(np.uint8)]),
    "every byte alike often": ([Symbols(8)], [np.tile(np.arange(256, dtype=np.uint8), 30)]),
    "one rare symbol": ([Symbols(8)], [np.array([*[0] * 99999, 255], dtype=np.uint8)]),
    "a bell": ([Symbols(8)], [np.clip(rng().normal(128, 20, 5001), 0, 255).astype(np.uint8)]),
    "a bell of several blocks": ([Symbols(8)], [np.clip(rng().normal(128, 9, 200003), 0, 255).astype(np.uint8)]),
    "several arrays": ([Symbols(2)] * 3, [rng(n).integers(0, 2, n, dtype=np.uint8) for n in (1, 1000, 0)]),
    "indices": ([Rising(4096)], [rising(50, 64, 4096)]),
    "indices of two sizes": ([Rising(4096), Rising(100)], [rising(20, 64, 4096), rising(1, 2, 100)]),
    "indices of a whole tensor": ([Rising(10**6)], [long_rising(700, 10**6)]),
    "few indices of the longest tensor": ([Rising(2**31)], [np.array([[0, 2**20, 2**31 - 1]], dtype=np.int32)]),
    "all indices": ([Rising(16)], [np.tile(np.arange(16, dtype=np.int16), (3, 1))]),
    "no rows": ([Rising(4096)], [np.zeros((0, 64), dtype=np.int16)]),
    "float32": ([Floats()], [rng().normal(size=3000).astype(np.float32).view(np.uint32)]),
    "float16": ([Floats()], [rng().normal(size=3000).astype(np.float16).view(np.uint16)]),
    "any bits": ([Floats()], [rng().integers(0, 2**32, 999, dtype=np.uint32)]),
}
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_what_is_sent_arrives(case: str) -> None:
    kinds, arrays = CASES[case]
    _, found = sent(kinds, arrays)
    for given_, got in zip(arrays, found, strict=True):
        assert got.dtype == given_.dtype
        assert np.array_equal(got, given_)


@each_case
def test_what_arrived_is_sent_in_the_same_bytes(case: str) -> None:
    kinds, arrays = CASES[case]
    data, found = sent(kinds, arrays)
    assert b"".join(encode(kinds, found)) == data


@each_case
def test_every_cut_is_refused(case: str) -> None:
    kinds, arrays = CASES[case]
    data = np.frombuffer(b"".join(encode(kinds, arrays)), dtype=np.uint8)
    forms = [Form(kind, array.shape, array.dtype) for kind, array in zip(kinds, arrays, strict=True)]
    for size in {*range(min(80, data.size)), *range(0, data.size, 97)}:
        with pytest.raises(PayloadError):
            decode(forms, data[:size])


@each_case
@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_changed_bytes_decode_to_arrays_of_the_kind_or_are_refused(case: str, seed: int) -> None:
    kinds, arrays = CASES[case]
    data = np.frombuffer(b"".join(encode(kinds, arrays)), dtype=np.uint8).copy()
    forms = [Form(kind, array.shape, array.dtype) for kind, array in zip(kinds, arrays, strict=True)]
    for _ in range(rng(seed).integers(1, 4)):
        data[rng(seed).integers(data.size)] = rng(seed + 1).integers(256)
    try:
        found, _ = decode(forms, data)
    except PayloadError:
        return
    assert [array.shape for array in found] == [array.shape for array in arrays]
    for kind, array in zip(kinds, found, strict=True):
        if isinstance(kind, Symbols) and array.size:
            assert int(array.max()) < 2**kind.bits
        if isinstance(kind, Rising) and array.size:
            assert (np.diff(array.astype(np.int64), axis=1) > 0).all()
            assert 0 <= int(array.min()) <= int(array.max()) < kind.limit


@pytest.mark.parametrize("spread", [0.3, 1, 4, 33])
def test_codes_take_their_entropy(spread: float) -> None:
    codes = np.clip(np.rint(rng().normal(128, spread, 10**6)), 0, 255).astype(np.uint8)
    data, _ = sent([Symbols(8)], [codes])
    assert 8 * len(data) <= 1.005 * codes.size * entropy(codes) + 8 * 500


def test_indices_of_64_in_4096_take_one_percent_more_than_the_logarithm_of_the_subsets() -> None:
    rows = rising(2000, 64, 4096)
    subsets = (math.lgamma(4097) - math.lgamma(65) - math.lgamma(4033)) / math.log(2)
    data, _ = sent([Rising(4096)], [rows])
    assert 8 * len(data) <= 1.012 * len(rows) * subsets


def test_a_long_row_of_indices_takes_what_many_short_ones_do() -> None:
    data, _ = sent([Rising(10**6)], [long_rising(10**6 // 64, 10**6)])
    assert 7.3 < 8 * len(data) / (10**6 // 64) < 7.5  # a geometric gap has 7.43


@pytest.mark.parametrize("last", [10**6, 2**20 - 1])
def test_raw_indices_of_more_than_16_bits_are_checked(last: int) -> None:
    """Twenty bits hold more than the limit."""
    form = Form(Rising(10**6), (1, 3), np.dtype(np.int32))
    raw = bytes(4) + bits.pack(np.array([5, 70000, last], dtype=np.uint32), 20).tobytes()
    with pytest.raises(PayloadError, match="rise strictly within"):
        decode([form], np.frombuffer(raw, dtype=np.uint8))
    fine = bytes(4) + bits.pack(np.array([5, 70000, 10**6 - 1], dtype=np.uint32), 20).tobytes()
    (found,), _ = decode([form], np.frombuffer(fine, dtype=np.uint8))
    assert found.tolist() == [[5, 70000, 10**6 - 1]]


def test_a_stream_that_would_grow_is_sent_raw() -> None:
    data, _ = sent([Symbols(8)], [rng().integers(0, 256, 500, dtype=np.uint8)])
    assert len(data) == 504
    assert data[:4] == bytes(4)


def test_a_table_that_the_symbols_do_not_give_is_refused() -> None:
    """Else one array would have many spellings."""
    from decentral.coding import rans

    codes = np.array([0] * 900 + [1] * 100, dtype=np.uint8)
    shares = rans.shares_of(rans.counts(codes))
    shares[0] -= 100
    shares[1] += 100
    body = np.concatenate([rans.write_shares(shares), *rans.encode(codes, shares)])
    data = np.concatenate([np.array([body.size], dtype="<u4").view(np.uint8), body])
    with pytest.raises(PayloadError, match="not the one of its symbols"):
        decode([Form(Symbols(8), (1000,), np.dtype(np.uint8))], data)


def test_a_size_beyond_the_raw_one_is_refused_before_anything_is_made() -> None:
    form = Form(Symbols(8), (10**12,), np.dtype(np.uint8))  # no machine could make it
    for size in (10**12, 2**32 - 1):
        with pytest.raises(PayloadError):
            decode([form], np.frombuffer(min(size, 2**32 - 1).to_bytes(4, "little") + bytes(100), dtype=np.uint8))


def test_golden_bytes() -> None:
    """These bytes are the wire format; a change needs a new frame version."""
    codes = np.array([0, 1, 0, 0, 2, 0, 0, 0, 3, 0] * 12, dtype=np.uint8)
    rows = np.array([[3, 70, 900, 4095], [0, 1, 2, 3]], dtype=np.int16)
    assert b"".join(encode([Symbols(8)], [codes])).hex() == GOLDEN_CODES
    assert b"".join(encode([Rising(4096)], [np.tile(rows, (40, 1))])).hex() == GOLDEN_ROWS


GOLDEN_CODES = "2a00000003011b5a586a586a582a8f000100f4f1ca6960e100005c80ed76567c02346378954c0272f651c8760e15"
GOLDEN_ROWS = (
    "c500000004017f80c11fc0067f0019fc0104f00744a40000ccac000055b50000ddbd00004444cccc5555dddd4444cccc5555"
    "dddd4444cccc5555dddd4444cccc5555dddd4444cccc5555dddd4444cccc5555dddd4444cccc5555dddd4444cccc5555dddd"
    "44404cc855505dd8004000c8005000d8eaf5d4eba9d753afa75e4fbd9e7a3df57aeaf5d4eba9d753afa75e4fbd9e7a3df57a"
    "eaf5d4eba9d753afa75e4fbd9e7a3df57aeaf5d4eba9d753afa75e4fbd9e7a3df57aeaf5d4eba9d753afa75e4fbd9e7a3df5"
    "7a"
)
