"""AD-PSGD: the mean of a pair; and push-sum, which over pairs is nothing else."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.pair_averaging import ADPSGD
from tests.optimizers.gossiping import Replicas, gaussian, growth, matching


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
