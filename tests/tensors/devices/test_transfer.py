"""Tensors to a device and back: the same bits, in the same shapes."""

import pytest
import torch

from decentral.tensors.device import PROCESSOR, aside, beside, moved, moved_together
from tests.devices import DEVICES

SIZES = [0, 1, 1000, 1 << 18, (1 << 22) + 3, 5 * (1 << 22) + 1]  # of no slab, of a part of one, of several


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back_every_bit_is_the_same(device: str, numel: int):
    here_N = torch.arange(numel, dtype=torch.float32)
    there_N = moved(here_N, torch.device(device))
    assert there_N.device.type == device
    assert torch.equal(moved(there_N, PROCESSOR), here_N)


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_there_is_not_copied(device: str):
    tensor = torch.ones(3, device=device)
    assert beside(tensor, tensor.clone()) is tensor


@pytest.mark.parametrize("device", DEVICES)
def test_many_tensors_of_several_types_cross_in_their_order(device: str):
    given = [
        torch.ones(3, 4),
        torch.arange(5, dtype=torch.int16),
        torch.zeros(0),
        torch.full((2,), 7, dtype=torch.int16),
    ]
    there = moved_together(given, torch.device(device))
    assert {one.device.type for one in there} == {device}
    for back, one in zip(moved_together(there, PROCESSOR), given, strict=True):
        assert (back.shape, back.dtype) == (one.shape, one.dtype)
        assert torch.equal(back, one)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_made_aside_is_there_once_it_has_crossed(device: str):
    tensor = torch.full((1000, 1000), 2.0, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    with aside(tensor.device):
        crossed = moved_together([tensor @ tensor], PROCESSOR)
    assert torch.equal(crossed[0], torch.full((1000, 1000), 4000.0))
