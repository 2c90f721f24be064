import pytest
import torch

from decentral.compressors import random


def gaussian(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def uniform(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return random.uniform(random.draws(tensor, seed)(0, tensor.numel()), tensor)


@pytest.mark.parametrize("numel", [0, 1, 2, 1000])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_both_ways_of_drawing_give_the_same_numbers(numel: int, seed: int, monkeypatch: pytest.MonkeyPatch):
    fast = uniform(gaussian(numel), seed)
    monkeypatch.setattr(random, "_on_processor", lambda tensor: False)
    assert torch.equal(uniform(gaussian(numel), seed), fast)


def test_numbers_are_uniform_and_neighbours_are_independent():
    number = uniform(gaussian(100_000), 0).double()
    assert float(number.min()) >= 0
    assert float(number.max()) < 1
    filled = (number * 100).long().bincount(minlength=100).double()
    assert float(((filled - 1000) ** 2 / 1000).sum()) < 99 + 5 * (2 * 99) ** 0.5  # chi squared, 99 degrees of freedom
    moved = number - 0.5
    assert abs(float((moved[1:] * moved[:-1]).mean()) * 12) < 5 / 100_000**0.5


@pytest.mark.parametrize("processor", [True, False])
def test_numbers_drawn_piece_by_piece_are_those_drawn_at_once(processor: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random, "_on_processor", lambda tensor: processor)
    tensor = gaussian(1000)
    drawn = random.draws(tensor, 3)
    pieces = [random.uniform(drawn(a, b), tensor[a:b]) for a, b in ((0, 1), (1, 700), (700, 1000))]
    assert torch.equal(torch.cat(pieces), random.uniform(drawn(0, 1000), tensor))


def test_one_bit_or_the_order_or_the_seed_changes_every_number():
    tensor = gaussian(1000)
    first = uniform(tensor, 0)
    flipped = tensor.clone()
    flipped[999] = torch.nextafter(flipped[999], torch.tensor(9.0))
    for other in (uniform(tensor, 1), uniform(flipped, 0), uniform(tensor.flip(0), 0)):
        assert int((first == other).sum()) <= 2


def test_signs_and_powers_of_two_change_nothing():
    tensor = gaussian(1000)
    for other in (-tensor, tensor.abs(), tensor * 4):
        assert torch.equal(uniform(other, 0), uniform(tensor, 0))


def test_golden_numbers():
    """An aborted round must be repeatable by a later version, too."""
    assert (uniform(torch.tensor([1.0, 1.5]), 0) * 2**24).int().tolist() == [15001365, 14221883]
