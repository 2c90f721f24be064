import itertools

import pytest
import torch

from decentral.errors import ConfigError, NonFiniteError
from decentral.optimizers import mean_pseudo_gradient
from decentral.optimizers.mean import LEAST, MOST, contribution_weights

PEERS = [bytes([first]) + bytes(31) for first in (9, 200, 3, 77)]


def contributions(weights=(1.0, 1.0, 1.0, 1.0)):
    return [
        (peer, torch.randn(1001, generator=torch.Generator().manual_seed(seed)), weight)
        for seed, (peer, weight) in enumerate(zip(PEERS, weights, strict=True))
    ]


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (3.0, 1.0, 0.5, 12345.0)])
def test_the_order_of_arrival_changes_no_bit(weights):
    results = [mean_pseudo_gradient(order) for order in itertools.permutations(contributions(weights))]
    assert all(torch.equal(result, results[0]) for result in results)


def test_they_are_summed_in_the_order_of_peer_ids():
    by_peer = {peer: gradient for peer, gradient, _ in contributions()}
    total = torch.zeros(1001)
    for peer in sorted(by_peer):
        total = total + by_peer[peer]
    assert torch.equal(mean_pseudo_gradient(contributions()), total / 4)


def test_the_divisor_is_the_weight_of_those_who_are_there():
    three = contributions()[:3]
    expected = torch.stack([gradient for _, gradient, _ in three]).mean(dim=0)
    torch.testing.assert_close(mean_pseudo_gradient(three), expected)


def test_a_zero_contribution_counts_in_the_divisor_when_it_is_summed():
    peers = contributions()[:3]
    with_zero = [*peers, (PEERS[3], torch.zeros(1001), 1.0)]
    torch.testing.assert_close(mean_pseudo_gradient(with_zero), mean_pseudo_gradient(peers) * 3 / 4)


def test_coordinates_that_few_have_sent_are_divided_by_all():
    """Disjoint supports: a mean over those who sent a coordinate would be R times larger."""
    one, two = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 8.0])
    assert mean_pseudo_gradient([(PEERS[0], one, 1.0), (PEERS[1], two, 1.0)]).tolist() == [2.0, 4.0]


def test_weights_weigh():
    one, two = torch.full((3,), 1.0), torch.full((3,), 5.0)
    assert mean_pseudo_gradient([(PEERS[0], one, 3.0), (PEERS[1], two, 1.0)]).tolist() == [2.0] * 3
    assert torch.equal(mean_pseudo_gradient([(PEERS[0], one, 1.0), (PEERS[1], two, 0.0)]), one)


def test_one_contribution_is_its_own_mean_in_a_new_tensor():
    gradient = torch.randn(5, generator=torch.Generator().manual_seed(0))
    mean = mean_pseudo_gradient([(PEERS[0], gradient, 1.0)])
    assert torch.equal(mean, gradient)
    assert mean.data_ptr() != gradient.data_ptr()


def test_the_contributions_are_untouched_and_the_result_is_float32():
    given = contributions()
    assert mean_pseudo_gradient(given).dtype == torch.float32
    assert all(torch.equal(a[1], b[1]) for a, b in zip(given, contributions(), strict=True))


def test_an_empty_fragment_has_an_empty_mean():
    assert mean_pseudo_gradient([(PEERS[0], torch.zeros(0), 1.0)]).shape == (0,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to average"),
        ([(PEERS[0], torch.ones(2), 0.0)], "with a positive, finite sum"),
        ([(PEERS[0], torch.ones(2), -1.0), (PEERS[1], torch.ones(2), 3.0)], "want them >= 0"),
        ([(PEERS[0], torch.ones(2), float("nan"))], "with a positive, finite sum"),
        ([(PEERS[0], torch.ones(2), 1.0)] * 2, "contributed twice"),
        ([(PEERS[0], torch.ones(2), 1.0), (PEERS[1], torch.ones(1), 1.0)], "differ in shape"),
    ],
)
def test_what_cannot_be_averaged_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        mean_pseudo_gradient(given)


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (16.0, 0.0625, 3.0), (1e38, 1e38, 1e38), (1e-30, 1e-30, 1e-30)])
def test_contributions_whose_sum_is_beyond_float32_have_the_mean_that_they_have(weights):
    largest = torch.finfo(torch.float32).max
    values = torch.tensor(
        [[3e38, largest, -largest, 1.0], [3e38, largest, -largest, 2.0], [-1e38, largest, 1e38, -0.5]]
    )
    mean = mean_pseudo_gradient(
        [(PEERS[n], row, weight) for n, (row, weight) in enumerate(zip(values, weights, strict=True))]
    )
    weight_K = torch.tensor(weights, dtype=torch.float64)
    expected = (values.double() * weight_K[:, None]).sum(0) / weight_K.sum()
    torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=0)


def test_a_contribution_that_is_not_finite_is_refused():
    with pytest.raises(NonFiniteError, match="one of 2 contributions is not finite"):
        mean_pseudo_gradient([(PEERS[0], torch.tensor([torch.inf]), 1.0), (PEERS[1], torch.ones(1), 1.0)])


def test_equal_weights_do_not_look_at_tokens():
    assert contribution_weights("equal", [0, 5, 10**18]) == [1.0, 1.0, 1.0]


def test_token_weights_are_bounded_by_the_typical_one_and_exact_in_float32():
    weights = contribution_weights("tokens", [0, 10, 30, 20, 10**18])
    assert weights == [LEAST, 0.5, 1.5, 1.0, MOST]
    thirds = contribution_weights("tokens", [1, 3, 3])
    assert thirds[0] == float(torch.tensor(1 / 3))
    assert contribution_weights("tokens", [0, 0, 7]) == [1.0, 1.0, 1.0], "no tokens told: equal"
    assert contribution_weights("tokens", []) == []


def test_a_claim_counts_for_four_times_the_typical_at_most_and_of_two_the_lower_one_is_typical():
    assert contribution_weights("tokens", [100, 100, 100, 100, 10**18]) == [1.0, 1.0, 1.0, 1.0, 4.0]
    assert contribution_weights("tokens", [100, 10**18]) == [1.0, 4.0]


def test_one_liar_among_many_moves_the_mean_by_no_more_than_four_of_them():
    honest, lie = torch.zeros(8), torch.ones(8)
    weights = contribution_weights("tokens", [100] * 15 + [10**18])
    peers = [bytes([n]) * 32 for n in range(16)]
    mean = mean_pseudo_gradient(
        [(p, lie if p == peers[-1] else honest, w) for p, w in zip(peers, weights, strict=True)]
    )
    torch.testing.assert_close(mean, torch.full((8,), 4 / 19))
