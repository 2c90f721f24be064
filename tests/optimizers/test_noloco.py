"""NoLoCo's pair step: what its terms conserve, and when replicas stay together."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.noloco import NoLoCo
from tests.kit.stepping import pair_step

Swarm = tuple[torch.Tensor, torch.Tensor]  # slow weights and momenta, (peers, N)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def group_step(outer: NoLoCo, swarm: Swarm, delta: torch.Tensor, groups: list[list[int]], sent=lambda t: t) -> Swarm:
    """One step of all peers at once (it is elementwise); ``sent`` is what compression does to slow weights."""
    slow, momentum = swarm[0].clone(), swarm[1].clone()
    group_Gn = torch.tensor(groups)
    arrived = sent(swarm[0])[group_Gn]
    mean_delta, mean_slow = (t.mean(dim=1, keepdim=True).expand_as(t) for t in (delta[group_Gn], arrived))
    slow[group_Gn], state = pair_step(
        outer, swarm[0][group_Gn], mean_delta, arrived, mean_slow, {"momentum": swarm[1][group_Gn]}
    )
    momentum[group_Gn] = state["momentum"]
    return slow, momentum


def pairs(peers: int, generator: torch.Generator) -> list[list[int]]:
    return torch.randperm(peers, generator=generator).view(-1, 2).tolist()


def disagreement(slow: torch.Tensor) -> float:
    return float((slow - slow.mean(dim=0)).norm())


@pytest.mark.parametrize("sent", [lambda t: t, lambda t: t.half().double()], ids=["exact", "fp16"])
def test_the_mean_of_all_replicas_does_not_feel_the_pull(sent):
    """Even through lossy compression: the pull is made of what was sent, so a group's pulls cancel."""
    means = []
    for gamma in (0.0, 0.7):
        generator, swarm = torch.Generator().manual_seed(0), (gaussian(8, 50), gaussian(8, 50, seed=1))
        for step in range(20):
            swarm = group_step(NoLoCo(gamma=gamma), swarm, gaussian(8, 50, seed=step), pairs(8, generator), sent)
        means.append(swarm[0].mean(dim=0))
    torch.testing.assert_close(means[0], means[1], rtol=1e-12, atol=1e-12)


def test_one_group_of_all_with_equal_replicas_is_heavy_ball_sgd():
    slow, outer = gaussian(50), NoLoCo(alpha=0.5, beta=0.7, gamma=0.7)
    parameter = torch.nn.Parameter(slow.clone())
    heavy_ball = torch.optim.SGD([parameter], lr=0.7, momentum=0.5)
    swarm = slow.expand(4, 50).clone(), torch.zeros(4, 50, dtype=torch.float64)
    for step in range(10):
        delta = gaussian(4, 50, seed=step)
        swarm = group_step(outer, swarm, delta, [[0, 1, 2, 3]])
        parameter.grad = -delta.mean(dim=0)  # the pseudo-gradient is slow - local
        heavy_ball.step()
    assert disagreement(swarm[0]) < 1e-12
    torch.testing.assert_close(swarm[0][0], parameter.detach(), rtol=1e-12, atol=1e-12)


def test_equal_replicas_do_not_feel_the_pull():
    slow, delta = gaussian(50), gaussian(50, seed=1)
    with_pull, without = (
        pair_step(NoLoCo(gamma=gamma), slow, delta, slow, slow, NoLoCo().init(slow))[0] for gamma in (0.7, 0.0)
    )
    assert torch.equal(with_pull, without)


def test_training_that_moves_down_moves_the_slow_weights_down():
    """The sign in the paper's equation 2 would climb."""
    slow, local = torch.tensor([1.0]), torch.tensor([0.0])
    after, _ = pair_step(NoLoCo(), slow, local - slow, slow, slow, NoLoCo().init(slow))
    assert after.tolist() == pytest.approx([0.3])


def test_a_full_pull_without_momentum_makes_partners_equal():
    slow = torch.tensor([[4.0, -8.0], [2.0, 16.0]]).double()
    swarm = slow, torch.zeros_like(slow)
    after, _ = group_step(NoLoCo(alpha=0.0, gamma=1.0), swarm, torch.zeros_like(slow), [[0, 1]])
    assert after.tolist() == [[3.0, 4.0], [3.0, 4.0]]


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 0.7), (0.0, 1.0), (0.5, 0.2), (0.5, 1.2), (0.8, 0.3)])
def test_without_training_the_disagreement_contracts(alpha, gamma):
    generator, slow = torch.Generator().manual_seed(0), gaussian(32, 50)
    swarm = slow, torch.zeros_like(slow)
    for _ in range(400):
        swarm = group_step(NoLoCo(alpha=alpha, gamma=gamma), swarm, torch.zeros_like(slow), pairs(32, generator))
    assert disagreement(swarm[0]) < 1e-3 * disagreement(slow)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.5, 1.5), (0.9, 0.7), (0.9, 0.3801), (0.0, 2.0), (0.5, -0.1)])
