"""Directions and levels of zeroth-order methods: the same bits everywhere, and what a byte is worth."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import (
    LARGEST_LEVEL,
    MOST_DERIVATIVES,
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
from decentral.replica.contribution import forget_sent
from decentral.rounds.local_state import CommittedUpdate
from tests.kit.learners import SCHEMA, Learners
from tests.kit.replicas import NUMEL, SIGNERS

LAYOUT = {"a": (3, 5), "b": (200,)}


def test_the_signs_of_a_direction_are_these_bits():
    """As a peer of another version must make them, too."""
    signs_N = Direction(seed=1 << 40 | 7, number=3).of("layers.0.weight", 1000)
    assert hashlib.sha256(bytes((signs_N < 0).tolist())).hexdigest()[:16] == "bd6306ca82ef90a8"
    assert set(signs_N.tolist()) == {1.0, -1.0}


def test_a_value_has_its_sign_however_long_the_tensor_is():
    direction = Direction(5, 6)
    whole_N = direction.of("a", 1000)
    assert all(torch.equal(direction.of("a", n), whole_N[:n]) for n in (0, 1, 127, 128, 129, 999))


@pytest.mark.parametrize(
    "other", [(Direction(6, 6), "a"), (Direction(5 | 1 << 32, 6), "a"), (Direction(5, 7), "a"), (Direction(5, 6), "b")]
)
def test_another_seed_number_or_name_has_signs_of_its_own(other: tuple[Direction, str]):
    direction, name = other
    same = float((Direction(5, 6).of("a", 10_000) == direction.of(name, 10_000)).float().mean())
    assert abs(same - 0.5) < 0.02  # 4 deviations


def test_a_fragment_has_its_tensors_one_behind_the_other():
    direction = Direction(1, 2)
    assert torch.equal(direction.over(LAYOUT), torch.cat([direction.of("a", 15), direction.of("b", 200)]))


def test_the_mean_of_derivatives_times_directions_is_the_gradient():
    gradient_N = torch.linspace(-1, 1, 20).double()
    total_N = torch.zeros(20).double()
    for number in range(4000):
        direction_N = Direction(0, number).of("x", 20).double()
        total_N += (gradient_N @ direction_N) * direction_N
    torch.testing.assert_close(total_N / 4000, gradient_N, rtol=0, atol=4 * float(gradient_N.norm()) / 4000**0.5)


def test_a_level_is_within_a_sixteenth_of_an_octave():
    for eighth in range(-504, 505):  # through all levels, in steps of an eighth of one
        derivative = 2.0 ** (eighth / 64)
        assert abs(level_of(byte_of(derivative)) / derivative - 1) < 0.0444


def test_levels_rise_and_are_odd():
    levels = [level_of(byte) for byte in range(128)]
    assert levels == sorted(set(levels))
    assert [level_of(byte + 128) for byte in range(128)] == [-level for level in levels]
    assert byte_of(-3.0) == byte_of(3.0) + 128


@pytest.mark.parametrize(
    ("derivative", "level"),
    [(1e30, LARGEST_LEVEL), (-1e30, -LARGEST_LEVEL), (1e-30, 0.0), (0.0, 0.0), (1.0, 1.0), (-2.0, -2.0)],
)
def test_what_no_level_fits_is_cut_to_the_ends(derivative: float, level: float):
    assert level_of(byte_of(derivative)) == level


def test_every_byte_says_a_float32_number():
    for byte in range(256):
        assert level_of(byte) == float(torch.tensor(level_of(byte), dtype=torch.float32))
        assert byte_of(level_of(byte)) == (byte if byte & 127 else 0)


def test_what_was_written_is_read():
    told = ToldDerivatives(seed=(1 << 63) + 5, first=(1 << 32) - 1, levels=bytes(range(MOST_DERIVATIVES)))
    assert ToldDerivatives.read(told.written()) == told
    assert len(told.written()) == 64


@pytest.mark.parametrize("summary", [b"", b"\xff", bytes(11), bytes(12)])
def test_too_few_bytes_say_nothing(summary: bytes):
    assert not ToldDerivatives.read(summary).gradient(LAYOUT).any()


@pytest.mark.parametrize("fill", [0, 1, 127, 128, 255])
def test_whatever_a_summary_holds_its_gradient_is_finite_and_no_longer_than_its_bytes_allow(fill: int):
    for length in range(65):
        gradient_N = ToldDerivatives.read(bytes([fill]) * length).gradient(LAYOUT)
        assert gradient_N.shape == (215,)
        assert float(gradient_N.abs().max()) <= max(0, length - 12) * LARGEST_LEVEL * (1 + 1e-6)


def test_a_gradient_is_the_sum_of_what_each_byte_says_along_its_direction():
    """The numbers go on from 0 after the last."""
    told = ToldDerivatives(9, (1 << 32) - 1, bytes([byte_of(2.0), 0, byte_of(-0.5)]))
    wanted_N = 2 * Direction(9, (1 << 32) - 1).over(LAYOUT) - Direction(9, 1).over(LAYOUT) / 2
    assert torch.equal(told.gradient(LAYOUT), wanted_N)


# ---- what is told of inner steps, what a round makes of it, and what does not go with it ----

OF_LEARNERS = {spec.name: spec.shape for spec in SCHEMA.fragments[0].parameters}
GOAL_N = torch.linspace(-1, 1, NUMEL)


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def told_by(run: Learners, number: int) -> ToldDerivatives:
    """What a peer would say now."""
    schedule = run.peers[number].schedule
    return ToldDerivatives.read(schedule.method.summary.says(schedule.live, 0, []))


def test_an_inner_step_follows_the_gradient_along_a_direction_and_no_further():
    run = Learners(JustOneByte(), 1, randn(0))
    run.learn({0: -randn(1)})
    told = told_by(run, 0)
    direction_N = Direction(told.seed, told.first).over(OF_LEARNERS)
    along = float(randn(1).double() @ direction_N.double())
    assert told.levels == bytes([byte_of(along)])
    taken_N = randn(0) - run.peers[0].live_N
    torch.testing.assert_close(taken_N, level_of(byte_of(along)) * direction_N, rtol=1e-5, atol=1e-4)


def test_a_round_moves_the_anchor_by_every_peers_derivatives_over_the_root_of_their_number():
    run, wanted_N = Learners(JustOneByte(lr=0.5), 3, randn(0)), randn(0).double()
    for number, steps in ((0, 3), (1, 1), (2, 5)):
        run.peers[number].schedule.timing.interval = steps  # all of them count
        for step in range(steps):
            run.learn({number: -0.1 * randn(10 * number + step)})
    for number in range(3):
        told = told_by(run, number)
        for place, byte in enumerate(told.levels):
            direction_N = Direction(told.seed, told.first + place).over(OF_LEARNERS).double()
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
    for number in range(MOST_DERIVATIVES + 3):
        run.learn({0: 0.001 * randn(number)})
    told = told_by(run, 0)
    assert (told.first, len(told.levels)) == (3, MOST_DERIVATIVES)


@pytest.mark.parametrize(("missed", "told"), [(0, 12), (2, 4)])
def test_after_an_absence_the_newest_are_told_as_many_as_inner_steps_count(missed: int, told: int):
    """All were told of an absence that counted as one round's steps."""
    run = Learners(JustOneByte(), 1, randn(0))
    peer = run.peers[0]
    peer.schedule.timing.interval = 4 if missed else 12
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
    assert [(away.steps, away.counted) for away in run.peers[0].schedule.absences] == [(2, 1)]


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
    _, taken_N = forget_sent(run.peers[0].replica, offered.record, offered.frames, SIGNERS[0].peer)
    assert taken_N.all()


def distance(peers: int, rounds: int = 60) -> float:
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
    change_N = method.rebuilt(one, OF_LEARNERS)
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
