"""Slices of a reduce as its owners find them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decentral.replica.contents import NO_TAIL
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import Slices
from decentral.wire.messages import ReducePlan
from tests.replica.test_owing import SIGNERS, START, A, B, contributor, sparse_replica


def test_a_slice_that_was_being_decoded_when_its_round_ended_is_none_of_the_next_rounds():
    """Plans are numbered anew in every round: a peer's old slice would stand for the one that is still to come."""
    plan = ReducePlan(0, 1, 0, 0, (contributor(A), contributor(B)), ((A, 0, 4), (B, 4, 8)))
    made = Contribution(0, START.hash, torch.zeros(8), torch.ones(8), 1, 1)
    frame = made.slice_frame(0, plan, START, sparse_replica(), SIGNERS[1])
    slices = Slices(NO_TAIL)
    slices.forget()  # the round is over
    slices.add(frame, torch.ones(4))
    assert list(slices.of(plan, 0)[0]) == [B]
    assert slices.of(replace(plan, round=2), 0) == ({}, {})


@pytest.mark.parametrize("lie", [{"summary": b"a lie"}, {"tokens": 7}, {"based": 9}], ids=lambda lie: next(iter(lie)))
def test_a_slice_is_no_contribution_to_a_plan_that_says_of_it_what_its_sender_did_not_sign(lie):
    """Else a leader chooses what a contribution counts, in every method that weighs by summary or age."""
    plan = ReducePlan(0, 1, 0, 0, (contributor(A), contributor(B)), ((A, 0, 4), (B, 4, 8)))
    made = Contribution(0, START.hash, torch.zeros(8), torch.ones(8), 1, 1)
    slices = Slices(NO_TAIL)
    slices.add(made.slice_frame(0, plan, START, sparse_replica(), SIGNERS[1]), torch.ones(4))
    assert list(slices.of(plan, 0)[0]) == [B]
    lied = replace(plan, contributors=(contributor(A), replace(contributor(B), **lie)))
    assert slices.of(lied, 0) == ({}, {})
