import pytest
import torch

from decentral.benchmarks.compressors import peak_extra_bytes
from decentral.compressors import parse_compressor
from decentral.tensors.device import slabs

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
    found = parse_compressor(method).compress(tensor)
    for module in ("tensors.slabs._ON_PROCESSOR", "compressors.sparsifiers.dct._AT_ONCE"):
        monkeypatch.setattr(f"decentral.{module}", 1 << 24)
    at_once = parse_compressor(method).compress(tensor)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found.parts, at_once.parts, strict=True))


@pytest.mark.parametrize("method", BY_SLABS)
def test_compressing_takes_less_memory_than_the_tensor_has(method: str):
    compressor, tensor = parse_compressor(method), torch.randn(24, 1024, 1024)
    compressor.compress(tensor)  # compiles
    taken = peak_extra_bytes(lambda: compressor.compress(tensor))
    assert taken is None or taken < 4 * tensor.numel()
