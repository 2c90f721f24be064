"""What is fused for a device is the same function, and a compiler's failure is nobody's."""

import logging

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
    def hard(value_N: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            raise ValueError("too hard\nfor me")
        return value_N + 1

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(one_kernel._tried(hard, (torch.ones(3),), {}), torch.full((3,), 2.0))
    assert [record.getMessage().count("hard goes uncompiled") for record in caplog.records] == [1]


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("spelling", BLOCKWISE)
def test_a_long_tensor_on_a_device_is_quantised_as_well_as_on_the_processor(spelling: str):
    quantiser, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    value_N = torch.randn((1 << 20) + 77, generator=chance)

    def lost(device: str) -> float:
        value = value_N.to(device)
        return float((quantiser.decompress(quantiser.compress(value)) - value).norm())

    assert lost("cuda") == pytest.approx(lost("cpu"), rel=1e-3)
    assert not one_kernel._failed
