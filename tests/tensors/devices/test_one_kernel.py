"""What is fused for a device is the same function, and a compiler's failure is nobody's."""

import logging
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.tensors.devices import one_kernel
from tests.devices import DEVICES

BLOCKWISE = ["int8", "int4", "fp8", "e3m0", "nf4", "sign", "natural", "qsgd"]


@one_kernel.one_kernel
def doubled(value_N: Tensor, times: int) -> Tensor:
    return value_N * times


def test_on_the_processor_the_function_itself_runs():
    assert torch.equal(doubled(torch.ones(1 << 20), 2), torch.full((1 << 20,), 2.0))
    assert not one_kernel.fuses(torch.device("cpu"))


def test_what_the_compiler_cannot_take_runs_as_it_is_and_is_told_once(caplog: pytest.LogCaptureFixture):
    def more(value_N: Tensor) -> Tensor:
        return value_N + 1

    def fails(function: object) -> Callable[..., Tensor]:
        raise ValueError("too hard\nfor me")

    with caplog.at_level(logging.WARNING, logger=one_kernel.__name__):
        for _ in range(2):
            assert torch.equal(one_kernel.tried(more, fails, (torch.ones(3),), {}), torch.full((3,), 2.0))
    told = [record.getMessage() for record in caplog.records if record.name == one_kernel.__name__]
    assert len(told) == 1
    assert told[0].endswith("more goes uncompiled on this device: too hard")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", BLOCKWISE)
def test_a_long_tensor_is_quantised_as_well_on_any_device_as_one_by_one(spelling: str, device: str):
    quantiser, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    value_N = torch.randn((1 << 20) + 77, generator=chance)

    def lost(value: Tensor) -> float:
        return float((quantiser.decompress(quantiser.compress(value)) - value).norm())

    parts = [lost(part) for part in value_N.split(1 << 16)]  # too short to be compiled for a device
    assert lost(value_N.to(device)) == pytest.approx(math.hypot(*parts), rel=0.02)
