import pytest
import torch

from decentral.compressors import Payload, TopK
from decentral.compressors.packing import pack12, unpack12
from decentral.compressors.tiles import as_matrix, cut, regions
from decentral.errors import ConfigError, PayloadError

TILE = TopK(k=64, chunk=4096)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def poisoned(payload: Payload, index: list[int]) -> Payload:
    """The payload with other indices."""
    return Payload(payload.shape, (pack12(torch.tensor(index)), *payload.parts[1:]))


@pytest.mark.parametrize("shape", [(4096,), (4097,), (64, 64), (67, 131), (3, 5, 7, 11)])
def test_what_is_kept_is_exact_and_no_smaller_than_what_is_dropped_in_its_chunk(shape):
    tensor = gaussian(*shape)
    kept = TILE.decompress(TILE.compress(tensor))
    for region in regions(shape, 4096):
        given, sent = cut(as_matrix(tensor), region), cut(as_matrix(kept), region)
        assert torch.equal(sent[sent != 0], given[sent != 0])
        smallest_kept = torch.where(sent != 0, sent.abs(), torch.inf).amin(dim=1)
        largest_dropped = torch.where(sent == 0, given.abs(), 0.0).amax(dim=1)
        assert (smallest_kept >= largest_dropped).all()
        assert ((sent != 0).sum(dim=1) == max(1, round(region.length * 64 / 4096))).all()


def test_a_matrix_is_cut_into_tiles_and_not_into_runs():
    matrix = torch.zeros(128, 128)
    matrix[:64, :64] = 1 + torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    kept = TILE.decompress(TILE.compress(matrix + 1e-3))
    assert [int((kept[top : top + 64, left : left + 64] != 0).sum()) for top in (0, 64) for left in (0, 64)] == [64] * 4


def test_each_of_4096_values_sends_14_bits_with_2_bit_values():
    index, values = TILE.layout((4096,))
    assert (index.nbytes, values.nbytes) == (96, 256)


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((1,), 1), ((31,), 1), ((96,), 2), ((4097,), 65), ((65, 65), 64 + 1 + 1 + 1), ((), 1), ((0,), 0)],
)
def test_a_short_chunk_keeps_its_share_and_at_least_one(shape, kept):
    assert sum(spec.nbytes // 4 for spec in TILE.layout(shape)[1:]) == kept


def test_keeping_all_is_the_identity():
    tensor = gaussian(67, 131)
    assert torch.equal(TopK(k=256, chunk=256).decompress(TopK(k=256, chunk=256).compress(tensor)), tensor)


def test_golden_bytes():
    """These bytes are the wire format; a change needs a new frame version."""
    tensor = torch.zeros(16)
    tensor[3], tensor[11], tensor[15] = -2.0, 1.0, 0.5
    index, values = TopK(k=3, chunk=16).compress(tensor).parts
    assert bytes(index.tolist()).hex() == "03b0000f00"  # 003 00b | 00f, low byte first
    assert values.tolist() == [-2.0, 1.0, 0.5]


class TestIndicesOfAPeer:
    @pytest.mark.parametrize(
        "index",
        [[1, 2, 3, 4, 100], [1, 2, 3, 4, 4095], [1, 1, 2, 3, 4], [5, 4, 3, 2, 1], [1, 2, 2, 3, 4], [0, 0, 0, 0, 0]],
        ids=["one past the end", "far outside", "twice", "falling", "twice inside", "all the same"],
    )
    def test_any_other_is_refused(self, index):
        compressor = TopK(k=205, chunk=4096)  # 5 of 100
        payload = compressor.compress(gaussian(100))
        with pytest.raises(PayloadError, match="indices must rise strictly"):
            compressor.decompress(poisoned(payload, index))

    def test_an_index_legal_inside_is_refused_at_the_border(self):
        compressor = TopK(k=64, chunk=4096)
        payload = compressor.compress(gaussian(64, 65))  # one tile of 64x64, one of 64x1
        index = unpack12(payload.parts[0], 65, self)
        index[-1] = 64
        with pytest.raises(PayloadError, match=r"within \[0, 64\)"):
            compressor.decompress(poisoned(payload, index.tolist()))

    def test_a_dirty_last_nibble_is_refused(self):
        payload = TopK(k=1, chunk=4096).compress(gaussian(100))
        dirty = payload.parts[0].clone()
        dirty[-1] |= 0x10
        with pytest.raises(PayloadError, match="bits after the last index"):
            TopK(k=1, chunk=4096).decompress(Payload(payload.shape, (dirty, *payload.parts[1:])))


@pytest.mark.parametrize(
    ("k", "chunk"), [(0, 4096), (-1, 4096), (4097, 4096), (1, 0), (1, -4), (64, 4000), (64, 16384), (17, 16)]
)
def test_a_k_or_chunk_that_cannot_be_meant_is_refused(k, chunk):
    with pytest.raises(ConfigError, match=r"topk\(k=.*, chunk=.*\): "):
        TopK(k=k, chunk=chunk)
