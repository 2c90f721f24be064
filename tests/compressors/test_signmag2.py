"""What sign and magnitude bit lose."""

import math

import pytest
import torch

from decentral.compressors import Payload, SignMag2, TopK, signmag2


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
    means = signmag2.best_means_anywhere(value)
    assert torch.allclose(signmag2.best_means(value), means, rtol=1e-12)
    halfway = means.float().mean(1)
    codes = signmag2.code_rows(value, halfway)
    assert torch.equal(codes, (value.abs() > halfway[:, None]).to(torch.uint8) + 2 * (value < 0))
    sent = SignMag2().compress_one(value).parts
    parts = (sent[0].view(shape), *sent[1:], (len(value),))
    decoded, broken = signmag2.decode_rows(*parts)
    assert not broken
    assert torch.equal(decoded, signmag2.decode_rows_anywhere(*parts))
    assert torch.equal(torch.signbit(decoded), (sent[0].view(shape) & 2).bool())
