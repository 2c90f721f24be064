"""How tensors are cut into chunks, and what is largest in each, by the processor's way and by any device's."""

import pytest
import torch

from decentral.compressors.chunks import as_matrix, cut, largest, largest_by_torch, paste, regions

SHAPES = [(), (1,), (5,), (16,), (17,), (4, 4), (5, 7), (8, 9), (1, 33), (33, 1), (2, 3, 5), (0,), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_chunks_hold_every_value_once_and_go_back_to_their_places(shape):
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    matrix, again = as_matrix(tensor), torch.full_like(as_matrix(tensor), -1)
    seen = []
    for region in regions(shape, 16):
        chunks = cut(matrix, region)
        assert chunks.shape == (region.num_chunks, region.length)
        assert region.length <= 16
        paste(again, region, chunks)
        seen += chunks.flatten().tolist()
    assert sorted(seen) == tensor.flatten().tolist()
    assert torch.equal(again, matrix)


def test_a_chunk_of_a_matrix_is_a_square_tile():
    matrix = torch.arange(64.0).reshape(8, 8)
    first, second, *_ = cut(matrix, regions((8, 8), 16)[0])
    assert first.tolist() == matrix[:4, :4].flatten().tolist()
    assert second.tolist() == matrix[:4, 4:].flatten().tolist()


def test_a_tensor_has_at_most_four_regions_whatever_its_size():
    assert [(r.num_chunks, r.height, r.width) for r in regions((67, 131), 4096)] == [
        (2, 64, 64),
        (1, 64, 3),
        (2, 3, 64),
        (1, 3, 3),
    ]
    assert [(r.num_chunks, r.length) for r in regions((10, 1000, 1000), 4096)] == [(2441, 4096), (1, 1664)]


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class TestTheProcessorsWayAndTheDevices:
    """`largest` is for the processor, `largest_by_torch` for any device; both run here on the processor."""

    @pytest.mark.parametrize("shape", [(4096,), (67, 131), (256, 192), (1, 5000)])
    @pytest.mark.parametrize("k", [1, 64, 300])
    def test_keep_the_same_entries(self, shape, k):
        matrix = as_matrix(gaussian(*shape) * torch.logspace(-20, 20, shape[-1]))
        for region in regions(shape, 4096):
            kept = min(k, region.length)
            for ours, theirs in zip(
                largest(matrix, region, kept), largest_by_torch(cut(matrix, region), kept), strict=True
            ):
                assert torch.equal(ours, theirs)

    def test_a_threshold_that_falls_or_rises_from_chunk_to_chunk_is_found(self):
        for scales in (torch.logspace(0, -30, 20), torch.logspace(-30, 0, 20), torch.tensor([1.0, 0.0] * 10)):
            matrix = (gaussian(20, 4096) * scales[:, None]).reshape(1, -1)
            (region,) = regions((20 * 4096,), 4096)
            index, _ = largest(matrix, region, 64)
            best = cut(matrix, region).abs().sort(dim=1, descending=True).values[:, 63]
            assert torch.equal(cut(matrix, region).abs().gather(1, index.long()).amin(1), best)

    def test_of_equal_magnitudes_the_first_are_kept(self):
        matrix = torch.tensor([[1.0, -2.0, 2.0, 1.0, -1.0, 2.0, 0.0, 1.0]])
        (region,) = regions((8,), 4096)
        assert largest(matrix, region, 5)[0].tolist() == [[0, 1, 2, 3, 5]]
