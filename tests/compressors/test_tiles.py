import pytest
import torch

from decentral.compressors.topk import as_matrix, cut, paste, regions

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
