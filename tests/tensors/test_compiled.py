"""The instructions that no loop becomes, beside what they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from decentral.tensors.compiled import compiled, first_bit, which_reach


@compiled
def found(bits, at, least):
    word, places = which_reach(bits, np.uint64(at), least), np.full(64, -1)
    n = 0
    while word:
        places[n] = first_bit(word)
        word &= word - np.uint64(1)
        n += 1
    return places[:n]


@pytest.mark.parametrize("at", [0, 1, 7, 136])
def test_a_bit_for_each_of_64_magnitudes_that_reach(at):
    value = np.random.default_rng(at).standard_normal(200).astype(np.float32)
    value[at], value[at + 63] = np.nan, -np.inf
    bits = value.view(np.uint32)
    least = np.float32(0.5).view(np.uint32)
    wanted = np.flatnonzero((bits[at : at + 64] & 0x7FFFFFFF) >= least)
    assert found(bits, at, least).tolist() == wanted.tolist()
    assert {0, 63} <= set(wanted.tolist())
