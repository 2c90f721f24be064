"""Just one byte: what is told of inner steps, what a round makes of it, and what does not go with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import (
    MOST,
    Direction,
    JustOneByte,
    ToldDerivatives,
    byte_of,
    keep_newer,
    level_of,
    note,
    noted,
)
from decentral.replica.codec import codec_of
from decentral.replica.contribution import forgotten
from decentral.rounds.local_state import CommittedUpdate
from tests.laws.learners import SCHEMA, Learners
from tests.laws.swarm import NUMEL, SIGNERS

LAYOUT = {spec.name: spec.shape for spec in SCHEMA.fragments[0].parameters}
GOAL_N = torch.linspace(-1, 1, NUMEL)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def told_by(run: Learners, number: int) -> ToldDerivatives:
    """What a peer would say now."""
    schedule = run.peers[number].schedule
    return ToldDerivatives.read(schedule.method.says(schedule.live, 0, []))


def test_an_inner_step_follows_the_gradient_along_a_direction_and_no_further():
    run = Learners(JustOneByte(), 1, randn(0))
    run.learn({0: -randn(1)})
    told = told_by(run, 0)
    direction_N = Direction(told.seed, told.first).over(LAYOUT)
    along = float(randn(1).double() @ direction_N.double())
    assert told.levels == bytes([byte_of(along)])
    taken_N = randn(0) - run.peers[0].live_N
    torch.testing.assert_close(taken_N, level_of(byte_of(along)) * direction_N, rtol=1e-5, atol=1e-4)


def test_a_round_moves_the_anchor_by_every_peers_derivatives_over_the_root_of_their_number():
    run, wanted_N = Learners(JustOneByte(lr=0.5), 3, randn(0)), randn(0).double()
    for number, steps in ((0, 3), (1, 1), (2, 5)):
        run.peers[number].schedule.interval = steps  # all of them count
        for step in range(steps):
            run.learn({number: -0.1 * randn(10 * number + step)})
    for number in range(3):
        told = told_by(run, number)
        for place, byte in enumerate(told.levels):
            direction_N = Direction(told.seed, told.first + place).over(LAYOUT).double()
            wanted_N -= 0.5 / math.sqrt(9) * level_of(byte) * direction_N
    run.meet((0, 1, 2))
    torch.testing.assert_close(run.peers[0].anchor_N.double(), wanted_N, rtol=1e-5, atol=1e-5)


def test_peers_go_different_ways():
    run = Learners(JustOneByte(), 2, randn(0))
    run.learn({0: randn(1), 1: randn(1)})
    first, second = (run.peers[n].live_N - randn(0) for n in range(2))
    assert abs(float((first.sign() == second.sign()).float().mean()) - 0.5) < 0.2


def test_steps_made_while_a_contribution_is_under_way_are_told_in_the_next_one():
    run = Learners(JustOneByte(), 2, randn(0))
    run.learn({0: randn(1), 1: randn(2)})
    offered = run.offer((0, 1))
    run.learn({0: randn(3)})
    both = told_by(run, 0)
    run.commit(offered)
    assert told_by(run, 0) == ToldDerivatives(both.seed, both.first + 1, both.levels[1:])
    assert told_by(run, 1).levels == b""


def test_a_commit_that_took_nothing_of_a_peer_leaves_what_it_has_to_tell():
    run = Learners(JustOneByte(), 2, randn(0))
    run.learn({0: randn(1), 1: randn(2)})
    before = told_by(run, 1)
    run.meet((0,))
    assert told_by(run, 1) == before
    assert before.levels


def test_what_an_adopted_branch_took_is_not_told_again():
    """A peer that was cut off meets its own contribution in a snapshot, which names no contributors."""
    run = Learners(JustOneByte(), 2, randn(0))
    run.learn({0: randn(1), 1: randn(2)})
    run.offer((0, 1))
    run.learn({0: randn(3)})
    both, peer = told_by(run, 0), run.peers[0]
    peer.schedule.merge(CommittedUpdate(None, bytes(32), 0, randn(0), randn(4), None, took=True), peer.model)
    assert told_by(run, 0) == ToldDerivatives(both.seed, both.first + 1, both.levels[1:])


def test_a_commit_finds_nothing_to_forget_where_progress_was_given_up_since():
    own: dict[str, Tensor] = {}
    note(own, Derivative(7, 0, 65))
    sent = dict(own)
    note(own, Derivative(7, 1, 66))
    del own["levels"]
    keep_newer(own, sent)
    assert noted(own).levels == b""


def test_progress_that_is_given_up_is_not_told():
    run = Learners(JustOneByte(), 1, randn(0))
    run.learn({0: randn(1)})
    peer = run.peers[0]
    peer.schedule.restart(peer.model, [peer.anchor_N], [0])
    assert told_by(run, 0).levels == b""


def test_of_more_steps_than_a_summary_has_bytes_for_the_newest_are_told():
    run = Learners(JustOneByte(), 1, randn(0))
    for number in range(MOST + 3):
        run.learn({0: 0.001 * randn(number)})
    told = told_by(run, 0)
    assert (told.first, len(told.levels)) == (3, MOST)


@pytest.mark.parametrize(("missed", "told"), [(0, 12), (2, 4)])
def test_after_an_absence_the_newest_are_told_as_many_as_inner_steps_count(missed: int, told: int):
    """All were told of an absence that counted as one round's steps."""
    run = Learners(JustOneByte(), 1, randn(0))
    peer = run.peers[0]
    peer.schedule.interval = 4 if missed else 12
    for number in range(12):
        run.learn({0: 0.001 * randn(number)})
    peer.schedule.progress[0].missed = missed
    every = told_by(run, 0)
    (made,) = run.offer((0,)).made.values()
    assert ToldDerivatives.read(made.summary) == ToldDerivatives(every.seed, 12 - told, every.levels[12 - told :])


