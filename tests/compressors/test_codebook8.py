import pytest
import torch

from decentral.compressors import Codebook8
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
