"""Where copies of a fragment lie: on the device that trains, if it is one CUDA device with room."""

from dataclasses import dataclass

import pytest
import torch

from decentral.tensors.device import BYTES_A_PARAMETER, PROCESSOR, place_of

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
GIB = 1 << 30


@dataclass
class Held:
    """What is asked of a parameter."""

    device: torch.device
    count: int = 1000

    def numel(self) -> int:
        return self.count


def place(*held: Held, memory: int = GIB) -> torch.device:
    return place_of(held, lambda device: memory)  # type: ignore[arg-type]  # no GPU is needed to ask


def test_copies_lie_on_the_one_device_that_trains():
    assert place(Held(FIRST), Held(FIRST)) == FIRST


def test_copies_of_a_model_on_two_devices_lie_on_the_processor():
    assert place(Held(FIRST), Held(SECOND)) == PROCESSOR
    assert place(Held(FIRST), Held(PROCESSOR)) == PROCESSOR


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_other_kinds_of_devices_copy_to_the_processor(kind: str):
    assert place(Held(torch.device(kind))) == PROCESSOR


def test_a_device_keeps_three_quarters_of_its_memory_for_training():
    most = GIB // 4 // BYTES_A_PARAMETER
    assert place(Held(FIRST, most - 1), Held(FIRST, 1)) == FIRST
    assert place(Held(FIRST, most), Held(FIRST, 1)) == PROCESSOR


def test_a_model_without_trained_parameters_is_copied_to_the_processor():
    assert place() == PROCESSOR
