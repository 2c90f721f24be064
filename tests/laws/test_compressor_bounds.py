"""Every method keeps the bound that it prints, on the edges of float32 too, and loses what it says on Gaussian data.

What is asked of a method is what it says: a test is made for the methods that it can say something about.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decentral.compressors import Compressor, describe_compressors, parse_compressor
from tests.kit.tables import COMPRESSORS
from tests.laws.bounds import ANY, BOUNDS, Bound, blocks, name_of, peak
from tests.laws.edges import each_edge

# Shape suffixes: N = values, G = groups, L = values in a group.

DRAWS = 2000
TOLERANCE = 1 + 1e-6
FINE = 2.0**-16  # sizes up to 127 are float32: a chance is known to 2**-18

# Of the unbiased methods: the variance of each value, and of all as a share of the squared norm, at most.
VARIANCE: dict[str, Callable[[Compressor, Tensor], Tensor]] = {
    "natural": lambda compressor, x: x.square() / 8,
    "qsgd": lambda compressor, x: peak(compressor, x) / compressor.levels * 129 / 128 * x.abs(),
}
SHARE: dict[str, Callable[[Compressor], float]] = {
    "natural": lambda compressor: 1 / 8,
    "qsgd": lambda compressor: (
        1.02 * min(compressor.block / (4 * compressor.levels**2), compressor.block**0.5 / compressor.levels)
    ),
}

# What is lost of a million Gaussian values, as a share of the norm; documented, and held to 2 %.
GAUSSIAN = {
    "none": 0.0,
    "fp16": 0.000208,
    "bf16": 0.00166,
    "int8(block=4096)": 0.00870,
    "fp8(block=256)": 0.0261,
    "codebook8": 0.0160,
    "nf4(block=64)": 0.0921,
    "int4(block=256)": 0.1266,
    "int4(block=64)": 0.1079,
    "e3m0(block=256)": 0.1945,
    "qsgd(levels=127, block=256, seed=0)": 0.00990,
    "qsgd(levels=7, block=256, seed=0)": 0.1794,
    "natural(seed=0)": 0.2854,
    "sparseloco2": 0.4226,
    "sign(block=1024)": 0.6026,
}


def _bound(spelling: str) -> Bound:
    return BOUNDS.get(name_of(spelling), ANY)


def _name(compressor: Compressor) -> str:
    return name_of(str(compressor))


bounded_per_value = pytest.mark.methods(lambda spelling: _bound(spelling).per_value)
bounded_in_all = pytest.mark.methods(lambda spelling: "qsgd" not in spelling)  # of which one draw may lose more
unbiased = pytest.mark.methods(lambda spelling: name_of(spelling) in VARIANCE)


def _lost(compressor: Compressor, tensor: Tensor) -> Tensor:
    return compressor.decompress_one(compressor.compress_one(tensor)).double() - tensor.double()


@bounded_per_value
def test_no_value_is_off_by_more_than_its_bound(compressor: Compressor):
    per_value = _bound(str(compressor)).per_value
    for name, tensor in each_edge():
        assert (_lost(compressor, tensor).abs() <= per_value(compressor, tensor.double()) * TOLERANCE).all(), name


@bounded_in_all
def test_no_group_of_values_loses_more_than_its_bound(compressor: Compressor):
    """Those without a bound of their own lose no more than there was."""
    bound = _bound(str(compressor))
    for name, tensor in each_edge():
        whole, lost = (bound.groups(compressor, x) for x in (tensor.double(), _lost(compressor, tensor)))
        for whole_GL, lost_GL in zip(whole, lost, strict=True):
            slack_G = (TOLERANCE - 1) * whole_GL.square().sum(1)
            assert (lost_GL.square().sum(1) <= bound.most(compressor, whole_GL, tensor.double()) + slack_G).all(), name


@unbiased
def test_an_unbiased_method_goes_up_with_a_chance_that_makes_it_right_on_average(compressor: Compressor):
    """On the edges too: between low and high, with (value - low) / (high - low)."""
    for name, tensor in each_edge():
        down, up = _both_sides(compressor, tensor)
        chance = torch.where(up > down, -down / (up - down), 0.5)
        below, above = (_rounded(compressor, tensor, chance + nudge) for nudge in (-FINE, FINE))
        promised = _promised(compressor, tensor.double())
        assert torch.equal(below[promised & (chance > FINE)], up[promised & (chance > FINE)]), name
        assert torch.equal(above[promised & (chance < 1 - FINE)], down[promised & (chance < 1 - FINE)]), name


@unbiased
def test_an_unbiased_method_varies_by_no_more_than_it_says(compressor: Compressor):
    """On the edges too: right on average, a value has a variance of (value - low) * (high - value)."""
    share, groups = SHARE[_name(compressor)], _bound(str(compressor)).groups or blocks
    for name, tensor in each_edge():
        down, up = _both_sides(compressor, tensor)
        promised = _promised(compressor, tensor.double())
        for found, whole in zip(
            *(groups(compressor, x * promised) for x in (-down * up, tensor.double())), strict=True
        ):
            assert (found.sum(1) <= share(compressor) * whole.square().sum(1) * TOLERANCE).all(), name


def _both_sides(compressor: Compressor, tensor: Tensor) -> tuple[Tensor, Tensor]:
    return _rounded(compressor, tensor, torch.ones_like(tensor)), _rounded(compressor, tensor, torch.zeros_like(tensor))


def _rounded(compressor: Compressor, tensor: Tensor, draw: Tensor) -> Tensor:
    """How far from zero, beyond the value itself, each value is rounded by its number in [0, 1)."""
    draw_N = draw.flatten().clamp(0, 1 - 2.0**-24).float()
    return (
        compressor.decompress_one(compressor.compress_with(tensor, draw_N)).double() - tensor.double()
    ) * tensor.sign()


def _promised(compressor: Compressor, x: Tensor) -> Tensor:
    """Whether the printed bound says of a value that it is right on average."""
    if _name(compressor) == "natural":
        return x.abs() <= 2.0**127
    return (peak(compressor, x) >= compressor.levels * 2.0**-126) & (peak(compressor, x) <= 3.37e38)


@unbiased
def test_an_unbiased_method_is_right_on_average_and_within_its_variance(compressor: Compressor):
    """2,000 draws from a generator: the mean is off by 5 standard deviations of such a mean at most, on every value."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(251, generator=generator)
    tensor += tensor.sign()  # what is rounded up once in 2,000 draws has no bell curve
    drawn = torch.empty(DRAWS, 251, dtype=torch.float64)
    for row in drawn:
        row[:] = compressor.decompress_one(compressor.compress_with(tensor, torch.rand(251, generator=generator)))
    wide = tensor.double()
    variance = VARIANCE[_name(compressor)](compressor, wide)
    assert ((drawn.mean(0) - wide).abs() <= 5 * (variance / DRAWS).sqrt()).all()
    in_all = float((drawn - wide).square().sum(1).mean())
    assert 0 < in_all <= min(float(variance.sum()), SHARE[_name(compressor)](compressor) * float(wide.square().sum()))


