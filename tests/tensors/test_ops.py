"""One pass gives the bits that torch's operations give one after another, whatever the threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.optimizers import carry
from decentral.tensors.ops import (
    Places,
    as_rows,
    carry_and_copy,
    carry_over,
    carry_rows,
    copy_and_difference,
    copy_and_norm,
    difference,
    difference_and_norm,
    divide,
    is_finite,
    is_rising,
    minus_quotient,
    minus_times,
    philox_4x32,
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
    assert same(carry_over(live, contributed, anchor), wanted)


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
    assert torch.equal(carry_over(left, left, right), right)
    total = torch.ones(6, dtype=torch.float64)
    assert divide(total, 4.0)
    assert torch.equal(total, torch.full((6,), 0.25, dtype=torch.float64))


# ---- test finite ----
#
# NaN and Inf are found wherever they are, in every dtype and layout; nothing else is taken for them.

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_largest_the_smallest_and_nothing_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.smallest_normal, 0.0, -0.0], dtype=dtype)
    assert is_finite(extremes)
    assert is_finite(extremes[:0])
    assert is_finite(extremes.new_tensor(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_value_that_is_not_finite_is_found_at_any_place_of_any_layout(dtype: torch.dtype, bad: float) -> None:
    for place in (0, 7, 37, 69):
        tensor = torch.zeros(7, 10, dtype=dtype)
        tensor.view(-1)[place] = bad
        assert not is_finite(tensor)
        assert not is_finite(tensor.T)
    assert is_finite(tensor[:6])


# ---- test live rows ----
#
# What changes a live model where it lies gives the very bits of the same steps one by one.

SIZES_of_live_rows = (7, 64, 1000, 1)  # shorter and longer than what goes side by side, with a rest and without
LONG = (700_000, 130, 500_000)  # enough for threads


def vectors(sizes: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """A live model, what was sent of it, and an anchor; nothing was learnt in a third of the places."""
    generator = torch.Generator().manual_seed(0)
    sent_N, anchor_N = torch.randn(sum(sizes), generator=generator), torch.randn(sum(sizes), generator=generator)
    learnt_N = torch.randn(sum(sizes), generator=generator) * 1e-3
    learnt_N[::3] = 0.0
    rows = [piece.clone() for piece in torch.split_with_sizes(sent_N + learnt_N, list(sizes))]
    return rows, sent_N, anchor_N


@pytest.fixture(params=[1, 2])
def threads_of_live_rows(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [SIZES_of_live_rows, LONG])
def test_carrying_on_in_place_is_bit_for_bit_the_equation(sizes, threads):
    rows, sent_N, anchor_N = vectors(sizes)
    live_N = torch.cat(rows)
    same = live_N == sent_N
    carry_rows(rows, sent_N, anchor_N)
    assert torch.equal(torch.cat(rows), torch.where(same, anchor_N, anchor_N + (live_N - sent_N)))
    assert torch.equal(torch.cat(rows)[::3], anchor_N[::3]), "nothing was learnt there"


@pytest.mark.parametrize("sizes", [SIZES_of_live_rows, LONG])
def test_a_copy_made_on_the_way_is_what_a_second_pass_would_copy(sizes, threads):
    rows, sent_N, anchor_N = vectors(sizes)
    wanted_N = carry(torch.cat(rows), sent_N, anchor_N)
    copy_N, norm = carry_and_copy(rows, sent_N, anchor_N)
    assert torch.equal(torch.cat(rows), wanted_N)
    assert torch.equal(copy_N, wanted_N)
    assert norm == pytest.approx(float((anchor_N - wanted_N).double().norm()), rel=1e-12)


@pytest.mark.parametrize("sizes", [SIZES_of_live_rows, LONG])
def test_copies_and_differences_are_those_of_torch(sizes, threads):
    rows, base_N, _ = vectors(sizes)
    live_N = torch.cat(rows)
    copy_N, made_N, norm = copy_and_difference(rows, base_N)
    assert torch.equal(copy_N, live_N)
    assert torch.equal(made_N, base_N - live_N)
    assert norm == pytest.approx(float((base_N - live_N).double().norm()), rel=1e-12)
    assert torch.equal(copy_and_norm(rows, base_N)[0], live_N)
    assert copy_and_norm(rows, base_N)[1] == norm


@pytest.mark.parametrize("place", [0, 70, 1070])  # in a rest, among those side by side, in the last row
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_makes_the_norm_so(place, wrong):
    rows, base_N, _ = vectors(SIZES_of_live_rows)
    piece = next(row for row, end in zip(rows, (7, 71, 1071, 1072), strict=True) if place < end)
    piece[-1] = wrong
    for norm in (copy_and_norm(rows, base_N)[1], copy_and_difference(rows, base_N)[2]):
        assert not torch.isfinite(torch.tensor(norm))


def test_a_graph_hears_that_what_it_needs_was_changed():
    weight = torch.nn.Parameter(torch.ones(8))
    loss = (weight * weight).sum()
    rows = as_rows([weight])
    assert rows is not None
    carry_rows(rows, torch.zeros(8), torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_does_not_lie_as_peers_send_it_has_no_rows():
    whole = torch.zeros(4, 4)
    assert as_rows([whole.t()[:2]]) is None, "not in a row"
    assert as_rows([whole.double()]) is None
    assert as_rows([whole.bfloat16()]) is None
    assert as_rows([whole, whole.view(-1)[3:7]]) is None, "one lies in the other"
    rows = as_rows([whole[:2], whole[2:]])
    assert rows is not None
    rows[1][0] = 1.0
    assert whole[2, 0] == 1.0


# ---- test very many small tensors ----


def small_ones(count: int = 300) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(n % 3, 4)) for n in range(count)]


def flat_of(tensors: list[torch.nn.Parameter]) -> torch.Tensor:
    return torch.cat([one.detach().reshape(-1) for one in tensors])


def test_many_small_tensors_are_read_and_written_as_one():
    tensors = small_ones()
    places = Places.of(tensors)
    assert places is not None
    assert torch.equal(places.read(), flat_of(tensors))
    wanted_N = torch.randn(places.read().numel())
    places.write(wanted_N)
    assert torch.equal(flat_of(tensors), wanted_N)


def test_a_graph_hears_that_one_of_many_was_written():
    tensors = small_ones()
    loss = (tensors[1] * tensors[1]).sum()
    places = Places.of(tensors)
    assert places is not None
    places.write(places.read())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_places_do_not_hold_once_a_tensor_has_other_memory_or_is_shorter():
    for change in (lambda one: one.data.clone(), lambda one: one.data[:1]):
        tensors = small_ones()
        places = Places.of(tensors)
        assert places is not None
        assert places.hold
        tensors[5].data = change(tensors[5])
        assert not places.hold


def test_few_tensors_large_ones_and_other_kinds_of_memory_have_no_places():
    assert Places.of(small_ones(5)) is None
    assert Places.of([torch.zeros(100, 100)] * 300) is None, "torch copies large ones as fast"
    assert Places.of([*small_ones(), torch.zeros(4, 2).t()]) is None, "not in a row"
    assert Places.of([*small_ones(), torch.zeros(4, dtype=torch.bfloat16)]) is None


# ---- test philox ----
#
# Philox4x32-10 against the known answers of Random123 (kat_vectors, philox4x32 10).

FULL = 0xFFFFFFFF
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize(("counter", "key", "wanted"), KNOWN.values(), ids=list(KNOWN))
def test_random123_knows_the_answer(counter: tuple[int, ...], key: tuple[int, int], wanted: tuple[int, ...]):
    made = philox_4x32(np.array(counter, dtype=np.uint32)[:, None], key)
    assert tuple(int(word) for word in made[:, 0]) == wanted


def test_a_block_does_not_depend_on_those_made_with_it():
    counters = np.arange(40, dtype=np.uint32).reshape(4, 10)
    many = philox_4x32(counters, (3, 4))
    assert all((philox_4x32(counters[:, [n]], (3, 4)) == many[:, [n]]).all() for n in range(10))


def test_half_of_all_bits_are_set():
    made = philox_4x32(np.stack([np.arange(1 << 12, dtype=np.uint32)] * 4), (1, 2))
    assert abs(np.unpackbits(made.view(np.uint8)).mean() - 0.5) < 4 / (4 * made.nbytes * 8) ** 0.5  # 4 deviations


LIMIT = 10


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
@pytest.mark.parametrize(
    ("rows", "rises"),
    [
        ([[0, 1, 9], [3, 4, 5]], True),
        ([[0], [9]], True),
        ([[0, 1, 10], [3, 4, 5]], False),
        ([[3, 4, 5], [-1, 4, 5]], False),
        ([[3, 4, 5], [4, 4, 5]], False),
        ([[3, 4, 5], [3, 5, 4]], False),
        ([[10]], False),
        ([[-1]], False),
    ],
)
def test_rows_rise_strictly_within_bounds(rows: list[list[int]], rises: bool, dtype: torch.dtype):
    assert is_rising(torch.tensor(rows, dtype=dtype), LIMIT) is rises


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_nothing_rises(shape: tuple[int, int]):
    assert is_rising(torch.empty(shape, dtype=torch.int16), LIMIT)
