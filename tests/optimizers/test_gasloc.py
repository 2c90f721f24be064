"""GASLoC: what its one vector means, what the pull keeps, and when replicas stay together."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.gasloc import GASLoC
from decentral.optimizers.steps import nesterov
from tests.optimizers.gossiping import Replicas, gaussian, growth, matching, unchecked

PLAIN = {"lr": 1.0, "momentum": 0.0, "pull": 1.0}


def test_a_replica_alone_is_diloco_on_a_quadratic():
    """Momentum is there without a partner, too, from the first step on; in float64, where nothing hides."""
    goal, rate = gaussian(50), 0.3
    alone, anchor, buffer = Replicas(GASLoC(lr=0.7, momentum=0.9, pull=0.3), 0 * goal[None]), 0 * goal, 0 * goal
    for _ in range(40):
        alone.meet(rate * (alone.x_PN - goal), [[0]])
        change = rate * (anchor - goal)
        buffer = 0.9 * buffer + change
        anchor = anchor - 0.7 * (change + 0.9 * buffer)
        torch.testing.assert_close(alone.x_PN[0], anchor, rtol=0, atol=1e-12)


def test_the_complete_graph_is_diloco_where_changes_are_alike():
    start = gaussian(30)
    swarm, anchor, buffer = Replicas(GASLoC(), start.expand(5, 30)), start.float(), torch.zeros(30)
    for step in range(10):
        change = gaussian(30, seed=step)
        swarm.meet(change.expand(5, 30), [list(range(5))])
        anchor, buffer = nesterov(anchor, change.float(), buffer, 0.7, 0.5)
    assert swarm.disagreement < 1e-12
    torch.testing.assert_close(swarm.x_PN[3].float(), anchor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sent", [lambda t: t, lambda t: t.half().double()], ids=["exact", "fp16"])
def test_the_mean_of_all_replicas_is_diloco_along_the_mean_change_whoever_met_whom(sent):
    """The pulls of a pair cancel, whatever compression did to what was sent, and no compressor touches the change."""
    random, swarm = torch.Generator().manual_seed(0), Replicas(GASLoC(lr=0.7, momentum=0.6), gaussian(7, 30))
    anchor, buffer = swarm.mean, torch.zeros(30).double()
    for step in range(20):
        change = gaussian(7, 30, seed=step)
        swarm.meet(change, matching(7, random), sent)
        buffer = 0.6 * buffer + change.mean(0)
        anchor = anchor - 0.7 * (change.mean(0) + 0.6 * buffer)
    torch.testing.assert_close(swarm.mean, anchor, rtol=0, atol=1e-12)


def test_momentum_is_of_where_each_would_go_alone_and_neither_of_where_it_was_nor_of_where_it_was_pulled():
    swarm = Replicas(GASLoC(lr=1.0, momentum=0.5, pull=1.0), torch.tensor([[4.0], [0.0]]).double())
    swarm.meet(torch.tensor([[1.0], [0.0]]).double(), [[0, 1]])  # p is 3 and 0, their mean 1.5
    assert swarm.x_PN.flatten().tolist() == [1.5 + 0.5 * (3.0 - 4.0), 1.5]
    swarm.meet(torch.zeros(2, 1).double(), [[0], [1]])  # p is 1 and 1.5
    assert swarm.x_PN.flatten().tolist() == [1.0 + 0.5 * (1.0 - 3.0), 1.5 + 0.5 * (1.5 - 0.0)]


def test_the_laplacian_carries_one_half_so_that_a_pull_of_1_makes_partners_meet():
    for pull, wanted in ((1.0, [3.0, 3.0]), (0.5, [3.5, 2.5]), (0.0, [4.0, 2.0])):
        swarm = Replicas(GASLoC(**PLAIN | {"pull": pull}), torch.tensor([[4.0], [2.0]]).double())
        swarm.meet(torch.zeros(2, 1).double(), [[0, 1]])
        assert swarm.x_PN.flatten().tolist() == wanted


def test_replicas_that_each_learn_towards_a_goal_of_their_own_end_near_the_mean_of_the_goals():
    random, goal = torch.Generator().manual_seed(0), gaussian(8, 20)
    swarm = Replicas(GASLoC(), 0 * goal)
    for _ in range(200):
        swarm.meet(0.1 * (swarm.x_PN - goal), matching(8, random))
    torch.testing.assert_close(swarm.mean, goal.mean(0), rtol=0, atol=1e-6)
    assert swarm.disagreement < 0.3 * float((goal - goal.mean(0)).norm())


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("peers", [2, 3, 4, 5, 8, 17, 33, 64])
def test_the_bound_is_exact_for_an_odd_number_of_replicas_and_safe_for_an_even_one(momentum: float, peers: int):
    bound = 2 * (1 - momentum**2)
    assert growth(GASLoC(momentum=momentum, pull=0.999 * bound), peers) < 1
    if peers % 2:
        assert growth(unchecked(GASLoC(), momentum=momentum, pull=1.001 * bound), peers) > 1


@pytest.mark.parametrize(("momentum", "pull"), [(0.5, 1.0), (0.0, 1.0), (0.5, 1.3), (0.9, 0.2)])
def test_without_training_the_disagreement_contracts_and_the_mean_stays(momentum: float, pull: float):
    random, swarm = torch.Generator().manual_seed(0), Replicas(GASLoC(momentum=momentum, pull=pull), gaussian(16, 40))
    began, mean = swarm.disagreement, swarm.mean
    for _ in range(400):
        swarm.meet(torch.zeros(16, 40).double(), matching(16, random))
    assert swarm.disagreement < 1e-3 * began
    torch.testing.assert_close(swarm.mean, mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("momentum", "pull"), [(0.5, 1.5), (0.9, 0.381), (0.0, 2.0), (0.5, -0.1), (0.5, float("nan"))])
def test_a_pull_that_would_drive_replicas_apart_is_refused(momentum: float, pull: float):
    with pytest.raises(ConfigError, match=r"replicas drift apart unless pull < 2\*\(1 - momentum\*\*2\)"):
        GASLoC(momentum=momentum, pull=pull)


@pytest.mark.parametrize("keys", [{"lr": 0.0}, {"lr": float("inf")}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_a_rate_or_momentum_that_cannot_be_meant_is_refused(keys: dict[str, float]):
    with pytest.raises(ConfigError, match="usual"):
        GASLoC(**keys)