@unbiased
def test_an_unbiased_method_is_unbiased_over_tensors_when_it_draws_for_itself(compressor: Compressor):
    """2,000 tensors, of which the first value is always the same: its mean is right, though nobody gave a generator."""
    tensor = torch.randn(DRAWS, 251, generator=torch.Generator().manual_seed(0))
    tensor[:, 0] = 0.3
    tensor[:, 1] = 4.0  # of the scale to which the first value is rounded
    first = torch.stack([compressor.decompress_one(compressor.compress_one(row))[0] for row in tensor]).double()
    variance = VARIANCE[_name(compressor)](compressor, tensor[0].double().clamp(max=4.5))[0]
    assert abs(float(first.mean()) - 0.3) <= 5 * float(variance / DRAWS) ** 0.5
    assert len(first.unique()) > 1


@pytest.mark.parametrize("spelling", GAUSSIAN)
def test_on_gaussian_data_a_method_loses_what_it_documents(spelling: str):
    tensor = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    lost = float(_lost(parse_compressor(spelling), tensor).norm() / tensor.double().norm())
    assert lost == pytest.approx(GAUSSIAN[spelling], rel=0.02)


def test_what_is_printed_is_what_these_laws_check():
    assert {row["name"]: row["bound"] for row in describe_compressors()} == {
        name: bound.printed for name, bound in BOUNDS.items()
    }


def test_every_method_that_prints_a_bound_is_in_the_table_of_all_methods():
    assert set(BOUNDS) <= {name_of(spelling) for spelling in COMPRESSORS}
