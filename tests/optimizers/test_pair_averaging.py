"""A2CiD2: the mixing of a replica with its twin, what it keeps, and when replicas stay together."""

from __future__ import annotations

import math

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.pair_averaging import ADPSGD, A2CiD2, most_twin_pull
from tests.optimizers.gossiping import Replicas, gaussian, growth, matching, unchecked


def total(swarm: Replicas) -> torch.Tensor:
    return (swarm.x_PN + swarm.state["twin"]).sum(0)


@pytest.mark.parametrize("chi", [0.5, 1.0, 4.0])
def test_where_chi1_is_chi2_replica_and_twin_are_one_and_the_method_is_ad_psgd_bit_for_bit(chi: float):
    random = torch.Generator().manual_seed(0)
    first, second = Replicas(A2CiD2(chi1=chi, chi2=chi), gaussian(5, 20)), Replicas(ADPSGD(), gaussian(5, 20))
    for step in range(10):
        change, groups = gaussian(5, 20, seed=step), matching(5, random)
        first.meet(change, groups)
        second.meet(change, groups)
    assert torch.equal(first.x_PN, second.x_PN)
    assert torch.equal(first.state["twin"], first.x_PN)


def test_a_round_alone_is_the_flow_of_the_equations_and_the_change_goes_on_both():
    x, y, change = (gaussian(1, 30, seed=seed) for seed in range(3))
    swarm = Replicas(A2CiD2(lr=0.5, chi1=9.0, chi2=1.0), x)
    swarm.state = {"twin": y}
    swarm.meet(change, [[0]])
    rate = 1 / (2 * math.sqrt(9.0))
    flow = torch.linalg.matrix_exp(torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64))
    wanted = flow @ (torch.cat([x, y]) - 0.5 * change)
    torch.testing.assert_close(torch.cat([swarm.x_PN, swarm.state["twin"]]), wanted, rtol=0, atol=1e-11)


def test_partners_meet_at_the_mean_of_the_mixed_and_the_twin_is_pulled_more():
    swarm = Replicas(A2CiD2(chi1=4.0, chi2=1.0), torch.tensor([[4.0], [2.0]]).double())
    swarm.meet(torch.zeros(2, 1).double(), [[0, 1]])
    assert swarm.x_PN.flatten().tolist() == [3.0, 3.0]
    assert swarm.state["twin"].flatten().tolist() == [4.0 - 2 * 1.0, 2.0 + 2 * 1.0]


