"""Late merging: when pairs meet, and that an average is the plain one where they do."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.pair_averaging import ADPSGD, LateMerge
from tests.optimizers.gossiping import Replicas, gaussian


def meetings(method: LateMerge, steps: int) -> list[int]:
    return [step for step in range(steps) if method.meets(step)]


@pytest.mark.parametrize(("first", "growth"), [(0.1, 100), (0.0, 10), (0.5, 40), (0.3, 1)])
def test_as_many_meet_as_the_shares_of_all_steps_add_up_to(first: float, growth: int):
    method, share = LateMerge(first=first, growth=growth), 0.0
    for step in range(3 * growth):
        share += first + (1 - first) * min(1.0, step / growth)
        assert abs(len(meetings(method, step + 1)) - share) <= 1


def test_meetings_come_more_and_more_often_and_in_the_end_at_each_step():
    at = meetings(LateMerge(first=0.1, growth=100), 300)
    quarters = [sum(start <= step < start + 25 for step in at) for start in (0, 25, 50, 75)]
    assert quarters == sorted(quarters)
    assert quarters[0] <= 6
    assert [step for step in at if step >= 100] == list(range(100, 300))
    assert LateMerge().meets(10**9)


def test_a_share_of_1_is_ad_psgd():
    method = LateMerge(first=1.0)
    assert meetings(method, 50) == list(range(50))
    first, second = Replicas(method, gaussian(2, 20)), Replicas(ADPSGD(), gaussian(2, 20))
    for swarm in (first, second):
        swarm.meet(gaussian(2, 20, seed=1), [[0, 1]])
    assert torch.equal(first.x_PN, second.x_PN)


def test_equal_models_are_not_changed_by_a_merge():
    x = gaussian(1, 20).expand(4, 20)
    swarm = Replicas(LateMerge(), x)
    swarm.meet(torch.zeros(4, 20).double(), [[0, 1, 2, 3]])
    assert torch.equal(swarm.x_PN, x)


@pytest.mark.parametrize(("keys", "said"), [({"first": 1.1}, r"\[0, 1\]"), ({"growth": 0}, "1 outer step or more")])
def test_a_schedule_that_cannot_be_is_refused(keys: dict[str, float], said: str):
    with pytest.raises(ConfigError, match=said):
        LateMerge(**keys)
