"""SignMag2 and SparseLoCo2: what two bits lose, and the published formula."""

import math

import pytest
import torch

from decentral.compressors import Payload, SignMag2, SparseLoCo2, TopK, two_bits


def sent(tensor: torch.Tensor) -> torch.Tensor:
    return SignMag2().decompress_one(SignMag2().compress_one(tensor))


def top_64_of_4096(rows: int = 256) -> torch.Tensor:
    gaussian = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0))
    return gaussian.gather(1, gaussian.abs().topk(64, dim=1).indices)


def test_the_relative_error_on_gaussian_top_64_of_4096_is_at_most_008():
    kept = top_64_of_4096()
    assert float((kept - sent(kept)).norm() / kept.norm()) <= 0.08


def test_chunks_of_different_size_have_their_own_levels():
    """With one scale per tensor, all values of a small chunk would vanish."""
    tensor = torch.randn(2 * 4096, generator=torch.Generator().manual_seed(0))
    tensor[4096:] *= 1e-4
    kept = TopK().decompress_one(TopK().compress_one(tensor))[4096:]
    arrived = (TopK() >> SignMag2()).decompress_one((TopK() >> SignMag2()).compress_one(tensor))[4096:]
    assert float((kept - arrived).norm() / kept.norm()) <= 0.08


def test_the_split_is_the_best_of_all_splits():
    size = torch.rand(40, 7, generator=torch.Generator().manual_seed(0))
    for row, decoded in zip(size, sent(size), strict=True):
        ordered = row.sort().values
        best = min(
            float(
                ((ordered[:cut] - ordered[:cut].mean()) ** 2).sum()
                + ((ordered[cut:] - ordered[cut:].mean()) ** 2).sum()
            )
            for cut in range(1, 7)
        )
        rounding = 0.022 * float(row.norm())  # a level is a sixteenth of a power of two
        assert float((row - decoded).norm()) <= best**0.5 + rounding


def test_one_power_of_two_and_equal_ones_are_exact():
    for tensor in (torch.tensor(-2.0), torch.full((5,), 0.25), torch.tensor([[2.0], [-4.0]])):
        assert torch.equal(sent(tensor), tensor)


def test_tiny_rows_keep_their_precision():
    """float16 levels would have lost these: it has no 1e-9."""
    kept = top_64_of_4096(4) * 1e-9
    assert float((kept - sent(kept)).norm() / kept.norm()) <= 0.08


def test_a_level_is_off_by_at_most_a_thirty_second_of_a_power_of_two():
    for value in torch.logspace(-20, 20, 997):
        assert abs(math.log2(float(sent(value)) / float(value))) <= 1 / 32 + 0.006  # and 8 significant bits


def test_rows_far_below_the_largest_are_left_to_error_feedback():
    rows = torch.tensor([[1.0, 1.0], [2.0**-14, 2.0**-14], [2.0**-17, 2.0**-17]])
    assert sent(rows).tolist() == [[1.0, 1.0], [2.0**-14, 2.0**-14], [0.0, 0.0]]


@pytest.mark.parametrize("peak", [0, 227])
def test_the_outermost_levels_are_finite_and_normal(peak):
    payload = SignMag2().compress_one(torch.tensor([[1.0, 1.9]]))
    for level in (1, 255):
        parts = (payload.parts[0], *(torch.tensor([n], dtype=torch.uint8) for n in (peak, level, 0)))
        found = SignMag2().decompress_one(Payload((1, 2), parts)).abs()
        assert torch.isfinite(found).all()
        assert (found >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("shape", [(40, 64), (7, 1), (3, 256), (3, 257), (1, 4096), (0, 64)])
@pytest.mark.parametrize("steps", [1e6, 2], ids=["distinct", "many-equal-and-zero"])
def test_the_processors_way_is_that_of_any_device(shape, steps):
    value = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * steps).round() / steps
    means = two_bits.best_means_anywhere(value)
    assert torch.allclose(two_bits.best_means(value), means, rtol=1e-12)
    halfway, sizes = means.float().mean(1), means.float()
    codes = two_bits.code_rows(value, halfway)
    assert torch.equal(codes, (value.abs() > halfway[:, None]).to(torch.uint8) + 2 * (value < 0))
    small_or_large = sizes.gather(1, (codes & 1).long())
    assert torch.equal(two_bits.decode_rows(codes, sizes), torch.where(value < 0, -small_or_large, small_or_large))


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
