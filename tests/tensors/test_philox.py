"""Philox4x32-10 against the known answers of Random123 (kat_vectors, philox4x32 10)."""

import numpy as np
import pytest

from decentral.tensors.ops import philox_4x32

FULL = 0xFFFFFFFF
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN.values(), ids=list(KNOWN))
def test_random123_knows_the_answer(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]):
    made = philox_4x32(np.array(counter, dtype=np.uint32)[:, None], key)
    assert tuple(int(word) for word in made[:, 0]) == wanted


def test_a_block_does_not_depend_on_those_made_with_it():
    counters = np.arange(40, dtype=np.uint32).reshape(4, 10)
    many = philox_4x32(counters, (3, 4))
    assert all((philox_4x32(counters[:, [n]], (3, 4)) == many[:, [n]]).all() for n in range(10))


def test_half_of_all_bits_are_set():
    made = philox_4x32(np.stack([np.arange(1 << 12, dtype=np.uint32)] * 4), (1, 2))
    assert abs(np.unpackbits(made.view(np.uint8)).mean() - 0.5) < 4 / (4 * made.nbytes * 8) ** 0.5  # 4 deviations
