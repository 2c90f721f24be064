"""One pass gives the bits that torch's operations give one after another, whatever the threads."""

import pytest
import torch

from decentral.tensors.ops import (
    carried,
    difference,
    difference_and_norm,
    divide,
    minus_quotient,
    minus_times,
    with_momentum,
)

SIZES = [0, 1, 4095, 4097, (1 << 20) + 13]


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def values(numel: int, seed: int) -> torch.Tensor:
    made = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return made * torch.logspace(-38, 36, max(numel, 1))[:numel]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", SIZES)
def test_a_difference_and_a_product_are_rounded_as_torch_does(numel):
    left, right = values(numel, 1), values(numel, 2)
    assert same(difference(left, right), left - right)
    assert same(minus_times(left, right, 0.7), left - right * 0.7)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", SIZES)
def test_a_difference_comes_with_its_norm(numel):
    left, right = values(numel, 1), values(numel, 2)
    made, norm = difference_and_norm(left, right)
    assert same(made, left - right)
    assert norm == pytest.approx(float((left - right).double().norm()), rel=1e-12)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("place", [0, 4096, (1 << 20) + 12])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_norm_is_finite_if_and_only_if_all_of_a_difference_is(bad, place):
    left, right = torch.full(((1 << 20) + 13,), 3e38), torch.zeros((1 << 20) + 13)
    assert difference_and_norm(left, right)[1] < float("inf")  # float64 holds all squares of float32
    left[place] = bad
    assert not difference_and_norm(left, right)[1] < float("inf")
    assert not difference_and_norm(left.double(), right.double())[1] < float("inf")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_with_momentum_is_rounded_operation_by_operation(numel, nesterov):
    anchor, change, momentum = (values(numel, seed) for seed in (1, 2, 3))
    buffer = torch.mul(momentum, 0.9)
    buffer += change
    way = torch.mul(buffer, 0.9) if nesterov else buffer.clone()
    way += change if nesterov else 0.0
    way *= 0.7
    after, kept = with_momentum(anchor, change, momentum, (0.7, 0.9), nesterov=nesterov)
    assert same(kept, buffer)
    assert same(after, anchor - way)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", SIZES)
def test_what_is_carried_is_the_anchor_where_nothing_moved(numel):
    live, anchor = values(numel, 1), values(numel, 3)
    contributed = torch.where(torch.arange(numel) % 3 == 0, live, values(numel, 2))
    wanted = torch.where(live == contributed, anchor, anchor + (live - contributed))
    assert same(carried(live, contributed, anchor), wanted)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("numel", SIZES)
def test_a_total_is_divided_in_place_and_looked_at(numel):
    total = values(numel, 1)
    wanted = total / torch.full_like(total[:1], 3.0)
    assert divide(total, 3.0)
    assert same(total, wanted)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 4096, (1 << 20) + 12])
def test_one_value_beyond_float32_is_found(bad, place):
    total = torch.ones((1 << 20) + 13)
    total[place] = bad
    assert not divide(total, 0.5)


@pytest.mark.parametrize("numel", SIZES)
def test_a_quotient_is_taken_off_with_each_step_rounded_and_leaves_zeros(numel):
    left, total, made = values(numel, 1), values(numel, 2), torch.empty(numel)
    total[::3] = 0.0
    wanted = left - total / torch.full_like(total[:1], 3.0) * 0.7
    assert minus_quotient(left, total, made, 3.0, 0.7)
    assert same(made, wanted)
    assert not total.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("place", [0, 4096, (1 << 20) + 12])
def test_one_quotient_beyond_float32_is_found(bad, place):
    left, total = torch.ones((1 << 20) + 13), torch.ones((1 << 20) + 13)
    total[place] = bad
    assert not minus_quotient(left, total, torch.empty_like(left), 0.5, 1e-30)


def test_other_dtypes_shapes_and_layouts_are_left_to_torch():
    left, right = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(difference(left, right), left - right)
    assert torch.equal(difference(left.float().t(), right.float().t()), left.float().t() - right.float().t())
    assert torch.equal(minus_times(left, right, 0.5), left - right * 0.5)
    assert torch.equal(carried(left, left, right), right)
    total = torch.ones(6, dtype=torch.float64)
    assert divide(total, 4.0)
    assert torch.equal(total, torch.full((6,), 0.25, dtype=torch.float64))
