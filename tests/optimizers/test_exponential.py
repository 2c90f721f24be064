"""e to a power whose bits depend on no C library."""

import math
import random
from itertools import pairwise

import pytest

from decentral.optimizers.edit import exp

GOLDEN = {
    -1e-09: "0x1.fffffff769000p-1",
    -0.1: "0x1.cf46d99d52abfp-1",
    -0.5: "0x1.368b2fc6f9527p-1",
    -1.0: "0x1.78b56362cf004p-2",
    -3.141592653589793: "0x1.620227b598f27p-5",
    -10.0: "0x1.7cd79b5647ca5p-15",
    -123.456: "0x1.da9fb9e4ee46ep-179",
    -350.0: "0x1.0a44a100cace2p-505",
    -699.99: "0x1.17bb3c2b1aa08p-1010",
}


def test_it_is_as_near_to_the_exponential_as_it_says():
    draw = random.Random(0)
    powers = [-700.0 * draw.random() for _ in range(5000)] + [-(2.0**-n) for n in range(60)]
    assert max(abs(exp(power) / math.exp(power) - 1) for power in powers) < 1e-12


def test_it_rises_with_its_power():
    values = [exp(-n / 64) for n in range(64 * 701)]
    assert all(smaller < larger for larger, smaller in pairwise(values) if larger > 0)
    assert max(values) == values[0] == 1.0


def test_it_ends_in_zero_and_never_leaves_zero_to_one():
    assert [exp(power) for power in (0.0, -0.0, -700.1, -1e308, -math.inf)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert 0.0 < exp(-700.0) < 1e-303
    assert exp(-5e-324) == 1.0


@pytest.mark.parametrize("power", GOLDEN)
def test_its_bits_are_these_on_every_machine(power: float):
    assert exp(power).hex() == GOLDEN[power]
