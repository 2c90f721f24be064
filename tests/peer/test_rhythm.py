from __future__ import annotations

import pytest
import torch

from decentral.peer.live_model import LiveModel
from decentral.peer.rhythm import Rhythm
from decentral.rounds.contribution import Contribution
from decentral.rounds.driver import Advance
from decentral.wire.messages import FrameRef, Record

PEER = b"p" * 32


def record(*, frames: bool = True, round_: int = 1) -> Record:
    refs = (FrameRef(PEER, bytes(32), 0, 1, 1),) if frames else ()
    zero = bytes(32)
    return Record(zero, 0, round_, 0, 0, 0, zero, zero, (PEER,), refs, (), (), (PEER,), False)


@pytest.fixture
def model() -> LiveModel:
    module = torch.nn.Linear(3, 2)
    return LiveModel(module, 1, None)


def rhythm(overlap: int = 0, alpha: float | None = None) -> Rhythm:
    return Rhythm(interval=4, overlap=overlap, alpha=alpha, seen=bytes(32))


def contribution(local: torch.Tensor) -> Contribution:
    return Contribution(0, bytes(32), local, torch.zeros_like(local), 4, 4)


def step(pace: Rhythm, times: int) -> None:
    for _ in range(times):
        pace.stepped()


def test_a_fragment_is_due_every_interval_and_not_while_one_is_in_flight():
    pace = rhythm()
    step(pace, 3)
    assert not pace.due
    step(pace, 1)
    assert pace.due
    pace.sent()
    step(pace, 10)
    assert not pace.due


def test_a_named_contribution_without_overlap_leaves_exactly_the_anchor(model):
    pace = rhythm()
    step(pace, 4)
    local = model.read(0)
    pace.sent()
    after = torch.arange(8.0)
    pace.merge(Advance(record(), b"1" * 32, 0, torch.zeros(8), after, contribution(local)), model)
    assert torch.equal(model.read(0), after)
    assert pace.since == 0
    assert pace.seen == b"1" * 32


def test_steps_made_while_the_round_was_in_flight_are_carried(model):
    pace = rhythm(overlap=2)
    local = model.read(0)
    step(pace, 4)
    pace.sent()
    step(pace, 2)
    model.write(0, local + 1.0)
    pace.merge(Advance(record(), b"1" * 32, 0, torch.zeros(8), torch.arange(8.0), contribution(local)), model)
    torch.testing.assert_close(model.read(0), torch.arange(8.0) + 1.0)
    assert pace.since == 2


def test_our_own_commit_waits_for_the_overlap_and_others_do_not(model):
    pace = rhythm(overlap=3)
    step(pace, 4)
    pace.sent()
    pace.waiting.append(Advance(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(model.read(0))))
    step(pace, 2)
    assert pace.mergeable() is None
    step(pace, 1)
    assert pace.mergeable() is not None
    pace.waiting.append(Advance(record(), b"2" * 32, 0, torch.zeros(8), torch.ones(8), None))
    assert pace.mergeable() is not None


def test_a_commit_that_passes_us_by_keeps_our_progress_and_leaves_it_due(model):
    pace = rhythm()
    step(pace, 4)
    before, live = torch.zeros(8), model.read(0)
    pace.sent()
    pace.merge(Advance(record(), b"1" * 32, 0, before, torch.ones(8), None), model)
    torch.testing.assert_close(model.read(0) - torch.ones(8), live - before)
    assert pace.since == 4
    assert pace.due


def test_streaming_mixes_local_and_anchor_by_alpha(model):
    pace = rhythm(overlap=1, alpha=0.25)
    step(pace, 4)
    local = model.read(0)
    pace.sent()
    step(pace, 1)
    pace.merge(Advance(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(local)), model)
    torch.testing.assert_close(model.read(0), 0.25 * local + 0.75)


def test_a_record_that_only_changes_the_membership_moves_no_parameter(model):
    pace = rhythm()
    live = model.read(0)
    assert not pace.merge(Advance(record(frames=False), b"3" * 32, 0, None, None, None), model)
    assert torch.equal(model.read(0), live)
    assert pace.seen == b"3" * 32


def test_rounds_that_were_given_up_are_due_again_as_steps_and_as_progress(model):
    pace = rhythm()
    step(pace, 1)
    before, live, owed = torch.zeros(8), model.read(0), torch.full((8,), 5.0)
    assert pace.merge(Advance(None, b"4" * 32, 0, before + owed, torch.ones(8), None, owed_steps=8), model)
    torch.testing.assert_close(model.read(0), torch.ones(8) + live - owed)
    assert pace.since == 9
    assert pace.due


def test_the_deadline_makes_a_slow_peer_contribute_what_it_has_but_never_twice_and_never_nothing():
    pace = rhythm()
    soon = (pace.seen, 1.0)
    assert not pace.due_early(soon, 2.0), "not one inner step yet"
    step(pace, 1)
    assert not pace.due
    assert not pace.due_early(None, 2.0)
    assert not pace.due_early((b"n" * 32, 1.0), 2.0), "a round that is not merged here yet"
    assert not pace.due_early(soon, 0.5), "there is time for another step"
    assert pace.due_early(soon, 2.0)
    pace.sent()
    assert not pace.due_early(soon, 2.0)


def test_fewer_steps_are_accounted_for_by_the_commit_that_names_them(model):
    pace = rhythm()
    step(pace, 2)
    local = model.read(0)
    pace.sent()
    pace.merge(Advance(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(local)), model)
    assert pace.since == 0
    assert not pace.due
