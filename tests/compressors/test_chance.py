import pytest
import torch

from decentral.compressors import chance


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("numel", [0, 1, 2, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_both_ways_of_drawing_give_the_same_numbers(numel: int, seed: int, monkeypatch: pytest.MonkeyPatch):
    fast = chance.uniform(gaussian(numel), seed)
    monkeypatch.setattr(chance, "_on_processor", lambda tensor: False)
    assert torch.equal(chance.uniform(gaussian(numel), seed), fast)


def test_numbers_are_uniform_and_neighbours_are_independent():
    number = chance.uniform(gaussian(100_000), 0).double()
    assert float(number.min()) >= 0
    assert float(number.max()) < 1
    filled = (number * 100).long().bincount(minlength=100).double()
    assert float(((filled - 1000) ** 2 / 1000).sum()) < 99 + 5 * (2 * 99) ** 0.5  # chi squared, 99 degrees of freedom
    moved = number - 0.5
    assert abs(float((moved[1:] * moved[:-1]).mean()) * 12) < 5 / 100_000**0.5


def test_one_bit_or_the_order_or_the_seed_changes_every_number():
    tensor = gaussian(1000)
    first = chance.uniform(tensor, 0)
    flipped = tensor.clone()
    flipped[999] = torch.nextafter(flipped[999], torch.tensor(9.0))
    for other in (chance.uniform(tensor, 1), chance.uniform(flipped, 0), chance.uniform(tensor.flip(0), 0)):
        assert int((first == other).sum()) <= 2


def test_signs_and_powers_of_two_change_nothing():
    tensor = gaussian(1000)
    for other in (-tensor, tensor.abs(), tensor * 4):
        assert torch.equal(chance.uniform(other, 0), chance.uniform(tensor, 0))


def test_golden_numbers():
    """An aborted round must be repeatable by a later version, too."""
    assert (chance.uniform(torch.tensor([1.0, 1.5]), 0) * 2**24).int().tolist() == [15001365, 14221883]
