"""Codebook8, and SparseLoCo2 by the published formula."""

import math

import pytest
import torch

from decentral.compressors import Codebook8, SignMag2, SparseLoCo2
from decentral.wire import body


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def sent(tensor: torch.Tensor) -> torch.Tensor:
    return Codebook8().decompress_one(Codebook8().compress_one(tensor))


def test_every_level_is_the_mean_of_its_members():
    tensor = gaussian(20_000)
    codes, levels = Codebook8().compress_one(tensor).parts
    for code in codes.unique().tolist():
        assert float(levels[code]) == pytest.approx(float(tensor[codes == code].double().mean()), abs=1e-6)


def test_between_the_end_bins_a_value_is_off_by_less_than_a_bin():
    tensor = gaussian(20_000) * 3 + 7
    inside = (tensor - tensor.mean()).abs() < 3 * tensor.std() * (1 - 2 / 256)
    assert 0.99 < float(inside.float().mean()) < 1
    assert float((sent(tensor) - tensor)[inside].abs().max()) < 6 * float(tensor.std()) / 256


def test_the_window_lies_around_the_mean_however_far_from_zero():
    spread = gaussian(20_000)
    near, far = sent(spread) - spread, sent(spread + 100) - (spread + 100)
    assert float(far.norm()) == pytest.approx(float(near.norm()), rel=0.02)
    assert float((sent(spread) - spread).mean()) == pytest.approx(0, abs=1e-6)


def test_the_window_reaches_as_far_up_as_down():
    codes = Codebook8().compress_one(gaussian(1 << 20)).parts[0]
    ends = codes.bincount(minlength=256)[[0, 255]].tolist()
    beyond = (1 << 20) * 0.00142  # of a Gaussian, three sigmas to one side and the last bin before it
    assert all(abs(end - beyond) < 5 * beyond**0.5 for end in ends)


def test_outliers_go_to_the_end_bins():
    tensor = torch.cat([gaussian(20_000), torch.tensor([40.0, -50.0])])
    codes, levels = Codebook8().compress_one(tensor).parts
    assert codes[-2:].tolist() == [255, 0]
    assert levels[255] > 3
    assert levels[0] < -3


@pytest.mark.parametrize(
    ("numel", "bits"), [(0, 4), (1, 4), (768, 4), (1023, 4), (1024, 5), (4096, 7), (8191, 7), (8192, 8), (10**7, 8)]
)
def test_a_small_tensor_has_fewer_bins_by_its_shape_alone(numel: int, bits: int):
    codes, codebook = Codebook8().layout((numel,))
    assert (codes.kind.bits, codebook.shape) == (bits, (1 << bits,))
    assert codebook.nbytes * 8 <= max(512, numel)


def test_a_bias_of_768_pays_for_16_levels():
    assert body.max_nbytes(Codebook8(), [(768,)]) == 4 + 384 + 4 + 64


def kept(chunks: int) -> torch.Tensor:
    """What top-64-of-4096 keeps of Gaussian chunks."""
    chunk = gaussian(chunks, 4096)
    return chunk.gather(1, chunk.abs().topk(64, dim=1).indices)


def reference(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula of the paper's code, in float64."""
    value = value.double().flatten()
    shift = value.mean()
    scale = 6 * ((value - shift).norm() / math.sqrt(value.numel() - 1)) / 4
    code = ((value - shift) / scale + 2).round().clamp(0, 3).long()
    lookup = torch.stack([(value - shift)[code == b].mean() if (code == b).any() else shift * 0 for b in range(4)])
    return code, lookup[code] + shift


@pytest.mark.parametrize("value", [gaussian(5000), kept(10), gaussian(5000) + 3, gaussian(7) ** 3], ids=range(4))
def test_codes_and_decoded_values_are_those_of_the_published_formula(value: torch.Tensor):
    payload = SparseLoCo2().compress_one(value)
    code, decoded = reference(value)
    assert torch.equal(payload.parts[0].long(), code)
    assert torch.allclose(SparseLoCo2().decompress_one(payload).flatten().double(), decoded, rtol=0, atol=1e-6)


def test_behind_topk_two_of_four_bins_are_empty():
    codes = SparseLoCo2().compress_one(kept(16)).parts[0]
    assert codes.unique().tolist() == [1, 3]


def test_behind_topk_it_loses_0_113_of_the_norm_where_signmag2_loses_0_063():
    value = kept(256)
    errors = [m.decompress_one(m.compress_one(value)) - value for m in (SparseLoCo2(), SignMag2())]
    shares = [float(error.norm() / value.norm()) for error in errors]
    assert shares == [pytest.approx(0.113, abs=0.001), pytest.approx(0.063, abs=0.001)]


def test_chunks_of_small_values_lose_nearly_everything_beside_chunks_of_large_ones():
    value = kept(10)
    value[5:] *= 0.01
    lost = {m: m.decompress_one(m.compress_one(value))[5:] - value[5:] for m in (SparseLoCo2(), SignMag2())}
    shares = {method: float(rest.norm() / value[5:].norm()) for method, rest in lost.items()}
    assert shares[SparseLoCo2()] > 0.9
    assert shares[SignMag2()] < 0.07


def test_equal_values_and_a_single_one_arrive_exactly():
    for tensor in (torch.full((50,), 0.25), torch.tensor([-3.5])):
        assert torch.equal(SparseLoCo2().decompress_one(SparseLoCo2().compress_one(tensor)), tensor)
