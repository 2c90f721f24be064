"""float32 by planes through zstd: the same bits again, as short as promised, and hostile frames in bounded memory."""

import resource
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decentral.coding import zstd
from decentral.coding.zstd import read_frame, write_frame
from decentral.errors import PayloadError
from tests.corpus.packed import LARGEST_BLOCK, block, runs, single, windowed

CHUNK = 1 << 18  # bytes


def normal(numel: int = CHUNK // 4) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(numel).astype("<f4")


@given(st.binary(max_size=400).map(lambda data: data[: len(data) // 4 * 4]))
def test_any_bits_come_back(data: bytes) -> None:
    assert zstd.read_float_frame(zstd.write_float_frame(data), len(data)) == data


@pytest.mark.parametrize("numel", [0, 1, 2, 65535, 65536])
def test_any_number_of_them_comes_back(numel: int) -> None:
    data = normal(numel).tobytes()
    assert zstd.read_float_frame(zstd.write_float_frame(data), len(data)) == data


def test_values_of_one_scale_take_five_sixths() -> None:
    assert len(zstd.write_float_frame(normal().tobytes())) / CHUNK < 0.834


def test_values_that_were_bfloat16_take_less_than_half() -> None:
    rounded = (normal().view("<u4") & np.uint32(0xFFFF0000)).tobytes()
    assert len(zstd.write_float_frame(rounded)) / CHUNK < 0.36


def test_zeros_take_nothing() -> None:
    assert len(zstd.write_float_frame(bytes(CHUNK))) < 40


def test_noise_costs_a_few_bytes() -> None:
    noise = np.random.default_rng(0).bytes(CHUNK)
    assert len(zstd.write_float_frame(noise)) <= CHUNK + 40
    assert zstd.read_float_frame(zstd.write_float_frame(noise), CHUNK) == noise


GOLDEN = ((0, 1, 0), (0, 0, 0), (0, 64, 64), (127, 128, 124))  # of 1, -2.5, 0.15625: turned bits, lowest byte first


def test_bytes_of_another_zstd_are_read_by_their_format() -> None:
    frame = single(12, b"".join(block(0, 3, bytes(plane)) for plane in GOLDEN) + block(0, 0, b"", last=True))
    assert zstd.read_float_frame(frame, 12) == struct.pack("<3f", 1.0, -2.5, 0.15625)


def test_a_frame_is_as_long_as_the_reader_expects_or_refused() -> None:
    frame = write_frame([b"abcd", b"efgh"])
    assert read_frame(frame, 8) == b"abcdefgh"
    for nbytes in (0, 7, 9, 1 << 40):
        with pytest.raises(PayloadError, match="it declares 8 bytes where"):
            read_frame(frame, nbytes)


def test_a_frame_that_ends_early_is_refused() -> None:
    frame = write_frame([bytes(range(16)), bytes(range(16))])
    for nbytes in range(len(frame)):
        with pytest.raises(PayloadError, match="zstd frame refused"):
            read_frame(frame[:nbytes], 32)


BOMBS = {
    "that declares 1 GiB": single(1 << 30, runs(60, LARGEST_BLOCK)),
    "that declares a chunk": single(CHUNK, runs(60, LARGEST_BLOCK)),
    "of many blocks": single(CHUNK, runs(8192, LARGEST_BLOCK)),
    "without a size": windowed(17, None, runs(60, LARGEST_BLOCK)),
    "behind a large window": windowed(30, CHUNK, runs(60, LARGEST_BLOCK)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_memory_than_a_chunk(name: str) -> None:
    zstd.read_float_frame(zstd.write_float_frame(bytes(CHUNK)), CHUNK)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    for _ in range(20):
        with pytest.raises(PayloadError):
            zstd.read_float_frame(BOMBS[name], CHUNK)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * CHUNK
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10  # KiB: zstd's own memory
