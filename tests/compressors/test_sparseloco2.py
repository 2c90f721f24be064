import math

import pytest
import torch

from decentral.compressors import Payload, SignMag2, SparseLoCo2, parse_compressor
from decentral.errors import PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


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
    payload = SparseLoCo2().compress(value)
    code, decoded = reference(value)
    assert torch.equal(payload.parts[0].long(), code)
    assert torch.allclose(SparseLoCo2().decompress(payload).flatten().double(), decoded, rtol=0, atol=1e-6)


def test_behind_topk_two_of_four_bins_are_empty():
    codes = SparseLoCo2().compress(kept(16)).parts[0]
    assert codes.unique().tolist() == [1, 3]


def test_behind_topk_it_loses_0_113_of_the_norm_where_signmag2_loses_0_063():
    value = kept(256)
    errors = [m.decompress(m.compress(value)) - value for m in (SparseLoCo2(), SignMag2())]
    shares = [float(error.norm() / value.norm()) for error in errors]
    assert shares == [pytest.approx(0.113, abs=0.001), pytest.approx(0.063, abs=0.001)]


def test_chunks_of_small_values_lose_nearly_everything_beside_chunks_of_large_ones():
    value = kept(10)
    value[5:] *= 0.01
    lost = {m: m.decompress(m.compress(value))[5:] - value[5:] for m in (SparseLoCo2(), SignMag2())}
    shares = {method: float(rest.norm() / value[5:].norm()) for method, rest in lost.items()}
    assert shares[SparseLoCo2()] > 0.9
    assert shares[SignMag2()] < 0.07


def test_it_chains_behind_topk_with_one_grid_for_all_chunks_of_a_region():
    layout = parse_compressor("topk(k=64, chunk=4096) >> sparseloco2").layout((128, 128))
    assert [(spec.name, spec.shape) for spec in layout] == [("index", (4, 64)), ("codes", (256,)), ("levels", (4,))]


def test_golden_bytes():
    """These parts are the wire format; a change needs a new frame version."""
    codes, levels = SparseLoCo2().compress(torch.tensor([-9.0, -1.0, 1.0, 2.0, 7.0])).parts
    assert codes.tolist() == [1, 2, 2, 2, 3]
    assert levels.tolist() == [0.0, -9.0, 0.6666666865348816, 7.0]


def test_equal_values_and_a_single_one_arrive_exactly():
    for tensor in (torch.full((50,), 0.25), torch.tensor([-3.5])):
        assert torch.equal(SparseLoCo2().decompress(SparseLoCo2().compress(tensor)), tensor)


@pytest.mark.parametrize("level", [float("inf"), float("nan")])
def test_a_level_that_is_not_finite_is_refused(level):
    parts = (torch.zeros(4, dtype=torch.uint8), torch.tensor([0.0, 0.0, 0.0, level]))
    with pytest.raises(PayloadError, match="every level must be finite"):
        SparseLoCo2().decompress(Payload((4,), parts))


def test_a_code_beyond_2_bits_is_refused():
    parts = (torch.tensor([0, 4], dtype=torch.uint8), torch.zeros(4))
    with pytest.raises(PayloadError, match="codes must be below 4"):
        SparseLoCo2().decompress(Payload((2,), parts))
