"""Turns of the stages in a step, and the time that they take."""

from __future__ import annotations

import itertools
import random

import pytest

from decentral.pipeline.turns import (
    FAR,
    NEAR,
    StageSpeed,
    Turn,
    Turns,
    busy_share,
    count_micro_batches,
    step_seconds,
)


def played(stage: int, stages: int, micro_batches: int, lead: int, seed: int) -> list[Turn]:
    """Return the turns of a stage for which things come in one order or another."""
    turns, taken, draw = Turns(stage, stages, micro_batches, lead), list[Turn](), random.Random(seed)
    while able := turns.next():
        taken.append(draw.choice(able))
        turns.take(taken[-1])
    return taken


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8, 13])
def test_every_stage_goes_forward_and_back_once_with_each_and_never_back_first(stages: int, micro_batches: int) -> None:
    for stage, seed in itertools.product(range(stages), range(3)):
        turns = played(stage, stages, micro_batches, NEAR, seed)
        for forward in (True, False):
            assert [turn.micro for turn in turns if turn.forward is forward] == list(range(micro_batches)), "in order"
        assert all(turns.index(Turn(True, micro)) < turns.index(Turn(False, micro)) for micro in range(micro_batches))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("lead", [1, NEAR, FAR])
def test_a_stage_holds_no_more_micro_batches_than_its_lead_for_each_stage_to_come(stages: int, lead: int) -> None:
    for stage, seed in itertools.product(range(stages), range(9)):
        held = most = 0
        for turn in played(stage, stages, 32, lead, seed):
            held += 1 if turn.forward else -1
            most = max(most, held)
        assert most <= 1 + lead * (stages - stage - 1)


def test_a_stage_goes_forward_first_and_back_as_soon_as_it_has_gone_forward() -> None:
    turns = Turns(1, 3, 8, FAR)
    turns.take(Turn(True, 0))
    assert turns.next() == [Turn(True, 1), Turn(False, 0)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_equal_stages_work_in_the_share_of_the_step_that_the_paper_says(stages: int, micro_batches: int) -> None:
    took = step_seconds([StageSpeed(1.0, 2.0)] * stages, micro_batches)
    assert 3.0 * micro_batches / took == pytest.approx(busy_share(stages, micro_batches))


def test_a_line_that_is_slower_than_a_stage_sets_the_pace() -> None:
    """A middle stage sends two ways on one uplink."""
    slow = step_seconds([StageSpeed(0.1, 0.2, send=1.0)] * 3, 50)
    assert slow == pytest.approx(50 * 2.0, rel=0.1)


def test_what_comes_from_both_neighbours_shares_a_downlink() -> None:
    """Only the middle one's line is slow, and it takes in as much as it gives out."""
    quick, slow = StageSpeed(0.01, 0.02), StageSpeed(0.01, 0.02, send=1.0)
    assert step_seconds([quick, slow, quick], 50, FAR) == pytest.approx(50 * 2.0, rel=0.1)


def test_latency_costs_trips_of_filling_and_emptying_and_no_more() -> None:
    near, far = (step_seconds([StageSpeed(1.0, 2.0, latency=latency)] * 3, 24) for latency in (0.0, 0.5))
    assert far - near <= 0.5 * 2 * 2


def test_a_far_line_is_full_with_the_lead_of_far_ones() -> None:
    """20 Mbit/s and 25 ms, states of 67 kB, a stage that computes faster than that."""
    speed, count = [StageSpeed(0.01, 0.02, send=0.027, latency=0.025)] * 3, 12
    bound = count * 0.054 / busy_share(3, count)
    near, far = (bound / step_seconds(speed, count, lead) for lead in (NEAR, FAR))
    assert near < 0.8
    assert far > 0.9


@pytest.mark.parametrize(("batch", "stages", "count"), [(16, 3, 16), (32, 3, 16), (48, 2, 8), (8, 4, 8), (1, 2, 1)])
def test_a_batch_is_cut_into_equal_micro_batches(batch: int, stages: int, count: int) -> None:
    assert count_micro_batches(batch, stages) == count
    assert batch % count == 0
