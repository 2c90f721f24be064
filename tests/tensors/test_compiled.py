"""The instructions that no loop becomes, beside what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from decentral.tensors.compiled import compiled, first_bit, stream, wait_for_stores, which_reach


@compiled
def found(bits, at, least):
    word, places = which_reach(bits, np.uint64(at), least), np.full(64, -1)
    n = 0
    while word:
        places[n] = first_bit(word)
        word &= word - np.uint64(1)
        n += 1
    return places[:n]


@compiled
def streamed(given, into):
    stream(given, into)
    wait_for_stores()


@pytest.mark.parametrize("at", [0, 1, 7, 136])
def test_a_bit_for_each_of_64_magnitudes_that_reach(at):
    value = np.random.default_rng(at).standard_normal(200).astype(np.float32)
    value[at], value[at + 63] = np.nan, -np.inf
    bits = value.view(np.uint32)
    least = np.float32(0.5).view(np.uint32)
    wanted = np.flatnonzero((bits[at : at + 64] & 0x7FFFFFFF) >= least)
    assert found(bits, at, least).tolist() == wanted.tolist()
    assert {0, 63} <= set(wanted.tolist())


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4111, 9000])
@pytest.mark.parametrize("shift", range(17))
def test_what_is_streamed_is_a_copy_wherever_it_begins_and_touches_nothing_else(size, shift):
    given, into = np.arange(1, size + 1, dtype=np.float32), np.zeros(size + 40, dtype=np.float32)
    streamed(given, into[shift : shift + size])
    assert np.array_equal(into[shift : shift + size], given)
    assert not into[:shift].any()
    assert not into[shift + size :].any()
