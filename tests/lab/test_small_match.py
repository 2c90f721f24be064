"""Whole matches of two processes on loopback: four seconds each, and their imports."""

from __future__ import annotations

import pytest

from tests.kit.patience import PATIENCE

terms = pytest.importorskip("experiments.contestants.terms")
matches = pytest.importorskip("experiments.contestants.match")
outcome = pytest.importorskip("experiments.contestants.outcome")

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("contestant", "knob"), [("sparseloco", 5), ("ddp", "none")])
def test_two_processes_play_a_match_to_its_end_and_leave_losses_bytes_and_times(
    contestant, knob, tmp_path, monkeypatch
):
    monkeypatch.setattr(matches, "GRACE", PATIENCE)  # a machine that does much else takes long for its last step
    match = terms.Match(contestant=contestant, knob=knob, mbit=0.0, seconds=4.0, peers=2, pace=0.1)
    matches.play(match, tmp_path)
    one, other = outcome.outcome(match, tmp_path)
    assert (one.ended, other.ended) == ("done", "done")
    assert min(one.steps, other.steps) >= 5
    assert min(one.sent, other.sent) > 0
    assert one.curve[0][3] == other.curve[0][3]  # the same weights at the beginning
    assert one.curve[-1][3] < one.curve[0][3]
