"""The cosine transform of whole numbers: the same bits everywhere, and what a few coefficients lose."""

import hashlib
import math

import pytest
import torch

from decentral.compressors import DCT, Payload, SignMag2, TopK
from decentral.compressors.dct import basis, from_spectrum, halvings, to_spectrum
from tests.kit.owing import compress_with_debt

CPU = torch.device("cpu")
ALL = range(1, 65)


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_basis_is_orthonormal_and_is_the_dct_of_type_2():
    for n in ALL:
        ours = basis(n, CPU) / 2**24
        position, frequency = torch.arange(n, dtype=torch.float64), torch.arange(n, dtype=torch.float64)[:, None]
        formula = (2 / n) ** 0.5 * torch.cos(math.pi * (2 * position + 1) * frequency / (2 * n))
        formula[0] /= 2**0.5
        assert (ours - formula).abs().max() <= 2.0**-25 + 1e-12
        assert (ours @ ours.T - torch.eye(n)).abs().max() < 64 * 2.0**-25


def test_golden_basis():
    """Peers with another basis would decode other bits; a change needs a new frame version."""
    numbers = [int(number) for n in ALL for row in basis(n, CPU).tolist() for number in row]
    assert numbers[:5] == [2**24, 11863283, 11863283, 11863283, -11863283]
    assert hashlib.sha256(repr(numbers).encode()).hexdigest() == GOLDEN_BASIS


GOLDEN_BASIS = "f9c79799ad657e65795bc3958fb098d4fd4a44842b01403da6511756b630f06e"


def test_no_sum_of_products_reaches_what_float64_holds_exactly():
    for n in ALL:
        longest = max(float(basis(n, CPU).abs().sum(0).max()), float(basis(n, CPU).abs().sum(1).max()))
        first = 2**22 * longest
        second = (first / 2**24 + 1) * longest
        assert max(first, second) < 2**53


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 64, 1), (1, 1, 64), (5, 3, 61), (1, 1, 1)])
@pytest.mark.parametrize("both", [True, False])
def test_the_product_is_that_of_python_integers(shape: tuple[int, int, int], both: bool):
    """So no order of summing, and no fused multiply-add, can give anything else."""
    tile = gaussian(*shape)
    for n in range(shape[0]):
        wanted = _by_integers(tile[n], both)
        assert torch.equal(from_spectrum(tile, both)[n], wanted)
        assert torch.equal(from_spectrum(tile[n : n + 1], both)[0], wanted)


def _by_integers(coef_HW: torch.Tensor, both: bool) -> torch.Tensor:
    height, width = coef_HW.shape
    exponent = math.frexp(float(coef_HW.abs().max()))[1]
    whole = [[round(math.ldexp(float(c), 22 - exponent)) for c in row] for row in coef_HW]
    left, right = ([[int(b) for b in row] for row in basis(n, CPU)] for n in (height, width))
    if both:
        rows = [[sum(left[u][y] * whole[u][x] for u in range(height)) for x in range(width)] for y in range(height)]
        whole = [[_rounded(number, 24) for number in row] for row in rows]
    fine = [[sum(whole[y][u] * right[u][x] for u in range(width)) for x in range(width)] for y in range(height)]
    scale = exponent - 16 + halvings(height, width, both)
    return torch.tensor([[math.ldexp(_rounded(number, 30), scale) for number in row] for row in fine])


def _rounded(number: int, shift: int) -> int:
    """``number / 2**shift`` to the nearest, to even at halves."""
    low, high = number & ((1 << shift) - 1), number >> shift
    half = 1 << (shift - 1)
    return high + (low > half or (low == half and high % 2 == 1))


@pytest.mark.parametrize("shape", [(7, 64, 64), (2, 13, 64), (1, 3, 5), (4, 1, 1)])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e20, 1e37])
def test_forth_and_back_is_the_same_but_for_the_grid(shape: tuple[int, int, int], both: bool, scale: float):
    tile = gaussian(*shape) * scale
    coef = to_spectrum(tile, both)
    back = from_spectrum(coef, both)
    step = coef.abs().amax((1, 2), keepdim=True).double() * 2.0 ** halvings(*shape[1:], both) * 2.0**-15
    assert ((back.double() - tile.double()).abs() <= step * 0.75 + 2.0**-141).all()  # coefficients have denormals, too


def test_no_coefficient_is_larger_than_the_largest_value():
    for tile in (torch.full((1, 64, 64), torch.finfo(torch.float32).max), gaussian(3, 5, 7), torch.ones(1, 63, 1)):
        assert (to_spectrum(tile, True).abs().amax((1, 2)) <= tile.abs().amax((1, 2)) * (1 + 1e-6)).all()


def test_energy_is_kept_but_for_the_halvings():
    tile = gaussian(5, 64, 64)
    assert float((to_spectrum(tile, True) * 2**6).norm() / tile.norm()) == pytest.approx(1, abs=1e-6)


def test_the_largest_floats_stay_finite_both_ways():
    for tile in (torch.full((2, 64, 64), torch.finfo(torch.float32).max), -torch.full((1, 1, 64), 3.4e38)):
        for both in (True, False):
            assert torch.isfinite(to_spectrum(tile, both)).all()
            assert torch.isfinite(from_spectrum(tile, both)).all()


def sent(compressor, tensor: torch.Tensor) -> torch.Tensor:
    return compressor.decompress_one(compressor.compress_one(tensor))


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
        float((DCT(k=k).compress_one(tensor).parts[1].double() * 2**halvings).square().sum()) for k in (4096, 64)
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
    tile = DCT(k=4, chunk=4096).decompress_one(Payload((64, 64), (index, coef)))
    assert float(tile[0, 0]) == GOLDEN_FIRST
    assert hashlib.sha256(tile.numpy().tobytes()).hexdigest() == GOLDEN_TILE


GOLDEN_FIRST = 0.595703125
GOLDEN_TILE = "70c0bd5a13b4a51b8aa2adf84ea961c490255b6b48b11b8a7929241dd3962604"


def test_with_beta_1_what_was_sent_and_what_is_owed_add_up_exactly():
    """Decoded values lie on a grid, so that subtracting them from values of few bits loses nothing."""
    whole = torch.randint(-500, 501, (67, 131), generator=torch.Generator().manual_seed(0)).float()
    payload, debt = compress_with_debt(DCT() >> SignMag2(), whole, None, 1.0)
    decoded = (DCT() >> SignMag2()).decompress_one(payload)
    assert torch.equal(debt.double() + decoded.double(), whole.double())


def test_slabs_of_tiles_do_not_know_of_each_other():
    tensor = gaussian(64 * 3, 64 * 50)
    whole = sent(DCT(), tensor)
    assert torch.equal(sent(DCT(), tensor[64:128, 640:704]), whole[64:128, 640:704])


def test_coefficients_beyond_the_range_decode_to_its_end():
    top = torch.finfo(torch.float32).max
    payload = Payload((64, 64), (torch.arange(64, dtype=torch.int16)[None], torch.full((64,), top)))
    assert float(DCT().decompress_one(payload).abs().max()) == top