def test_what_an_absence_leaves_uncounted_is_not_told_later():
    run = Learners(JustOneByte(), 1, randn(0))
    for number in range(2):
        run.learn({0: 0.001 * randn(number)})
    run.peers[0].schedule.progress[0].missed = 2
    offered = run.offer((0,))
    run.learn({0: 0.001 * randn(2)})
    run.commit(offered)
    assert (told_by(run, 0).first, len(told_by(run, 0).levels)) == (2, 1)
    assert [(away.steps, away.counted) for away in run.peers[0].schedule.given_up] == [(2, 1)]


def test_a_frame_is_a_header_and_no_body():
    codec = codec_of(preset_manifest("just_one_byte"))
    run = Learners(JustOneByte(), 2, randn(0), codec)
    run.learn({0: randn(1), 1: randn(2)})
    offered = run.offer((0, 1))
    assert [len(frame.body) for frame in offered.frames.values()] == [0, 0]
    run.commit(offered)
    assert not torch.equal(run.peers[1].anchor_N, randn(0))


def test_what_an_earlier_life_told_is_taken_everywhere():
    """Its frame is empty, and was read as nothing taken: the progress counted a second time."""
    run = Learners(JustOneByte(), 1, randn(0), codec_of(preset_manifest("just_one_byte")))
    run.learn({0: randn(1)})
    offered = run.offer((0,))
    assert forgotten(run.peers[0].replica, offered.record, offered.frames, SIGNERS[0].peer).sent_N.all()


def distance(peers: int, rounds: int = 150) -> float:
    """From a quadratic's minimum, whose gradients are noisy, as a share of the first."""
    run, rate = Learners(JustOneByte(lr=0.002), peers, torch.zeros(NUMEL)), 0.002
    for number in range(rounds):
        for step in range(4):
            noise = {n: randn(1000 * number + 10 * step + n) for n in range(peers)}
            run.learn({n: -rate * (run.peers[n].anchor_N - GOAL_N + 0.5 * noise[n]) for n in range(peers)})
        run.meet(tuple(range(peers)))
    return float((run.peers[0].anchor_N - GOAL_N).norm() / GOAL_N.norm())


def test_more_peers_learn_more():
    alone, together = distance(1), distance(3)
    assert together < alone < 1


def test_who_tells_nothing_moves_nothing():
    method, anchor_N = JustOneByte(lr=1.0), randn(0)
    one = Contributor(bytes(32), summary=b"\xff" * 11)
    change_N = method.rebuilt(one, LAYOUT)
    after_N, _ = method.outer_step(anchor_N, {"change": change_N}, {}, RoundInfo(contributors=(one,)))
    assert torch.equal(after_N, anchor_N)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"exchange": {"kind": "reduce"}}, r'exchange.kind = "reduce" does not fit .* use "gather"'),
        ({"compressor": {"chain": "bf16"}}, r'compressor.chain = "bf16" does not fit .* use "none"'),
        ({"compressor": {"feedback": "ef(beta=0.9)"}}, r"compressor.feedback = .* does not fit"),
        ({"outer": {"norm_clip": "median"}}, r'outer.aggregation.rule = "norm_clip" does not fit .* use "mean"'),
        ({"outer": {"weighting": "tokens"}}, r'outer.weighting = "tokens" does not fit .* use "equal"'),
        ({"inner": {"pace": "speed"}}, r'outer.weighting = "tokens" does not fit'),
        ({"inner": {"steps": 53}}, r"inner.steps = 53 does not fit outer.method just_one_byte: .* use 52 or fewer"),
    ],
)
def test_what_acts_on_vectors_is_refused(tables: dict[str, dict[str, object]], told: str):
    check_methods(preset_manifest("just_one_byte"))
    with pytest.raises(ConfigError, match=told):
        check_methods(preset_manifest("just_one_byte", **tables))
