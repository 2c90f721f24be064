"""G11 where a round speaks of some parameters only: what an absence leaves of the others is bounded, and no more.

Three peers learn the same in each inner step, so what a peer may bring in a round is known: as many steps as the
others bring.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from decentral.optimizers.local_sgd import LocalSGD
from decentral.optimizers.sparta import Sparta
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.progress import Progress
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL

STEP, ALL, OTHERS = 0.01, (0, 1, 2), (0, 1)
WHOLE = 20


def walked(missed: tuple[int, ...], rounds: int, parts: int = 40) -> Learners:
    """Peer 2 misses some rounds; the next round is number ``rounds``, and the inner steps for it are made."""
    run = Learners(Sparta(parts=parts, whole=WHOLE, lr=1.0, momentum=0.0), 3, torch.zeros(NUMEL))
    for number in range(rounds + 1):
        run.learn({n: torch.full((NUMEL,), STEP) for n in ALL})
        if number < rounds:
            run.meet(OTHERS if number in missed else ALL)
    return run


def offered(run: Learners, peer: int) -> Tensor:
    """The change that it offers to the next round."""
    return run.offer((peer,)).made[peer].gradient_N


@pytest.mark.parametrize("late", [3, 17, 18])
def test_a_missed_round_of_a_few_costs_nothing_of_what_was_learnt_of_all(late: int):
    run = walked((late,), WHOLE - 1)
    assert float(offered(run, 2).norm()) >= float(offered(run, 0).norm())
    run.meet(ALL)
    assert run.peers[2].schedule.absences == []
    again = run.peers[2].schedule.progress[0]
    assert (again.steps, again.missed, again.undrawn, again.overdue) == (0, 0, 0, 0)


@pytest.mark.parametrize("after", [1, 2, 7, WHOLE])
def test_who_missed_a_round_of_all_brings_no_more_than_the_others_until_the_next(after: int):
    """Not only in the first round of its return: what is not drawn then is as old."""
    run = walked((WHOLE - 1,), WHOLE - 1 + after)
    mine, theirs = float(offered(run, 2).norm()), float(offered(run, 0).norm())
    assert 0.3 * theirs < mine < 1.05 * theirs


def test_it_goes_on_counting_in_full_after_the_next_round_of_all():
    run = walked((WHOLE - 1,), 2 * WHOLE)
    torch.testing.assert_close(offered(run, 2), offered(run, 0))
    run.peers[2].schedule.absences.clear()
    run.meet(ALL)
    assert run.peers[2].schedule.absences == []


def test_all_that_is_left_has_been_drawn_before_the_next_round_of_all_where_parts_are_few():
    run = walked((WHOLE - 1,), WHOLE + 15, parts=4)
    torch.testing.assert_close(offered(run, 2), offered(run, 0), rtol=0.0, atol=8 * STEP)
    run.peers[2].schedule.absences.clear()
    run.meet(ALL)
    assert run.peers[2].schedule.absences == []


def test_what_is_given_up_is_told_with_the_steps_behind_it():
    run = walked((WHOLE - 1,), WHOLE)
    run.meet(ALL)
    (away,) = run.peers[2].schedule.absences
    assert away.sentence() == "1 round passed by: 21 inner steps count as 1"


def test_the_count_survives_a_restart():
    run = walked((WHOLE - 1,), WHOLE + 3)
    before = run.peers[2].schedule.progress[0]
    assert before.undrawn > 0
    assert before.overdue == 1
    told = json.loads(json.dumps(before.memory()))
    assert Progress.recall(told, None) == before


def test_a_round_that_passes_by_who_made_no_step_since_the_last_counts_as_missed():
    run = walked((), WHOLE - 2)
    run.meet(ALL)
    run.learn({n: torch.full((NUMEL,), STEP) for n in OTHERS})
    run.meet(OTHERS)
    assert run.peers[2].schedule.progress[0].missed == 1


@pytest.mark.parametrize("missed", [2, 3])
def test_after_more_than_two_missed_rounds_all_of_it_is_dropped(missed: int):
    run = walked(tuple(range(5, 5 + missed)), 5 + missed)
    peer, head = run.peers[2], run.head
    made = peer.schedule.take(peer.model, 0, peer.anchor_N, head.hash, 1, outer_step=head.outer_step)
    assert (made is None) == (missed > 2)


def test_an_adopted_branch_that_took_what_was_in_flight_leaves_what_was_not_drawn_behind():
    run = walked((), 3)
    peer, head = run.peers[2], run.head
    made = peer.schedule.take(peer.model, 0, peer.anchor_N, head.hash, 1, outer_step=head.outer_step)
    assert made is not None
    moved = (peer.anchor_N - made.gradient_N, peer.anchor_N)
    peer.schedule.merge(
        CommittedUpdate(None, bytes(32), 0, *moved, None, reclaimed_steps=-made.trained, took=True), peer.model
    )
    progress = peer.schedule.progress[0]
    assert (progress.steps, progress.undrawn) == (0, 4)


def test_of_a_method_that_draws_nothing_one_round_is_behind_what_is_sent():
    run = Learners(LocalSGD(lr=1.0), 3, torch.zeros(NUMEL))
    for _ in range(3):
        run.learn({n: torch.full((NUMEL,), STEP) for n in ALL})
        run.meet(ALL)
    progress = run.peers[2].schedule.progress[0]
    assert (progress.steps, progress.undrawn, progress.overdue) == (0, 0, 0)
