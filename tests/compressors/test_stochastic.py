"""Natural compression and QSGD: which way a value is rounded, and how often."""

import pytest
import torch

from decentral.compressors import QSGD, Natural, Payload


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor) -> torch.Tensor:
    return Natural().decompress_one(Natural().compress_one(tensor))


def test_powers_of_two_are_exact_over_126_of_them():
    for lowest in (-149, -130, -60, 0):
        powers = torch.ldexp(torch.ones(126, dtype=torch.float64), torch.arange(lowest, lowest + 126)).float()
        assert torch.equal(sent(powers), powers)
        assert torch.equal(sent(-powers), -powers)


def test_every_value_arrives_as_one_of_the_powers_beside_it():
    tensor = gaussian(10_000) ** 3
    ratio = sent(tensor) / tensor
    mantissa, _ = torch.frexp(sent(tensor))
    assert set(mantissa.abs().tolist()) == {0.5}
    assert ((ratio > 0.5) & (ratio <= 2)).all()


@pytest.mark.parametrize(("number", "power"), [(0.0, 8.0), (0.249, 8.0), (0.25, 4.0), (0.999, 4.0)])
def test_it_goes_up_when_its_number_is_below_the_way_to_the_next_power(number: float, power: float):
    payload = Natural().compress_with(torch.tensor([5.0, -5.0]), torch.full((2,), number))
    assert Natural().decompress_one(payload).tolist() == [power, -power]


def test_the_variance_of_the_worst_value_is_an_eighth_of_its_square():
    worst = torch.full((100_000,), 4 / 3)  # (v - 1) (2 - v) / v**2 is largest there
    lost = (sent(worst * (1 + gaussian(100_000) * 1e-6)) - worst).double()
    assert float(lost.square().mean()) / (4 / 3) ** 2 == pytest.approx(1 / 8, rel=0.02)
    assert abs(float(lost.mean())) < 0.01


def test_above_the_largest_power_values_go_down():
    tensor = torch.full((100,), torch.finfo(torch.float32).max)
    assert sent(tensor).tolist() == [2.0**127] * 100


def test_what_is_far_below_the_largest_becomes_the_lowest_power_or_zero():
    tensor = torch.tensor([1.0, 2.0**-130, -(2.0**-130)])
    low, zero = (Natural().decompress_one(Natural().compress_with(tensor, torch.full((3,), n))) for n in (0.01, 0.5))
    assert low.tolist() == [1.0, 2.0**-125, -(2.0**-125)]
    assert zero.tolist() == [1.0, 0.0, 0.0]


def test_the_highest_base_decodes_to_finite_values():
    parts = (torch.tensor([127, 255], dtype=torch.uint8), torch.tensor([150], dtype=torch.uint8))
    assert Natural().decompress_one(Payload((2,), parts)).tolist() == [2.0**127, -(2.0**127)]


def test_a_value_goes_to_one_of_its_two_neighbours():
    method, tensor = QSGD(levels=7, block=10), gaussian(1000)
    payload = method.compress_one(tensor)
    scale = payload.parts[1].float().repeat_interleave(10)
    assert ((method.decompress_one(payload) - tensor).abs() <= scale).all()


@pytest.mark.parametrize(("number", "level"), [(0.0, 3), (0.249, 3), (0.25, 2), (0.999, 2)])
def test_it_goes_up_when_its_number_is_below_the_distance_from_the_lower_level(number: float, level: int):
    tensor = torch.tensor([7.0, 2.25, -2.25])
    codes = QSGD(levels=7, block=4).compress_with(tensor, torch.full((3,), number)).parts[0]
    assert codes.tolist() == [14, 7 + level, 7 - level]


def test_values_on_a_level_never_move():
    method, tensor = QSGD(levels=7, block=16), torch.arange(-7.0, 8.0)
    for number in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(method.decompress_one(method.compress_with(tensor, torch.full((15,), number))), tensor)


def test_another_seed_or_another_bit_of_the_tensor_rounds_otherwise():
    tensor = gaussian(1000)
    first = QSGD(seed=0).compress_one(tensor).parts[0]
    assert not torch.equal(first, QSGD(seed=1).compress_one(tensor).parts[0])
    tensor[500] = torch.nextafter(tensor[500], torch.tensor(9.0))
    assert int((first != QSGD(seed=0).compress_one(tensor).parts[0]).sum()) > 50
