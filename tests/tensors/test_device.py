"""What is fused for a device is the same function, and a compiler's failure is nobody's."""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from decentral.benchmarks.compressors import peak_extra_bytes
from decentral.compressors import blocks, parse_compressor, random, signmag2
from decentral.compressors.blockwise import Linear
from decentral.tensors import device
from decentral.tensors.device import (
    BYTES_A_PARAMETER,
    PROCESSOR,
    aside,
    move_together,
    on_device_of,
    place_of,
    slabs,
    to_device,
)
from tests.devices import DEVICES
from tests.kit.tables import long_but

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
            assert torch.equal(device.try_compiled(more, fails, (torch.ones(3),), {}), torch.full((3,), 2.0))
    told = [record.getMessage() for record in caplog.records if record.name == device.__name__]
    assert len(told) == 1
    assert told[0].endswith("more goes uncompiled on this device: too hard")


def elsewhere(spelling: str, value_N: Tensor) -> None:
    """Compress as on a device other than the processor."""
    quantiser = parse_compressor(spelling)
    if isinstance(quantiser, Linear):
        blocks.Tabled.compress_one(quantiser, value_N)
    elif spelling == "signmag2":
        mean_R2 = signmag2.best_means_anywhere(value_N.view(-1, 64))
        signmag2.code_rows_anywhere(value_N.view(-1, 64), mean_R2.mean(dim=1).float())
    else:
        quantiser.compress_one(value_N)


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
    monkeypatch.setattr(device, "_WORTH_A_KERNEL", 1 << 10)
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
        return float((quantiser.decompress_one(quantiser.compress_one(value)) - value).norm())

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
    here = quantiser.compress_one(value_N)
    monkeypatch.setattr(random, "_on_processor", lambda tensor: False)
    is_linear = isinstance(quantiser, Linear)
    there = (
        blocks.Tabled.compress_one(quantiser, value_N.to(device))
        if is_linear
        else quantiser.compress_one(value_N.to(device))
    )
    for one, other in zip(here.parts[1:], there.parts[1:], strict=True):  # scales
        assert torch.equal(one, other.cpu())
    assert (here.parts[0] != there.parts[0].cpu()).float().mean() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_two_levels_of_many_rows_are_those_of_the_processor(device: str):
    value_RC = torch.randn(1 << 15, 64, generator=torch.Generator().manual_seed(0))
    here_R2, there_R2 = signmag2.best_means(value_RC), signmag2.best_means_anywhere(value_RC.to(device)).cpu()
    assert (~torch.isclose(here_R2, there_R2, rtol=1e-12)).float().mean() < 1e-3  # sums of other orders split elsewhere
    half_R = here_R2.mean(dim=1).float()
    there_RC = signmag2.code_rows_anywhere(value_RC.to(device), half_R.to(device)).cpu()
    assert torch.equal(signmag2.code_rows(value_RC, half_R), there_RC)


# ---- test place ----
#
# Where copies of a fragment lie: on the device that trains, if it is one CUDA device with room.

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


# ---- test transfer ----
#
# Tensors to a device and back: the same bits, in the same shapes.

SIZES = [0, 1, 1000, 1 << 18, (1 << 22) + 3, 5 * (1 << 22) + 1]  # of no slab, of a part of one, of several


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("device", DEVICES)
def test_there_and_back_every_bit_is_the_same(device: str, numel: int):
    here_N = torch.arange(numel, dtype=torch.float32)
    there_N = to_device(here_N, torch.device(device))
    assert there_N.device.type == device
    assert torch.equal(to_device(there_N, PROCESSOR), here_N)


@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_there_is_not_copied(device: str):
    tensor = torch.ones(3, device=device)
    assert on_device_of(tensor, tensor.clone()) is tensor


@pytest.mark.parametrize("device", DEVICES)
def test_many_tensors_of_several_types_cross_in_their_order(device: str):
    given = [
        torch.ones(3, 4),
        torch.arange(5, dtype=torch.int16),
        torch.zeros(0),
        torch.full((2,), 7, dtype=torch.int16),
    ]
    there = move_together(given, torch.device(device))
    assert {one.device.type for one in there} == {device}
    for back, one in zip(move_together(there, PROCESSOR), given, strict=True):
        assert (back.shape, back.dtype) == (one.shape, one.dtype)
        assert torch.equal(back, one)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_made_aside_is_there_once_it_has_crossed(device: str):
    tensor = torch.full((1000, 1000), 2.0, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    with aside(tensor.device):
        crossed = move_together([tensor @ tensor], PROCESSOR)
    assert torch.equal(crossed[0], torch.full((1000, 1000), 4000.0))


BY_SLABS = ["codebook8", "dct", "e3m0", "fp8", "natural", "nf4", "qsgd", "sign", "sparseloco2", "bf16", "fp16"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("block", [1, 7, 256, 65536])
@pytest.mark.parametrize("numel", [0, 1, 255, 65535, 65536, 200_000, 40_000_000])
def test_slabs_are_whole_blocks_one_after_the_other(numel: int, block: int, device: str):
    found = list(slabs(torch.empty(numel, device="meta") if device == "meta" else torch.empty(numel), block))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(found)]
    assert [stop for _, stop in found][-1:] == ([numel] if numel else [])
    assert all(start % block == 0 and start < stop for start, stop in found)


@pytest.mark.parametrize("method", BY_SLABS)
def test_a_tensor_in_slabs_gives_the_bits_that_it_gives_at_once(method: str, monkeypatch: pytest.MonkeyPatch):
    tensor = torch.randn(700, 333, generator=torch.Generator().manual_seed(0))
    found = parse_compressor(method).compress_one(tensor)
    for module in ("tensors.device._ON_PROCESSOR", "compressors.dct._AT_ONCE"):
        monkeypatch.setattr(f"decentral.{module}", 1 << 24)
    at_once = parse_compressor(method).compress_one(tensor)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found.parts, at_once.parts, strict=True))


@pytest.mark.parametrize("method", long_but(("int8", "natural", "sign"), BY_SLABS))
def test_compressing_takes_less_memory_than_the_tensor_has(method: str):
    compressor, tensor = parse_compressor(method), torch.randn(24, 1024, 1024)
    compressor.compress_one(tensor)  # compiles
    taken = peak_extra_bytes(lambda: compressor.compress_one(tensor))
    assert taken is None or taken < 4 * tensor.numel()
