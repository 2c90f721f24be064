import math

import numpy as np
import pytest
import torch

from decentral.compressors import SignMag2, Threshold, TopK
from decentral.compressors import threshold as module
from decentral.errors import ConfigError
from decentral.wire import body


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def expected(tensor: torch.Tensor, kept: int) -> list[int]:
    """Places of the largest, the first of equal ones, by sorting."""
    order = torch.sort(tensor.flatten().abs(), descending=True, stable=True).indices
    return sorted(order[:kept].tolist())


INPUTS = {
    "gaussian": gaussian(60, 1000),
    "many decades": gaussian(60, 1000) * torch.logspace(-30, 30, 1000),
    "rising": torch.arange(60_000.0),
    "falling": -torch.arange(60_000.0).flip(0),
    "all equal": torch.full((60_000,), -2.5),
    "three values": torch.arange(60_000.0) % 3,
    "the large ones between the samples": torch.where(torch.arange(60_000) % 14 == 3, 5.0, 1.0) + gaussian(60_000) / 9,
    "one crowded corner": gaussian(60_000) * torch.where(torch.arange(60_000) < 900, 1e3, 1.0),
    "few that are not zero": torch.where(torch.arange(60_000) % 977 == 0, 1.0, 0.0),
    "small": gaussian(50),
    "one": gaussian(1),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("k", [1, 64, 2000, 4096])
def test_the_largest_of_the_whole_tensor_are_kept_whatever_the_sample(name: str, k: int):
    tensor = INPUTS[name]
    kept = max(1, round(tensor.numel() * k / 4096))
    for sample in (1e-3, 0.01, 1.0):
        payload = Threshold(k=k, sample=sample).compress_one(tensor)
        assert payload.parts[0].flatten().tolist() == expected(tensor, kept)
        values = torch.cat([part.flatten() for part in payload.parts[1:]])
        assert torch.equal(values, tensor.flatten()[payload.parts[0][0].long()])


def test_a_guess_that_too_few_reach_is_noticed(monkeypatch: pytest.MonkeyPatch):
    tensor = gaussian(60_000)
    monkeypatch.setattr(Threshold, "guess", lambda self, size_N, kept: np.uint32(0x7F7FFFFF))
    assert Threshold().compress_one(tensor).parts[0].flatten().tolist() == expected(tensor, round(60_000 / 64))


def test_the_guess_is_seldom_short_and_never_far():
    for seed in range(20):
        size = np.abs(np.random.default_rng(seed).normal(size=200_000).astype(np.float32)).view(np.uint32)
        reached = int((size >= Threshold().guess(size, 3125)).sum())
        assert 3125 <= reached <= 2 * 3125


def test_the_device_way_keeps_the_same_when_no_magnitudes_are_equal():
    tensor = gaussian(60_000)
    found = module.largest_on_device(tensor, 900)
    assert found.tolist() == expected(tensor, 900)


def test_energy_is_followed_where_topk_takes_the_same_from_every_chunk():
    tensor = gaussian(16, 4096)
    tensor[3] *= 100
    whole, chunked = (c.decompress_one(c.compress_one(tensor.flatten())) for c in (Threshold(k=64), TopK(k=64)))
    assert float((tensor.flatten() - whole).norm()) < 0.6 * float((tensor.flatten() - chunked).norm())
    assert set(whole.nonzero().flatten().tolist()) <= set(range(3 * 4096, 4 * 4096))


def test_the_shape_bounds_the_message_and_an_index_takes_7_and_a_half_bits_of_an_even_tensor():
    compressor, tensor = Threshold(k=64), gaussian(1024, 1024)
    kept = 1024 * 1024 // 64
    assert [spec.shape for spec in compressor.layout((1024, 1024))] == [(1, kept), (kept,)]
    nbytes = len(body.encode(compressor, [compressor.compress_one(tensor)]))
    assert nbytes <= body.max_nbytes(compressor, [(1024, 1024)]) == 4 * kept + math.ceil(kept * 20 / 8) + 8
    values = torch.cat([part.flatten() for part in compressor.compress_one(tensor).parts[1:]])
    assert 8 * (nbytes - 4 * values.numel()) < 7.6 * kept


def test_kept_values_reach_the_quantiser_in_rows_of_64():
    assert Threshold(k=64).value_shapes((100, 1024)) == ((25, 64),)
    assert Threshold(k=64).value_shapes((4096 * 3 + 640,)) == ((3, 64), (1, 10))
    tensor = gaussian(64, 4096) * torch.logspace(-2, 2, 64)[:, None]
    chain = Threshold(k=640) >> SignMag2()
    kept, sent = (c.decompress_one(c.compress_one(tensor)) for c in (Threshold(k=640), chain))
    assert float((sent - kept).norm()) < 0.3 * float(kept.norm())


def test_a_tensor_beyond_the_index_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_LARGEST", 99)
    with pytest.raises(ConfigError, match="100 values, an index reaches 99; use topk"):
        Threshold().compress_one(torch.ones(100))
