"""What is fused for a device is the same function, and a compiler's failure is nobody's."""

import logging
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import blocks, parse_compressor, random, two_bits
from decentral.compressors.blockwise import Linear
from decentral.tensors import device
from tests.devices import DEVICES

BLOCKWISE = ["int8", "int4", "fp8", "e3m0", "nf4", "sign", "natural", "qsgd"]


@device.one_kernel
def doubled(value_N: Tensor, times: int) -> Tensor:
    return value_N * times


def test_on_the_processor_the_function_itself_runs():
    assert torch.equal(doubled(torch.ones(1 << 20), 2), torch.full((1 << 20,), 2.0))
    assert not device.fuses(torch.device("cpu"))


def test_what_the_compiler_cannot_take_runs_as_it_is_and_is_told_once(caplog: pytest.LogCaptureFixture):
    def more(value_N: Tensor) -> Tensor:
        return value_N + 1

    def fails(function: object) -> Callable[..., Tensor]:
        raise ValueError("too hard\nfor me")

    with caplog.at_level(logging.WARNING, logger=device.__name__):
        for _ in range(2):
            assert torch.equal(device.tried(more, fails, (torch.ones(3),), {}), torch.full((3,), 2.0))
    told = [record.getMessage() for record in caplog.records if record.name == device.__name__]
    assert len(told) == 1
    assert told[0].endswith("more goes uncompiled on this device: too hard")


def elsewhere(spelling: str, value_N: Tensor) -> None:
    """Compress as on a device other than the processor."""
    quantiser = parse_compressor(spelling)
    if isinstance(quantiser, Linear):
        blocks.Tabled.compress(quantiser, value_N)
    elif spelling == "signmag2":
        mean_R2 = two_bits.best_means_anywhere(value_N.view(-1, 64))
        two_bits.code_rows_anywhere(value_N.view(-1, 64), mean_R2.mean(dim=1).float())
    else:
        quantiser.compress(value_N)


@pytest.mark.parametrize("spelling", [*BLOCKWISE, "fp16", "bf16", "signmag2"])
def test_each_kernel_is_one_graph_for_tensors_of_any_length(spelling: str, monkeypatch: pytest.MonkeyPatch):
    """What a device's compiler is given, tried without one: whole functions, and not anew for every length."""
    graphs: list[str] = []

    def compiler(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Tensor]:
            graphs.append(function.__qualname__)
            return graph.forward

        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)

    monkeypatch.setattr(device, "fuses", lambda device: True)
    monkeypatch.setattr(device, "_compile", compiler)
    monkeypatch.setattr(device, "_WORTH_IT", 1 << 10)
    monkeypatch.setattr(device, "_failed", set())
    monkeypatch.setattr(random, "_on_processor", lambda tensor: False)
    torch._dynamo.reset()
    for numel in (1 << 14, 1 << 15, 3 << 15):
        elsewhere(spelling, torch.randn(numel))
    assert not device._failed
    assert graphs
    assert len(graphs) == len(set(graphs))
    if spelling != "signmag2":  # whose rows are whole
        for numel in ((1 << 14) + 7, (1 << 15) + 1, (3 << 14) + 63):
            elsewhere(spelling, torch.randn(numel))
        assert not device._failed
        assert max(Counter(graphs).values()) <= 2  # with a block that is filled up, and without


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spelling", BLOCKWISE)
def test_a_long_tensor_is_quantised_as_well_on_any_device_as_one_by_one(spelling: str, device: str):
    quantiser, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    value_N = torch.randn((1 << 20) + 77, generator=chance)

    def lost(value: Tensor) -> float:
        return float((quantiser.decompress(quantiser.compress(value)) - value).norm())

    parts = [lost(part) for part in value_N.split(1 << 16)]  # too short to be compiled for a device
    assert lost(value_N.to(device)) == pytest.approx(math.hypot(*parts), rel=0.02)


TWO_WAYS = [
    "int8",
    "int4",
    "natural",
    "qsgd",
]  # that the processor does by loops of its own: torch's way is tried there
CASES = [(one, device) for device in DEVICES for one in (TWO_WAYS if device == "cpu" else [*BLOCKWISE, "fp16", "bf16"])]


@pytest.mark.parametrize(("spelling", "device"), CASES)
def test_codes_of_a_long_tensor_are_those_of_the_processor_but_for_the_last_bit_of_a_quotient(
    spelling: str, device: str, monkeypatch: pytest.MonkeyPatch
):
    """One in 10,000 lies so near to halfway between two codes."""
    quantiser, chance = parse_compressor(spelling), torch.Generator().manual_seed(0)
    value_N = torch.randn((1 << 20) + 4096, generator=chance)
    here = quantiser.compress(value_N)
    monkeypatch.setattr(random, "_on_processor", lambda tensor: False)
    is_linear = isinstance(quantiser, Linear)
    there = (
        blocks.Tabled.compress(quantiser, value_N.to(device)) if is_linear else quantiser.compress(value_N.to(device))
    )
    for one, other in zip(here.parts[1:], there.parts[1:], strict=True):  # scales
        assert torch.equal(one, other.cpu())
    assert (here.parts[0] != there.parts[0].cpu()).float().mean() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_two_levels_of_many_rows_are_those_of_the_processor(device: str):
    value_RC = torch.randn(1 << 15, 64, generator=torch.Generator().manual_seed(0))
    here_R2, there_R2 = two_bits.best_means(value_RC), two_bits.best_means_anywhere(value_RC.to(device)).cpu()
    assert (~torch.isclose(here_R2, there_R2, rtol=1e-12)).float().mean() < 1e-3  # sums of other orders split elsewhere
    half_R = here_R2.mean(dim=1).float()
    there_RC = two_bits.code_rows_anywhere(value_RC.to(device), half_R.to(device)).cpu()
    assert torch.equal(two_bits.code_rows(value_RC, half_R), there_RC)
