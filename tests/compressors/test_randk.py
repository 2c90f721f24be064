import pytest
import torch

from decentral.compressors import Payload, RandK, accumulate
from decentral.compressors.random import hash32


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def places(compressor: RandK, tensor: torch.Tensor) -> torch.Tensor:
    return compressor.decompress_one(compressor.compress_one(tensor)).flatten().nonzero().flatten()


@pytest.mark.parametrize("shape", [(4096,), (4097,), (67, 131), (3, 5, 7, 11), (1,), ()])
def test_every_chunk_keeps_its_share_exactly(shape):
    tensor = gaussian(*shape)
    kept = RandK().decompress_one(RandK().compress_one(tensor))
    assert torch.equal(kept[kept != 0], tensor[kept != 0])
    for given, sent in zip(tensor.flatten().split(4096), kept.flatten().split(4096), strict=True):
        assert int((sent != 0).sum()) == max(1, round(given.numel() / 64))


def test_golden_places():
    """Peers that drew others would average other entries; a change needs a new frame version."""
    nonce = torch.arange(8, dtype=torch.uint8)
    payload = Payload((100,), (nonce, torch.ones(5), torch.ones(3)))
    kept = RandK(k=5, chunk=64, seed=9).decompress_one(payload)
    assert kept.nonzero().flatten().tolist() == GOLDEN_PLACES
    assert hash32(torch.tensor([0, 1, 2, 2**32 - 1])).tolist() == GOLDEN_HASHES


GOLDEN_PLACES = [7, 22, 24, 37, 57, 75, 90, 95]
GOLDEN_HASHES = [0, 1753845952, 3507691905, 1734902346]


def test_another_seed_and_another_tensor_draw_other_places():
    tensor = gaussian(40960)
    here = places(RandK(), tensor)
    nudged = tensor.clone()
    nudged[17] = torch.nextafter(nudged[17], torch.tensor(9.0))
    assert not torch.equal(here, places(RandK(seed=1), tensor))
    assert not torch.equal(here, places(RandK(), nudged))
    assert torch.equal(here, places(RandK(), tensor.clone()))


def test_a_tensor_less_what_was_sent_draws_other_places_even_if_all_its_values_are_powers_of_two():
    """Else the debt of a constant would meet the same k places for ever."""
    debt = torch.ones(4096)
    for _ in range(200):
        accumulate(RandK(), debt, RandK().compress_one(debt), -1.0)
    assert (debt == 0).float().mean() > 0.9  # 1 - (1 - 1/64)**200 = 0.957


@pytest.mark.parametrize(("length", "k"), [(64, 4), (100, 7), (13, 13), (97, 96)])
def test_every_entry_is_drawn_equally_often(length, k):
    chunks = 20_000
    count = RandK(k=k, chunk=length).decompress_one(RandK(k=k, chunk=length).compress_one(torch.ones(chunks, length)))
    share = k / length
    assert int(count.sum()) == chunks * k
    assert (count.view(chunks, length).mean(0) - share).abs().max() <= 4.5 * (share * (1 - share) / chunks) ** 0.5


def test_the_mean_error_is_the_contraction_of_rand_k():
    tensor = (gaussian(100) * torch.logspace(-2, 2, 100)).repeat(20_000, 1)
    compressor = RandK(k=10, chunk=100)
    lost = (compressor.decompress_one(compressor.compress_one(tensor)) - tensor).double()
    assert float(lost.square().sum() / tensor.double().square().sum()) == pytest.approx(0.9, abs=0.003)


def test_chunks_do_not_draw_alike():
    kept = RandK().decompress_one(RandK().compress_one(torch.ones(64 * 4096))).view(64, 4096)
    assert len({tuple(row.nonzero().flatten().tolist()) for row in kept}) == 64
    assert int((kept.sum(0) > 0).sum()) > 2300  # 4096 * (1 - (1 - 1/64)**64) = 2601


def test_any_nonce_is_one():
    payload = RandK().compress_one(gaussian(5000))
    for byte in (0, 255):
        kept = RandK().decompress_one(Payload((5000,), (torch.full((8,), byte, dtype=torch.uint8), *payload.parts[1:])))
        assert int((kept != 0).sum()) == 64 + 14
