import pytest
import torch

from decentral.compressors import BFloat16, Float16, Uncompressed


@pytest.mark.parametrize("compressor", [Float16(), BFloat16()], ids=str)
def test_it_rounds_to_nearest(compressor):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    back = compressor.decompress_one(compressor.compress_one(tensor))
    assert torch.equal(back, tensor.to(compressor.dtype).float())


def test_float16_sends_what_is_beyond_its_range_as_its_end():
    back = Float16().decompress_one(Float16().compress_one(torch.tensor([1e6, -1e38, 65504.0])))
    assert back.tolist() == [65504.0, -65504.0, 65504.0]


def test_bfloat16_never_rounds_to_inf():
    largest = torch.finfo(torch.float32).max
    back = BFloat16().decompress_one(BFloat16().compress_one(torch.tensor([largest, -largest])))
    assert bool(torch.isfinite(back).all())


def test_uncompressed_returns_the_very_bits():
    tensor = torch.tensor([0.0, -0.0, 2.0**-149, 1e38])
    back = Uncompressed().decompress_one(Uncompressed().compress_one(tensor))
    assert torch.equal(back.view(torch.int32), tensor.view(torch.int32))
