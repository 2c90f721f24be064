"""Directions and levels of zeroth-order methods: the same bits everywhere, and what a byte is worth."""

from __future__ import annotations

import hashlib

import pytest
import torch

from decentral.optimizers.just_one_byte import LARGEST, MOST, Direction, ToldDerivatives, byte_of, level_of

LAYOUT = {"a": (3, 5), "b": (200,)}


def test_the_signs_of_a_direction_are_these_bits():
    """As a peer of another version must make them, too."""
    signs_N = Direction(seed=1 << 40 | 7, number=3).of("layers.0.weight", 1000)
    assert hashlib.sha256(bytes((signs_N < 0).tolist())).hexdigest()[:16] == "bd6306ca82ef90a8"
    assert set(signs_N.tolist()) == {1.0, -1.0}


def test_a_value_has_its_sign_however_long_the_tensor_is():
    direction = Direction(5, 6)
    whole_N = direction.of("a", 1000)
    assert all(torch.equal(direction.of("a", n), whole_N[:n]) for n in (0, 1, 127, 128, 129, 999))


@pytest.mark.parametrize(
    "other", [(Direction(6, 6), "a"), (Direction(5 | 1 << 32, 6), "a"), (Direction(5, 7), "a"), (Direction(5, 6), "b")]
)
def test_another_seed_number_or_name_has_signs_of_its_own(other: tuple[Direction, str]):
    direction, name = other
    same = float((Direction(5, 6).of("a", 10_000) == direction.of(name, 10_000)).float().mean())
    assert abs(same - 0.5) < 0.02  # 4 deviations


def test_a_fragment_has_its_tensors_one_behind_the_other():
    direction = Direction(1, 2)
    assert torch.equal(direction.over(LAYOUT), torch.cat([direction.of("a", 15), direction.of("b", 200)]))


def test_the_mean_of_derivatives_times_directions_is_the_gradient():
    gradient_N = torch.linspace(-1, 1, 20).double()
    total_N = torch.zeros(20).double()
    for number in range(4000):
        direction_N = Direction(0, number).of("x", 20).double()
        total_N += (gradient_N @ direction_N) * direction_N
    torch.testing.assert_close(total_N / 4000, gradient_N, rtol=0, atol=4 * float(gradient_N.norm()) / 4000**0.5)


def test_a_level_is_within_a_sixteenth_of_an_octave():
    for eighth in range(-504, 505):  # through all levels, in steps of an eighth of one
        derivative = 2.0 ** (eighth / 64)
        assert abs(level_of(byte_of(derivative)) / derivative - 1) < 0.0444


def test_levels_rise_and_are_odd():
    levels = [level_of(byte) for byte in range(128)]
    assert levels == sorted(set(levels))
    assert [level_of(byte + 128) for byte in range(128)] == [-level for level in levels]
    assert byte_of(-3.0) == byte_of(3.0) + 128


@pytest.mark.parametrize(
    ("derivative", "level"), [(1e30, LARGEST), (-1e30, -LARGEST), (1e-30, 0.0), (0.0, 0.0), (1.0, 1.0), (-2.0, -2.0)]
)
def test_what_no_level_fits_is_cut_to_the_ends(derivative: float, level: float):
    assert level_of(byte_of(derivative)) == level


@pytest.mark.parametrize("byte", range(256))
def test_every_byte_says_a_float32_number(byte: int):
    assert level_of(byte) == float(torch.tensor(level_of(byte), dtype=torch.float32))
    assert byte_of(level_of(byte)) == (byte if byte & 127 else 0)


def test_what_was_written_is_read():
    told = ToldDerivatives(seed=(1 << 63) + 5, first=(1 << 32) - 1, levels=bytes(range(MOST)))
    assert ToldDerivatives.read(told.written()) == told
    assert len(told.written()) == 64


@pytest.mark.parametrize("summary", [b"", b"\xff", bytes(11), bytes(12)])
def test_too_few_bytes_say_nothing(summary: bytes):
    assert not ToldDerivatives.read(summary).gradient(LAYOUT).any()


@pytest.mark.parametrize("fill", [0, 1, 127, 128, 255])
def test_whatever_a_summary_holds_its_gradient_is_finite_and_no_longer_than_its_bytes_allow(fill: int):
    for length in range(65):
        gradient_N = ToldDerivatives.read(bytes([fill]) * length).gradient(LAYOUT)
        assert gradient_N.shape == (215,)
        assert float(gradient_N.abs().max()) <= max(0, length - 12) * LARGEST * (1 + 1e-6)


def test_a_gradient_is_the_sum_of_what_each_byte_says_along_its_direction():
    """The numbers go on from 0 after the last."""
    told = ToldDerivatives(9, (1 << 32) - 1, bytes([byte_of(2.0), 0, byte_of(-0.5)]))
    wanted_N = 2 * Direction(9, (1 << 32) - 1).over(LAYOUT) - Direction(9, 1).over(LAYOUT) / 2
    assert torch.equal(told.gradient(LAYOUT), wanted_N)