@pytest.mark.parametrize("sent", [lambda t: t, lambda t: t.half().double()], ids=["exact", "fp16"])
def test_the_total_of_replicas_and_twins_moves_by_the_changes_alone(sent):
    """The mixing and, through lossy compression, too, the pulls of a pair take nothing and add nothing."""
    random, swarm = torch.Generator().manual_seed(0), Replicas(A2CiD2(), gaussian(7, 30))
    wanted, mean = total(swarm), swarm.mean
    for step in range(30):
        change = gaussian(7, 30, seed=step)
        swarm.meet(change, matching(7, random), sent)
        wanted, mean = wanted - 2 * change.sum(0), mean - change.mean(0)
    torch.testing.assert_close(total(swarm), wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(swarm.mean, mean, rtol=0, atol=1e-10)


def test_peers_that_each_pull_towards_a_goal_of_their_own_agree_better_than_with_ad_psgd():
    """The twin adds up what the pulls took."""
    apart, goal = [], gaussian(8, 20)
    for method in (A2CiD2(), ADPSGD()):
        random, swarm = torch.Generator().manual_seed(0), Replicas(method, 0 * goal)
        for _ in range(150):
            swarm.meet(0.3 * (swarm.x_PN - goal), matching(8, random))
        torch.testing.assert_close(swarm.mean, goal.mean(0), rtol=0, atol=1e-6)
        apart.append(swarm.disagreement)
    assert apart[0] < 0.7 * apart[1]


@pytest.mark.parametrize("rate", [0.05, 0.125, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("peers", [2, 3, 4, 5, 8, 17, 33, 64])
def test_the_bound_is_exact_for_an_odd_number_of_replicas_and_safe_for_an_even_one(rate: float, peers: int):
    root, bound = 1 / (2 * rate), most_twin_pull((1 - math.exp(-2 * rate)) / 2)
    assert growth(A2CiD2(chi1=0.999 * bound * root, chi2=root / (0.999 * bound)), peers) < 1
    if peers % 2:
        over = unchecked(A2CiD2(), chi1=1.001 * bound * root, chi2=root / (1.001 * bound))
        assert growth(over, peers) > 1


def test_without_training_the_disagreement_contracts():
    random, swarm = torch.Generator().manual_seed(0), Replicas(A2CiD2(), gaussian(16, 40))
    began = swarm.disagreement
    for _ in range(200):
        swarm.meet(torch.zeros(16, 40).double(), matching(16, random))
    assert swarm.disagreement < 1e-3 * began


def test_a_twin_that_would_be_driven_away_is_refused():
    with pytest.raises(ConfigError, match=r"replicas drift apart unless sqrt\(chi1/chi2\) < 3\.\d+, where it is 10; "):
        A2CiD2(chi1=5.0, chi2=0.05)


@pytest.mark.parametrize(
    "keys", [{"chi2": 0.0}, {"chi1": 1.0, "chi2": 2.0}, {"chi1": float("inf")}, {"chi1": float("nan")}]
)
def test_constants_that_no_graph_has_are_refused(keys: dict[str, float]):
    with pytest.raises(ConfigError, match="want 0 < chi2 <= chi1, both finite"):
        A2CiD2(**keys)


# ---- test ad psgd ----
#
# AD-PSGD: the mean of a pair; and push-sum, which over pairs is nothing else.


def test_both_of_a_pair_end_at_the_mean_of_where_they_would_go_alone():
    x, change = gaussian(2, 30), gaussian(2, 30, seed=1)
    swarm = Replicas(ADPSGD(lr=0.5), x)
    swarm.meet(change, [[0, 1]])
    torch.testing.assert_close(swarm.x_PN, (x - 0.5 * change).mean(0).expand(2, 30), rtol=0, atol=1e-12)


def test_a_peer_alone_goes_where_it_trained_to():
    x, change = gaussian(1, 30), gaussian(1, 30, seed=1)
    swarm = Replicas(ADPSGD(), x)
    swarm.meet(change, [[0]])
    assert torch.equal(swarm.x_PN, x - change)


@pytest.mark.parametrize("sent", [lambda t: t, lambda t: t.half().double()], ids=["exact", "fp16"])
def test_the_mean_of_all_replicas_moves_by_the_mean_change_whoever_met_whom(sent):
    random, swarm = torch.Generator().manual_seed(0), Replicas(ADPSGD(), gaussian(5, 30))
    wanted = swarm.mean
    for step in range(20):
        change = gaussian(5, 30, seed=step)
        swarm.meet(change, matching(5, random), sent)
        wanted = wanted - change.mean(0)
    torch.testing.assert_close(swarm.mean, wanted, rtol=0, atol=1e-12)


def test_push_sum_over_pairs_keeps_every_weight_at_1_and_is_this_method():
    """Each sends half of its w*y and of its w to its partner, and keeps the other half; z = sum / w."""
    random, x = torch.Generator().manual_seed(0), gaussian(6, 20)
    swarm, weighted, weight = Replicas(ADPSGD(), x), x.clone(), torch.ones(6, 1).double()
    for step in range(10):
        change, groups = gaussian(6, 20, seed=step), matching(6, random)
        swarm.meet(change, groups)
        weighted = weighted - change  # the step goes on the numerator
        for pair in groups:
            weighted[pair] = weighted[pair].sum(0) / 2
            weight[pair] = weight[pair].sum(0) / 2
    assert weight.flatten().tolist() == [1.0] * 6
    torch.testing.assert_close(weighted / weight, swarm.x_PN, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("peers", "wanted"), [(2, 0.0), (3, 0.5), (4, 1 / 3), (17, 0.5), (64, 31 / 63)])
def test_the_square_of_the_disagreement_halves_a_round_or_better(peers: int, wanted: float):
    """By hand: (peers - 2) / (2 * (peers - 1)) of an even number, 1/2 of an odd one."""
    assert growth(ADPSGD(), peers) == pytest.approx(wanted, abs=1e-12)


def test_a_rate_that_cannot_be_meant_is_refused():
    with pytest.raises(ConfigError, match="lr must be above 0 and finite"):
        ADPSGD(lr=-1.0)
