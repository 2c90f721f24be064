import hashlib

import pytest
import torch

from decentral.compressors import DCT, Payload, SignMag2, TopK, accumulate, compress_with_debt
from decentral.errors import ConfigError, PayloadError


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def sent(compressor, tensor: torch.Tensor) -> torch.Tensor:
    return compressor.decompress(compressor.compress(tensor))


def smooth(rows: int, columns: int) -> torch.Tensor:
    y, x = torch.arange(rows)[:, None] / rows, torch.arange(columns) / columns
    return torch.cos(3 * y + 5 * x) + torch.cos(9 * x) * y


@pytest.mark.parametrize("shape", [(64, 64), (67, 131), (4097,), (1, 5000), (3, 5, 7, 11), (8191,), (127, 61), ()])
def test_keeping_every_coefficient_is_the_identity_up_to_rounding(shape):
    tensor = gaussian(*shape)
    lost = sent(DCT(k=4096, chunk=4096), tensor) - tensor
    assert float(lost.norm()) <= 1e-4 * float(tensor.norm())


@pytest.mark.parametrize(("shape", "halvings"), [((192, 128), 6), ((8192,), 3), ((2, 3, 4096), 3)])
def test_what_is_lost_is_the_energy_of_the_coefficients_that_were_dropped(shape, halvings):
    tensor = gaussian(*shape)
    whole, kept = (
        float((DCT(k=k).compress(tensor).parts[1].double() * 2**halvings).square().sum()) for k in (4096, 64)
    )
    assert whole == pytest.approx(float(tensor.square().sum()), rel=1e-4)
    assert float((sent(DCT(k=64), tensor) - tensor).square().sum()) == pytest.approx(whole - kept, rel=1e-4)


def test_a_smooth_matrix_needs_far_fewer_coefficients_than_entries():
    tensor = smooth(192, 256)
    assert float((sent(DCT(k=16), tensor) - tensor).norm()) < 0.03 * float(tensor.norm())
    assert float((sent(TopK(k=16), tensor) - tensor).norm()) > 0.9 * float(tensor.norm())


def test_a_prime_matrix_costs_what_its_neighbours_do():
    nbytes = [sum(spec.nbytes for spec in DCT().layout(shape)) for shape in [(1021, 1021), (1024, 1024)]]
    assert nbytes[0] == pytest.approx(nbytes[1], rel=0.04)


def test_golden_bits():
    """What peers decode must never change; a change needs a new frame version."""
    index, coef = torch.tensor([[0, 1, 70, 4095]], dtype=torch.int16), torch.tensor([1.0, -0.3, 0.01, 3e-5])
    tile = DCT(k=4, chunk=4096).decompress(Payload((64, 64), (index, coef)))
    assert float(tile[0, 0]) == GOLDEN_FIRST
    assert hashlib.sha256(tile.numpy().tobytes()).hexdigest() == GOLDEN_TILE


GOLDEN_FIRST = 0.595703125
GOLDEN_TILE = "70c0bd5a13b4a51b8aa2adf84ea961c490255b6b48b11b8a7929241dd3962604"


def test_with_beta_1_what_was_sent_and_what_is_owed_add_up_exactly():
    """Decoded values lie on a grid, so that subtracting them from values of few bits loses nothing."""
    whole = torch.randint(-500, 501, (67, 131), generator=torch.Generator().manual_seed(0)).float()
    payload, debt = compress_with_debt(DCT() >> SignMag2(), whole, None, 1.0)
    decoded = (DCT() >> SignMag2()).decompress(payload)
    assert torch.equal(debt.double() + decoded.double(), whole.double())


def test_adding_is_what_decompressing_and_adding_is():
    payload, total = DCT().compress(gaussian(67, 131)), gaussian(131, 67).t()
    wanted = total + DCT().decompress(payload) * -0.3
    accumulate(DCT(), total, payload, -0.3)
    assert torch.equal(total, wanted)


def test_slabs_of_tiles_do_not_know_of_each_other():
    tensor = gaussian(64 * 3, 64 * 50)
    whole = sent(DCT(), tensor)
    assert torch.equal(sent(DCT(), tensor[64:128, 640:704]), whole[64:128, 640:704])


@pytest.mark.parametrize("index", [[1, 1], [2, 1], [-1, 3], [0, 128]])
def test_indices_that_do_not_rise_inside_their_chunk_are_refused_and_nothing_is_added(index):
    total = torch.zeros(128)
    bad = Payload((128,), (torch.tensor([index], dtype=torch.int16), torch.ones(2)))
    with pytest.raises(PayloadError, match="rise strictly"):
        accumulate(DCT(), total, bad)
    assert not total.any()


def test_coefficients_beyond_the_range_decode_to_its_end():
    top = torch.finfo(torch.float32).max
    payload = Payload((64, 64), (torch.arange(64, dtype=torch.int16)[None], torch.full((64,), top)))
    assert float(DCT().decompress(payload).abs().max()) == top


@pytest.mark.parametrize(("k", "chunk"), [(0, 4096), (4097, 4096), (1, 0), (64, 4000), (64, 16384), (17, 16)])
def test_a_k_or_chunk_that_cannot_be_meant_is_refused(k, chunk):
    with pytest.raises(ConfigError, match=r"dct\(k=.*, chunk=.*\): "):
        DCT(k=k, chunk=chunk)
