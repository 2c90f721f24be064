"""What crosses a boundary between stages, there and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.pipeline.boundary import (
    BFloat16,
    Exact,
    Int8,
    Mapl,
    Rounding,
    StiefelMomentum,
    Subspace,
    crossing,
    draw_basis,
    onto,
    polar,
)

D, K, V = 24, 6, 32


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def off_orthonormal(matrix_DK: Tensor) -> float:
    eye = torch.eye(matrix_DK.shape[1], dtype=torch.float64)
    return float((matrix_DK.double().T @ matrix_DK.double() - eye).abs().max())


# ---- rounding ----


@pytest.mark.parametrize("rounding", [Exact(), BFloat16(), Int8(), Int8(block=7)], ids=repr)
@pytest.mark.parametrize("shape", [(5,), (3, 1), (2, 3, 64), (2, 130), (0, 64)], ids=str)
def test_what_comes_has_the_shape_of_what_was_sent(rounding: Rounding, shape: tuple[int, ...]) -> None:
    values = draw(*shape)
    came = rounding.unpack(rounding.pack(values))
    assert came.shape == values.shape
    assert came.dtype == torch.float32
    torch.testing.assert_close(came, values, rtol=1e-2, atol=2e-2)


def test_a_block_is_off_by_half_a_step_of_its_largest_value_at_most() -> None:
    values = draw(50, 200) * torch.logspace(-30, 30, 50).unsqueeze(1)
    rounding = Int8(block=64)
    _, scale = rounding.pack(values)
    off = (rounding.unpack(rounding.pack(values)) - values).abs()
    allowed = 0.5001 * scale.float().repeat_interleave(64, dim=-1)[:, :200]
    assert bool((off <= allowed).all())
    largest = torch.nn.functional.pad(values, (0, 56)).view(50, 4, 64).abs().amax(-1)
    assert bool((scale.float() <= largest / 127 * 1.01).all()), "a scale is no larger than it need be"


def test_one_large_value_costs_its_own_block_alone() -> None:
    values = torch.full((128,), 0.01)
    values[0] = 1000.0
    came = Int8(block=64).unpack(Int8(block=64).pack(values))
    torch.testing.assert_close(came[64:], values[64:], rtol=5e-3, atol=0.0)
    assert came[0].item() == pytest.approx(1000.0, rel=5e-3)


def test_zeros_stay_zeros() -> None:
    assert not Int8().unpack(Int8().pack(torch.zeros(3, 70))).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_not_made_finite_on_the_way(bad: float) -> None:
    values = draw(130)
    values[5] = bad
    came = Int8(block=64).unpack(Int8(block=64).pack(values))
    assert not bool(came[:64].isfinite().all())
    assert bool(came[64:].isfinite().all())


def test_int8_sends_a_byte_a_value_and_two_a_block() -> None:
    sent = Int8(block=64).pack(draw(10, 128))
    assert sum(one.numel() * one.element_size() for one in sent) == 10 * (128 + 2 * 2)


def test_a_block_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        Int8(block=0)


@pytest.mark.parametrize("rounding", [Exact(), BFloat16(), Int8(block=8)], ids=repr)
def test_a_gradient_comes_back_over_the_same_wire(rounding: Rounding) -> None:
    values, weight = draw(4, 20).requires_grad_(), draw(4, 20, seed=1)
    came = crossing(values, rounding)
    assert torch.equal(came, rounding.unpack(rounding.pack(values.detach())))
    (came * weight).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, rounding.unpack(rounding.pack(weight)))


def test_values_of_another_dtype_come_in_it() -> None:
    values = draw(4, 20).bfloat16().requires_grad_()
    came = crossing(values, Int8())
    came.float().sum().backward()
    assert came.dtype == torch.bfloat16
    assert values.grad is not None
    assert values.grad.dtype == torch.bfloat16


# ---- a fixed subspace ----


def test_a_basis_is_orthonormal_and_of_its_seed() -> None:
    basis = draw_basis(D, K, seeded(3))
    assert off_orthonormal(basis) < 1e-6
    assert torch.equal(basis, draw_basis(D, K, seeded(3)))
    assert not torch.equal(basis, draw_basis(D, K, seeded(4)))


@pytest.mark.parametrize("kept", [0, -1, D + 1])
def test_a_basis_of_more_than_the_width_or_of_nothing_is_refused(kept: int) -> None:
    with pytest.raises(ConfigError, match=f"take 1 to {D}"):
        draw_basis(D, kept, seeded())


def test_what_stages_add_in_the_span_crosses_without_loss_beside_any_embedding() -> None:
    basis, embedding = draw_basis(D, K, seeded()), draw(V, D, seed=1)
    subspace, tokens = Subspace(basis), torch.randint(V, (2, 5), generator=seeded())
    added = onto(basis, draw(2, 5, D, seed=2))
    states, outside = embedding[tokens] + added, subspace.outside(embedding)[tokens]
    sent = subspace.narrow(states, outside)
    assert sent.shape == (2, 5, K)
    torch.testing.assert_close(subspace.widen(sent, outside), states, rtol=0.0, atol=1e-5)


def test_what_is_added_out_of_the_span_does_not_cross() -> None:
    basis = draw_basis(D, K, seeded())
    subspace, nothing = Subspace(basis), torch.zeros(5, D)
    states = draw(5, D)
    out = states - onto(basis, states)
    torch.testing.assert_close(subspace.narrow(out, nothing), torch.zeros(5, K), rtol=0.0, atol=1e-5)


def test_a_square_subspace_loses_nothing() -> None:
    subspace, states, outside = Subspace(draw_basis(D, D, seeded())), draw(7, D), draw(7, D, seed=1)
    torch.testing.assert_close(subspace.widen(subspace.narrow(states, outside), outside), states, rtol=0.0, atol=1e-5)


def test_the_gradient_that_crosses_back_has_as_many_values_as_what_crossed() -> None:
    basis = draw_basis(D, K, seeded())
    subspace, states = Subspace(basis), draw(5, D).requires_grad_()
    nothing, weight = torch.zeros(5, D), draw(5, D, seed=1)
    sent = subspace.narrow(states, nothing)
    sent.retain_grad()
    (subspace.widen(sent, nothing) * weight).sum().backward()
    assert sent.grad is not None
    assert states.grad is not None
    torch.testing.assert_close(sent.grad, weight @ basis)
    torch.testing.assert_close(states.grad, onto(basis, weight))


def test_an_embedding_gets_no_gradient_through_what_both_sides_have() -> None:
    embedding = draw(V, D).requires_grad_()
    assert not Subspace(draw_basis(D, K, seeded())).outside(embedding).requires_grad


def test_the_part_in_a_span_is_its_own_part_in_it() -> None:
    basis, values = draw_basis(D, K, seeded()), draw(9, D)
    once = onto(basis, values)
    torch.testing.assert_close(onto(basis, once), once, rtol=0.0, atol=1e-5)
    torch.testing.assert_close((values - once) @ basis, torch.zeros(9, K), rtol=0.0, atol=1e-5)


# ---- a subspace that is learnt ----


def test_polar_is_the_nearest_orthonormal_matrix() -> None:
    matrix = draw(D, K)
    nearest = polar(matrix)
    assert off_orthonormal(nearest) < 1e-6
    least = (matrix - nearest).norm()
    for seed in range(20):
        other = polar(nearest + 0.1 * draw(D, K, seed=seed))
        assert (matrix - other).norm() >= least


def test_a_learnt_basis_is_orthonormal_to_a_millionth_after_a_thousand_steps() -> None:
    basis = torch.nn.Parameter(draw_basis(D, K, seeded()))
    optimizer, random = StiefelMomentum(basis, lr=0.05), seeded(1)
    for _ in range(1000):
        basis.grad = 10 * torch.randn(D, K, generator=random)
        optimizer.step()
    assert off_orthonormal(basis.detach()) < 1e-6


def test_a_learnt_basis_finds_the_directions_in_which_states_lie() -> None:
    hidden = draw_basis(D, K, seeded(7))
    states = draw(200, K, seed=1) @ hidden.T
    basis = torch.nn.Parameter(draw_basis(D, K, seeded(8)))
    optimizer = StiefelMomentum(basis, lr=0.02)

    def lost() -> Tensor:
        return (states - states @ basis @ basis.T).square().sum() / states.square().sum()

    before = float(lost().detach())
    for _ in range(400):
        lost().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert before > 0.5
    assert float(lost().detach()) < 0.01


def test_a_basis_stays_where_no_gradient_came_or_one_of_zeros() -> None:
    basis = torch.nn.Parameter(draw_basis(D, K, seeded()))
    optimizer, before = StiefelMomentum(basis, lr=0.1), basis.detach().clone()
    optimizer.step()
    basis.grad = torch.zeros(D, K)
    optimizer.step()
    assert torch.equal(basis.detach(), before)
    assert basis.grad is None


def made_mapl(embedding: Tensor) -> Mapl:
    return Mapl(draw_basis(D, K, seeded(1)), draw_basis(D, K, seeded(2)).T, embedding)


def test_tables_carry_what_of_the_embedding_they_can_reach() -> None:
    mixing = draw_basis(D, K, seeded(2)).T
    embedding, tokens = draw(V, K, seed=5) @ mixing, torch.arange(V)  # all of it lies there
    mapl = made_mapl(embedding)
    came = mapl.widen(mapl.narrow(embedding[tokens], tokens), tokens)
    torch.testing.assert_close(came.detach(), embedding, rtol=0.0, atol=1e-5)


def test_every_part_of_a_learnt_boundary_gets_a_gradient() -> None:
    mapl, tokens = made_mapl(draw(V, D)), torch.randint(V, (2, 5), generator=seeded())
    states = draw(2, 5, D, seed=3).requires_grad_()
    sent = mapl.narrow(states, tokens)
    assert sent.shape == (2, 5, K)
    mapl.widen(crossing(sent, Int8()), tokens).square().sum().backward()
    for part in (states, mapl.basis_DK, mapl.before_VK, mapl.after_VK):
        assert part.grad is not None
        assert bool(part.grad.any())
    untouched = [token for token in range(V) if token not in tokens]
    assert not mapl.after_VK.grad[untouched].any()  # type: ignore[index]
