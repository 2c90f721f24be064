import itertools

import pytest
import torch

from decentral.compressors import Payload, SignMag2, TopK
from decentral.errors import PayloadError


def sent(tensor: torch.Tensor) -> torch.Tensor:
    return SignMag2().decompress(SignMag2().compress(tensor))


def top_64_of_4096(rows: int = 256) -> torch.Tensor:
    gaussian = torch.randn(rows, 4096, generator=torch.Generator().manual_seed(0))
    return gaussian.gather(1, gaussian.abs().topk(64, dim=1).indices)


def test_the_relative_error_on_gaussian_top_64_of_4096_is_at_most_008():
    kept = top_64_of_4096()
    assert float((kept - sent(kept)).norm() / kept.norm()) <= 0.08


def test_behind_topk_it_costs_14_bits_and_two_levels_per_chunk():
    chain = TopK(k=64, chunk=4096) >> SignMag2()
    assert [spec.nbytes for spec in chain.layout((4096,))] == [96, 16, 4]


def test_chunks_of_different_size_have_their_own_levels():
    """With one scale per tensor, all values of a small chunk would vanish."""
    tensor = torch.randn(2 * 4096, generator=torch.Generator().manual_seed(0))
    tensor[4096:] *= 1e-6
    kept = TopK().decompress(TopK().compress(tensor))[4096:]
    arrived = (TopK() >> SignMag2()).decompress((TopK() >> SignMag2()).compress(tensor))[4096:]
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
        assert float(((row - decoded) ** 2).sum()) <= best * 1.01 + 1e-5  # levels are rounded to 8 bits


def test_a_row_of_two_magnitudes_is_exact():
    row = torch.tensor([[1.0, -4.0, 4.0, -1.0, 1.0]])
    assert torch.equal(sent(row), row)


def test_one_value_and_equal_values_are_exact():
    for tensor in (torch.tensor(-1.5), torch.full((5,), 0.75), torch.tensor([[2.0], [-3.0]])):
        assert torch.equal(sent(tensor), tensor)


def test_tiny_rows_keep_their_precision():
    """float16 levels would have lost these: it has no 1e-9."""
    kept = top_64_of_4096(4) * 1e-9
    assert float((kept - sent(kept)).norm() / kept.norm()) <= 0.08


def test_golden_bytes():
    """These bytes are the wire format; a change needs a new frame version."""
    codes, levels = SignMag2().compress(torch.tensor([[1.0, -4.0, 4.0, -1.0, 1.0]])).parts
    assert bytes(codes.tolist()).hex() == "9c00"  # 00 11 01 10 | 00, first in the lowest bits
    assert levels.view(torch.int16).tolist() == [[0x3F80, 0x4080]]


@pytest.mark.parametrize(
    "levels", [*itertools.product([float("nan")], [1.0]), (1.0, float("inf")), (-1.0, 1.0), (2.0, 1.0)]
)
def test_levels_out_of_order_or_range_are_refused(levels):
    payload = SignMag2().compress(torch.randn(1, 8, generator=torch.Generator().manual_seed(0)))
    bad = torch.tensor([levels], dtype=torch.bfloat16)
    with pytest.raises(PayloadError, match="0 <= small <= large"):
        SignMag2().decompress(Payload(payload.shape, (payload.parts[0], bad)))


def test_dirty_bits_after_the_last_code_are_refused():
    payload = SignMag2().compress(torch.ones(1, 5))
    dirty = payload.parts[0].clone()
    dirty[-1] |= 0x80
    with pytest.raises(PayloadError, match="bits after the last code"):
        SignMag2().decompress(Payload(payload.shape, (dirty, payload.parts[1])))
