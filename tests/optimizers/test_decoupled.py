"""Decoupled DiLoCo's mean: the direction of the mean of directions, and the mean of the lengths."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.aggregation.gram import ranges
from decentral.optimizers.decoupled import DecoupledDiLoCo, radial_directional
from decentral.optimizers.diloco import DiLoCo
from tests.kit.stepping import step_of

NUMEL = 300


def rows(peers: int, seed: int = 0, numel: int = NUMEL) -> Tensor:
    return torch.randn(peers, numel, generator=torch.Generator().manual_seed(seed))


def wanted(rows_KN: Tensor, weights: Sequence[float]) -> Tensor:
    """The paper's equation in float64."""
    rows_KN, weight_K = rows_KN.double(), torch.tensor(weights, dtype=torch.float64)
    length_K = rows_KN.norm(dim=1)
    units_KN = torch.where(length_K[:, None] > 0, rows_KN / length_K[:, None], 0.0)
    toward_N = (weight_K[:, None] * units_KN).sum(0)
    return ((weight_K * length_K).sum() / weight_K.sum() * toward_N / toward_N.norm()).float()


@pytest.mark.parametrize("weights", [[1.0], [1.0] * 4, [1.0, 16.0, 0.0625, 3.0], [1.0, 0.0, 2.0]])
def test_it_is_the_papers_equation(weights: list[float]):
    rows_KN = rows(len(weights)) * torch.arange(1.0, 1 + len(weights))[:, None]
    torch.testing.assert_close(radial_directional(rows_KN, weights), wanted(rows_KN, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("peers", [1, 2, 4, 16])
def test_its_length_is_the_weighted_mean_length_whatever_the_number_of_peers(peers: int):
    """So that the outer learning rate need not follow it; the plain mean of 16 is a quarter as long."""
    rows_KN, weights = rows(peers) * 3.0, [1.0 + n for n in range(peers)]
    lengths = rows_KN.double().norm(dim=1)
    mean = sum(w * float(length) for w, length in zip(weights, lengths, strict=True)) / sum(weights)
    assert math.isclose(float(radial_directional(rows_KN, weights).double().norm()), mean, rel_tol=1e-5)
    if peers == 16:
        assert float(rows_KN.mean(0).norm()) < 0.3 * mean


def test_equal_changes_are_their_mean():
    rows_KN = rows(1).expand(5, -1).contiguous()
    torch.testing.assert_close(radial_directional(rows_KN, [1.0] * 5), rows_KN[0], rtol=1e-6, atol=1e-7)


def test_a_zero_delta_keeps_its_weight_in_the_mean_length_and_has_no_direction():
    one_N = rows(1)[0]
    merged = radial_directional(torch.stack([one_N, torch.zeros(NUMEL)]), [1.0, 3.0])
    torch.testing.assert_close(merged, one_N / 4, rtol=1e-6, atol=1e-7)


def test_where_directions_cancel_it_is_the_weighted_mean():
    one_N = rows(1)[0]
    merged = radial_directional(torch.stack([one_N, -3 * one_N]), [1.0, 1.0])
    torch.testing.assert_close(merged, -one_N, rtol=1e-6, atol=1e-7)


def test_all_zero_deltas_move_nothing():
    assert not radial_directional(torch.zeros(3, NUMEL), [1.0, 2.0, 3.0]).any()


def test_the_order_of_equal_weights_matters_only_in_rounding_and_values_near_the_largest_stay_finite():
    """A peer may send anything finite; an outer step that raises would end the run of all."""
    rows_KN = torch.full((3, NUMEL), 3e38)
    rows_KN[1] *= -1
    for weights in ([1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [16.0, 0.0625, 1.0]):
        assert torch.isfinite(radial_directional(rows_KN, weights)).all()


def test_each_tensor_has_a_direction_and_a_length_of_its_own_and_embeddings_are_plainly_averaged():
    names, shapes = ("model.embed_tokens.weight", "layer.weight", "layer.bias"), ((5, 4), (3, 4), (3,))
    told = tuple(Contributor(bytes([n]) * 32, tokens=100, steps=10) for n in range(3))
    method, rows_KN = DecoupledDiLoCo(lr=1.0, momentum=0.0), rows(3, numel=35)
    anchor, info = torch.zeros(35), RoundInfo(0, told, (1.0, 1.0, 1.0), shapes, names)
    after, _ = method.outer_step(anchor, {"change": rows_KN}, method.init(anchor), info)
    torch.testing.assert_close(-after[:20], rows_KN[:, :20].mean(0), rtol=1e-6, atol=1e-6)
    for place in (slice(20, 32), slice(32, 35)):
        torch.testing.assert_close(-after[place], wanted(rows_KN[:, place], [1.0] * 3), rtol=1e-5, atol=1e-6)
    assert [(name, place.start, place.stop) for name, place in ranges(info, 35)] == [
        ("model.embed_tokens.weight", 0, 20), ("layer.weight", 20, 32), ("layer.bias", 32, 35)
    ]  # fmt: skip


def test_weights_are_tokens_squared_over_steps_within_bounds():
    told = [
        Contributor(bytes([n]) * 32, tokens, steps)
        for n, (tokens, steps) in enumerate([(100, 10), (50, 10), (200, 10)])
    ]
    method = DecoupledDiLoCo()
    assert method.weights(told, [1.0] * 3, {}) == [1.0, 0.25, 4.0]
    assert method.weights(told, [1.0, 0.5, 2.0], {}) == [1.0, 0.25, 4.0], "tokens count once"
    liar = Contributor(bytes(32), tokens=2**63, steps=0)
    assert method.weights([*told[:2], liar], [1.0] * 3, {}) == [1.0, 0.25, 4.0]
    silent = [Contributor(bytes([n]) * 32) for n in range(2)]
    assert method.weights(silent, [1.0] * 2, {}) == [1.0, 1.0]


def test_with_a_plain_mean_it_is_diloco_bit_for_bit():
    plain, diloco = DecoupledDiLoCo(mean="plain"), DiLoCo(lr=0.7)
    first = second = rows(1)[0]
    one, two = plain.init(first), diloco.init(second)
    for number in range(5):
        change_N = rows(1, seed=number + 1)[0]
        first, one = step_of(plain, first, [change_N, change_N], one, number)
        second, two = step_of(diloco, second, [change_N, change_N], two, number)
        assert torch.equal(first, second)
        assert torch.equal(one["momentum"], two["momentum"])


def test_a_round_waits_for_a_quorum_and_a_grace_window():
    method = DecoupledDiLoCo(wait_for=1, grace=2.5, staleness=4)
    assert (method.quorum.peers, method.quorum.grace, method.quorum.staleness) == (1, 2.5, 4)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"mean": "median"}, 'mean must be "radial" or "plain"'),
        ({"wait_for": 0}, "wait_for must be at least 1"),
        ({"grace": -1.0}, "grace must be in"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(hyper: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        DecoupledDiLoCo(**hyper)  # type: ignore[arg-type]