def test_a_pull_that_would_drive_replicas_apart_is_refused(alpha, gamma):
    with pytest.raises(ConfigError, match=r"replicas drift apart unless gamma < 2\*\(1 - alpha\*\*2\)"):
        NoLoCo(alpha=alpha, gamma=gamma)


def growth(alpha: float, gamma: float, peers: int) -> float:
    """Per step, of the mean square of the disagreement (x, m) over random pairs, without training; exact.

    Replicas are alike and their sum is zero, so two different ones have -1/(peers - 1) of the covariance of one.
    """
    paired = torch.tensor([[1 - gamma / 2, alpha], [-gamma / 2, alpha]]).double()  # of a replica's own (x, m)
    other = torch.tensor([[gamma / 2, 0.0], [gamma / 2, 0.0]]).double()  # of its partner's
    alone = torch.tensor([[1.0, alpha], [0.0, alpha]]).double()
    in_pair = torch.kron(paired, paired) + torch.kron(other, other)
    in_pair -= (torch.kron(paired, other) + torch.kron(other, paired)) / (peers - 1)
    share = 1.0 if peers % 2 == 0 else (peers - 1) / peers
    step = share * in_pair + (1 - share) * torch.kron(alone, alone)
    return float(torch.linalg.eigvals(step).abs().max())


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("peers", [2, 3, 4, 5, 8, 17, 64, 1001])
def test_the_bound_is_exact_for_an_odd_number_of_replicas_and_safe_for_an_even_one(alpha: float, peers: int):
    bound = 2 * (1 - alpha**2)
    assert growth(alpha, 0.999 * bound, peers) < 1
    if peers % 2:
        assert growth(alpha, 1.001 * bound, peers) > 1


@pytest.mark.parametrize(("peers", "most"), [(2, 3.0), (4, 1.8), (8, 1.6154), (64, 1.512)])
def test_few_replicas_in_even_number_bear_a_stronger_pull_than_the_bound(peers: int, most: float):
    assert growth(0.5, 0.999 * most, peers) < 1 < growth(0.5, 1.001 * most, peers)


def test_the_growth_is_that_of_simulated_pairs():
    """Many coordinates at once: their mean square follows the expectation."""
    generator, swarm = torch.Generator().manual_seed(0), (gaussian(4, 50_000), torch.zeros(4, 50_000).double())
    swarm = swarm[0] - swarm[0].mean(dim=0), swarm[1]
    sizes = []
    for _ in range(40):  # a matching for each coordinate would be slow: pairs are drawn for a thousand at a time
        parts = [
            group_step(NoLoCo(gamma=1.2), (x, m), torch.zeros_like(x), pairs(4, generator))
            for x, m in zip(swarm[0].split(1000, dim=1), swarm[1].split(1000, dim=1), strict=True)
        ]
        swarm = torch.cat([x for x, _ in parts], dim=1), torch.cat([m for _, m in parts], dim=1)
        sizes.append(disagreement(swarm[0]) ** 2)
    assert (sizes[-1] / sizes[9]) ** (1 / 30) == pytest.approx(growth(0.5, 1.2, 4), rel=0.1)


def test_just_under_the_bound_is_taken():
    assert NoLoCo(alpha=0.9, gamma=0.379).gamma == 0.379


@pytest.mark.parametrize("hyper", [{"alpha": 1.0}, {"alpha": -0.1}, {"beta": 0.0}, {"beta": float("nan")}])
def test_a_momentum_or_step_that_cannot_be_meant_is_refused(hyper):
    with pytest.raises(ConfigError, match="is usual"):
        NoLoCo(**hyper)


def test_the_arguments_are_untouched():
    arguments = [gaussian(50, seed=seed) for seed in range(4)]
    state = {"momentum": gaussian(50, seed=4)}
    after, new_state = pair_step(NoLoCo(), *arguments, state)
    after.fill_(7.0)
    new_state["momentum"].fill_(7.0)
    assert all(torch.equal(tensor, gaussian(50, seed=seed)) for seed, tensor in enumerate(arguments))
    assert torch.equal(state["momentum"], gaussian(50, seed=4))
