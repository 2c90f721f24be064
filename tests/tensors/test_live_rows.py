"""What changes a live model where it lies gives the very bits of the same steps one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.optimizers import carry
from decentral.tensors.ops import as_rows, carry_and_copy, carry_rows, copy_and_difference, copy_and_norm

SIZES = (7, 64, 1000, 1)  # shorter and longer than what goes side by side, with a rest and without
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
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [SIZES, LONG])
def test_carrying_on_in_place_is_bit_for_bit_the_equation(sizes, threads):
    rows, sent_N, anchor_N = vectors(sizes)
    live_N = torch.cat(rows)
    same = live_N == sent_N
    carry_rows(rows, sent_N, anchor_N)
    assert torch.equal(torch.cat(rows), torch.where(same, anchor_N, anchor_N + (live_N - sent_N)))
    assert torch.equal(torch.cat(rows)[::3], anchor_N[::3]), "nothing was learnt there"


@pytest.mark.parametrize("sizes", [SIZES, LONG])
def test_a_copy_made_on_the_way_is_what_a_second_pass_would_copy(sizes, threads):
    rows, sent_N, anchor_N = vectors(sizes)
    wanted_N = carry(torch.cat(rows), sent_N, anchor_N)
    copy_N, norm = carry_and_copy(rows, sent_N, anchor_N)
    assert torch.equal(torch.cat(rows), wanted_N)
    assert torch.equal(copy_N, wanted_N)
    assert norm == pytest.approx(float((anchor_N - wanted_N).double().norm()), rel=1e-12)


@pytest.mark.parametrize("sizes", [SIZES, LONG])
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
    rows, base_N, _ = vectors(SIZES)
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
