"""Which values topk keeps of each chunk."""

import pytest
import torch

from decentral.compressors import Payload, TopK, accumulate
from decentral.compressors.chunks import as_matrix, cut, paste, regions
from decentral.errors import PayloadError

TILE = TopK(k=64, chunk=4096)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def poisoned(payload: Payload, index: list[int]) -> Payload:
    """The payload with other indices in its last region."""
    place = len(payload.parts) // 2 - 1
    bad = torch.tensor([index], dtype=torch.int16)
    return Payload(payload.shape, (*payload.parts[:place], bad, *payload.parts[place + 1 :]))


@pytest.mark.parametrize("shape", [(4096,), (4097,), (64, 64), (67, 131), (3, 5, 7, 11)])
def test_what_is_kept_is_exact_and_no_smaller_than_what_is_dropped_in_its_chunk(shape):
    tensor = gaussian(*shape)
    kept = TILE.decompress_one(TILE.compress_one(tensor))
    for region in regions(shape, 4096):
        given, sent = cut(as_matrix(tensor), region), cut(as_matrix(kept), region)
        assert torch.equal(sent[sent != 0], given[sent != 0])
        smallest_kept = torch.where(sent != 0, sent.abs(), torch.inf).amin(dim=1)
        largest_dropped = torch.where(sent == 0, given.abs(), 0.0).amax(dim=1)
        assert (smallest_kept >= largest_dropped).all()
        assert ((sent != 0).sum(dim=1) == max(1, round(region.length * 64 / 4096))).all()


@pytest.mark.parametrize("shape", [(130, 135), (64, 70), (9001,), (3,)])
@pytest.mark.parametrize("spread", [0.0, 3.0], ids=["alike", "each-chunk-of-another-size"])
def test_of_equal_magnitudes_the_first_are_kept(shape, spread):
    tensor = (gaussian(*shape) * 4).round()
    for n, region in enumerate(regions(shape, 4096)):
        size_C = 10.0 ** (spread * gaussian(region.num_chunks)).round() * 2.0**-n
        paste(as_matrix(tensor), region, cut(as_matrix(tensor), region) * size_C[:, None])
    index, values = TILE.select_one(tensor)
    for region, index_Ck, value_Ck in zip(regions(shape, 4096), index, values, strict=True):
        chunk_CL = cut(as_matrix(tensor), region)
        order_CL = chunk_CL.abs().sort(dim=1, descending=True, stable=True).indices
        first_Ck = order_CL[:, : index_Ck.shape[1]].sort(dim=1).values
        assert torch.equal(index_Ck.long(), first_Ck)
        assert torch.equal(value_Ck, chunk_CL.gather(1, first_Ck))


def test_a_matrix_is_cut_into_tiles_and_not_into_runs():
    matrix = torch.zeros(128, 128)
    matrix[:64, :64] = 1 + torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    kept = TILE.decompress_one(TILE.compress_one(matrix + 1e-3))
    assert [int((kept[top : top + 64, left : left + 64] != 0).sum()) for top in (0, 64) for left in (0, 64)] == [64] * 4


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((1,), 1), ((31,), 1), ((96,), 2), ((4097,), 65), ((65, 65), 64 + 1 + 1 + 1), ((), 1), ((0,), 0)],
)
def test_a_short_chunk_keeps_its_share_and_at_least_one(shape, kept):
    assert sum(spec.nbytes // 4 for spec in TILE.layout(shape) if spec.name == "values") == kept


class TestIndicesOfAPeer:
    def test_an_index_legal_inside_is_refused_at_the_border(self):
        compressor = TopK(k=64, chunk=4096)
        payload = compressor.compress_one(gaussian(64, 65))  # one tile of 64x64, one of 64x1
        with pytest.raises(PayloadError, match=r"within \[0, 64\)"):
            compressor.decompress_one(poisoned(payload, [64]))

    def test_nothing_is_added_when_a_later_region_is_bad(self):
        compressor = TopK(k=64, chunk=4096)
        payload, total = compressor.compress_one(gaussian(64, 65)), torch.zeros(64, 65)
        with pytest.raises(PayloadError):
            accumulate(compressor, total, poisoned(payload, [64]))
        assert not total.any()


def test_the_processors_way_and_the_devices_add_the_same_bits():
    topk = TopK(k=5, chunk=4096)
    selected = topk.select([gaussian(67, 131)])
    (tiles,), (scattered,) = topk.place([(67, 131)], selected), topk.place_at_once([(67, 131)], selected)
    one, other = gaussian(67, 131).flatten() * 3, gaussian(67, 131).flatten() * 3
    tiles.add(0, one, -0.3)
    scattered.add(0, other, -0.3)
    assert torch.equal(one, other)
