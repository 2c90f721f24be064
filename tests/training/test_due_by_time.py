"""A method that goes by time: the schedule counts seconds of inner steps as it counts the steps themselves."""

from __future__ import annotations

import json

import pytest
import torch

from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.edit import AEDiT
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_model import LiveModel
from decentral.training.schedule import SyncSchedule, memory_of, resume
from tests.training.test_schedule import record

H = 20


@pytest.fixture
def model() -> LiveModel:
    return LiveModel(torch.nn.Linear(3, 2), 1, None)


def by_time(seconds: float = 10.0, least: int = 1) -> SyncSchedule:
    return SyncSchedule(H, 0, AEDiT(seconds=seconds, least=least), bytes(32))


def train(pace: SyncSchedule, steps: int, each: float) -> None:
    """As the outer loop: a step, and then its boundary."""
    for _ in range(steps):
        pace.stepped()
        pace.add_seconds(each)


def send(pace: SyncSchedule, model: LiveModel) -> Contribution:
    made = pace.take(model, 0, torch.zeros(8), bytes(32), 1, outer_step=0)
    assert made is not None
    return made


def commit(pace: SyncSchedule, model: LiveModel, made: Contribution | None) -> None:
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), made), model)


@pytest.mark.parametrize(("each", "steps"), [(1.0, 10), (4.0, 3), (0.5, 20), (0.01, 20)])
def test_slow_and_fast_peers_contribute_at_one_time_with_the_steps_they_made(each: float, steps: int):
    pace, made = by_time(), 0
    while not pace.due:
        train(pace, 1, each)
        made += 1
    assert made == steps


def test_a_commit_that_names_the_contribution_begins_the_time_anew_from_where_it_was_sent(model):
    pace = by_time()
    train(pace, 10, 1.0)
    made = send(pace, model)
    train(pace, 3, 1.0)  # while the round is in flight
    commit(pace, model, made)
    assert (pace.since, pace.seconds) == (3, 3.0)
    train(pace, 6, 1.0)
    assert not pace.due
    train(pace, 1, 1.0)
    assert pace.due


def test_a_round_that_passed_a_peer_by_leaves_it_due(model):
    pace = by_time()
    train(pace, 10, 1.0)
    send(pace, model)
    commit(pace, model, None)
    assert pace.due


def test_time_without_a_step_is_no_contribution():
    pace = by_time()
    pace.add_seconds(1000.0)
    assert not pace.due
    pace.stepped()
    assert pace.due


def test_steps_before_it_is_due_are_no_absence_and_those_after_are():
    pace = by_time(seconds=5.0)
    train(pace, 5, 1.0)
    assert pace.held == 0
    train(pace, 3, 1.0)
    assert pace.held == 3


def test_starting_over_begins_the_time_anew(model):
    pace = by_time()
    train(pace, 8, 1.0)
    pace.restart(model, [torch.zeros(8)], [0])
    assert pace.seconds == 0.0


def test_a_checkpoint_keeps_the_time_and_one_from_before_has_none(model):
    pace, resumed, old = by_time(), by_time(), by_time()
    train(pace, 8, 1.0)
    memory = json.loads(json.dumps(memory_of(pace)))
    anchors = {"anchor/0": torch.zeros(8)}
    resume(resumed, model, anchors, memory, [torch.zeros(8)], 0)
    assert (resumed.since, resumed.seconds) == (8, 8.0)
    del memory["seconds"]
    resume(old, model, anchors, memory, [torch.zeros(8)], 0)
    assert (old.since, old.seconds) == (8, 0.0)


def test_a_method_that_counts_steps_does_not_look_at_the_time():
    pace = SyncSchedule(H, 0, DiLoCo(), bytes(32))
    train(pace, H - 1, 1000.0)
    assert not pace.due
    train(pace, 1, 0.0)
    assert pace.due
