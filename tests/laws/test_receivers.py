"""Where receivers remember, all hold the same of every sender, and it holds that of itself: whoever comes and goes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.compressors.base import add_flat
from decentral.optimizers import make_aggregation
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.contribution import encode_whole
from decentral.wire.frames import seal
from tests.kit.learners import Learners, Offered
from tests.kit.replicas import NUMEL, SIGNERS
from tests.kit.tables import method_of

ALL = (0, 1, 2)
SPARSE = "topk(k=8, chunk=64)"
each_mechanism = pytest.mark.parametrize("feedback", ["ef21", "econtrol(eta=0.01)"])
each_chain = pytest.mark.parametrize("chain", [SPARSE, f"{SPARSE} >> signmag2", "int8(block=64)"])


def randn(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def codec_of(chain: str, feedback: str) -> Codec:
    return Codec(parse_compressor(chain), parse_feedback(feedback))


def sent_of(run: Learners, n: int, holder: int = 0) -> Tensor | None:
    return run.peers[holder].replica.senders.of(0, SIGNERS[n].peer).get("sent")


class Shadow:
    """What the senders would know if each kept its own books, and what their frames held in all, in float64."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.states: dict[int, dict[str, Tensor]] = {}
        self.came: dict[int, Tensor] = {}

    def book(self, run: Learners, offered: Offered) -> None:
        shapes = run.peers[0].replica.shapes(0)
        for n, made in offered.made.items():
            sending = self.codec.feedback.send(self.codec.compressor, made.gradient_N, self.states.get(n, {}), shapes)
            self.states[n] = sending.state
            came_N = torch.zeros(NUMEL)
            add_flat(self.codec.compressor, came_N, sending.payloads)
            self.came[n] = self.came.get(n, torch.zeros(NUMEL, dtype=torch.float64)) + came_N.double()

    def forget(self, n: int) -> None:
        """It is no member any more; what it owes, if it owes anything, is its own."""
        self.states[n] = {name: one for name, one in self.states[n].items() if name != "sent"}
        self.came.pop(n)

    def check(self, run: Learners) -> None:
        for n in range(len(SIGNERS)):
            held_N = sent_of(run, n)
            assert (held_N is None) == ("sent" not in self.states.get(n, {}))
            if held_N is not None:
                assert torch.equal(held_N.view(torch.int32), self.states[n]["sent"].view(torch.int32))
                torch.testing.assert_close(held_N.double(), self.came[n], rtol=1e-5, atol=1e-5)


def check_alike(run: Learners) -> None:
    first, *others = (dict(peer.replica.shared_tensors()) for peer in run.peers)
    for other in others:
        assert set(other) == set(first)
        assert all(torch.equal(first[name].view(torch.int32), other[name].view(torch.int32)) for name in first)


def one_round(run: Learners, shadow: Shadow, present: Sequence[int], named: Sequence[int], seed: int) -> None:
    """``present`` offer, a record names ``named`` of them; the others' frames are as if they had never been."""
    run.learn({n: 0.01 * randn(10 * seed + n) + 0.02 * randn(1000 + n) for n in present})
    offered = run.offer(present)
    peers = {SIGNERS[n].peer for n in named}
    record = dataclasses.replace(
        offered.record, frames=tuple(ref for ref in offered.record.frames if ref.peer in peers)
    )
    committed = Offered(record, offered.frames, {n: offered.made[n] for n in named})
    shadow.book(run, committed)
    run.commit(committed)


@each_mechanism
@each_chain
def test_all_hold_the_same_bits_over_50_rounds_with_absences_a_leaver_and_a_joiner(chain: str, feedback: str) -> None:
    codec, chance = codec_of(chain, feedback), random.Random(0)
    run, shadow = Learners(method_of("sparseloco"), 3, randn(0), codec), Shadow(codec)
    members = list(ALL)
    for number in range(50):
        if number == 20:  # the third leaves with the record of this round
            run.next_members = tuple(signer.peer for signer in SIGNERS[:2])
        if number == 35:  # and comes in again with that of this one
            run.next_members = tuple(signer.peer for signer in SIGNERS)
        long_away = {n for n in members if run.peers[n].schedule.progress[0].missed >= 2}  # what it learnt is given up
        present = [n for n in members if n in long_away or chance.random() < 0.8] or [0]
        named = [n for n in present if n in long_away or chance.random() < 0.8] or present[:1]
        one_round(run, shadow, present, named, number)
        if number == 20:
            members, _ = [0, 1], run.peers.pop()
            shadow.forget(2)
        if number == 35:
            newcomer = run.begun(2)
            newcomer.load(load(save(dict(run.peers[0].replica.shared_tensors()))))
            run.peers.append(newcomer)
            shadow.states[2], members = {}, list(ALL)
        check_alike(run)
        shadow.check(run)
    assert all(sent_of(run, n, holder) is not None for n in ALL for holder in ALL)


@each_mechanism
def test_a_peer_that_resumes_sends_what_it_would_have_sent(feedback: str) -> None:
    codec = codec_of(SPARSE, feedback)
    run, shadow = Learners(method_of("sparseloco"), 3, randn(0), codec), Shadow(codec)
    for number in range(4):
        one_round(run, shadow, ALL, ALL, number)
    run.learn({n: 0.01 * randn(n) for n in ALL})
    made = run.offer(ALL).made[0]
    replica = run.peers[0].replica
    resumed = run.begun(0).replica
    resumed.load(load(save({**replica.shared_tensors(), **replica.own_tensors()})))
    again = encode_whole(resumed, 0, made.gradient_N, me=SIGNERS[0].peer)
    assert bytes(again.body) == bytes(made.encoded.body)
    assert not any(name.endswith("/sent") for name in replica.own_tensors()), "it is kept once, for all"


@each_mechanism
@pytest.mark.parametrize("rule", ["mean", "norm_clip"])
def test_an_outer_step_is_pure(feedback: str, rule: str) -> None:
    codec = codec_of(SPARSE, feedback)
    run = Learners(method_of("sparseloco"), 3, randn(0), codec, make_aggregation(rule, {}))
    shadow = Shadow(codec)
    one_round(run, shadow, ALL, ALL, 0)
    run.learn({n: 0.01 * randn(n) for n in ALL})
    offered, replica = run.offer(ALL), run.peers[0].replica
    before = {name: tensor.clone() for name, tensor in replica.shared_tensors().items()}
    first, second = (outer_step(replica, offered.record, offered.frames) for _ in range(2))
    assert first.digest == second.digest
    for peer, state in first.kept.items():
        assert torch.equal(state["sent"], second.kept[peer]["sent"])
    after = replica.shared_tensors()
    assert set(after) == set(before)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("size", "wanted"), [(1.0, (1.1 + 1.1 + 1.0) / 3), (10.0, 1.1)])
def test_norms_that_clip_are_those_of_the_estimates(size: float, wanted: float) -> None:
    """A newcomer's first frame is ten times as long as the others' second ones, and its estimate no longer than theirs:
    it counts in full. One whose estimate is ten times as long counts as a typical one.
    """
    clip, gradient_N = make_aggregation("norm_clip", {}), randn(0)
    run = Learners(method_of("sparseloco lr=1"), 3, torch.zeros(NUMEL), codec_of("none", "ef21"), clip)
    run.learn(dict.fromkeys((0, 1), -gradient_N))
    run.meet((0, 1))
    run.learn({0: -1.1 * gradient_N, 1: -1.1 * gradient_N, 2: -size * gradient_N})
    offered, replica = run.offer(ALL), run.peers[0].replica
    step = outer_step(replica, offered.record, offered.frames)
    torch.testing.assert_close(step.before_N - step.after_N, wanted * gradient_N, rtol=1e-3, atol=1e-3)
    norms = {peer: measure.norm for peer, measure in step.measures.items()}
    assert norms[SIGNERS[2].peer] == pytest.approx(size * float(gradient_N.norm()), rel=1e-3), "and so it is judged"


@each_mechanism
def test_one_who_sends_beyond_float32_in_all_is_taken_for_new_in_each_round_and_the_others_go_on(feedback: str) -> None:
    """Its frames are finite and their sum is not: every round moved nothing, and nobody was remembered, for ever."""
    codec, clip = codec_of("none", feedback), make_aggregation("norm_clip", {})
    run = Learners(method_of("sparseloco lr=1"), 3, torch.zeros(NUMEL), codec, clip)
    huge_N = torch.full((NUMEL,), 2e38)
    for number in range(5):
        run.learn({n: -0.01 * randn(10 * number + n) for n in ALL})
        offered = _with_frame(run, run.offer(ALL), 2, huge_N)
        before_N = run.peers[0].anchor_N
        step = outer_step(run.peers[1].replica, offered.record, offered.frames)
        run.commit(offered)
        assert not step.unmoved
        assert 0 < float((run.peers[0].anchor_N - before_N).norm()) < 0.02 * NUMEL**0.5
        check_alike(run)
        kept_N, other_N = sent_of(run, 2), sent_of(run, 0)
        assert kept_N is not None
        assert torch.equal(kept_N, huge_N)
        assert other_N is not None
        torch.testing.assert_close(other_N, offered.made[0].gradient_N, rtol=1e-4, atol=1e-6)


def _with_frame(run: Learners, offered: Offered, n: int, value_N: Tensor) -> Offered:
    """What was offered, but for one peer's frame, which holds these values whatever it sent before."""
    (old,) = (ref for ref in offered.record.frames if ref.peer == SIGNERS[n].peer)
    body = run.codec.encode(value_N, {}, run.peers[n].replica.shapes(0)).body
    frame = seal(offered.frames[old.frame].header, body, SIGNERS[n])
    refs = tuple(dataclasses.replace(ref, frame=frame.hash) if ref is old else ref for ref in offered.record.frames)
    record = dataclasses.replace(offered.record, frames=refs)
    return Offered(record, offered.frames | {frame.hash: frame}, offered.made)


@pytest.mark.parametrize(
    ("feedback", "least", "most"), [("none", 0.4, 0.6), ("ef21", 0.0, 1e-3), ("econtrol(eta=0.02)", 0.0, 1e-2)]
)
def test_peers_whose_optima_differ_reach_the_common_one_where_a_biased_compressor_alone_stalls(
    feedback: str, least: float, most: float
) -> None:
    """Some values are pulled apart, more than anything else is pulled at any peer, and these pulls cancel."""
    apart_N = torch.zeros(NUMEL)
    apart_N[::4] = 9.0
    centres = [apart_N + 0.5, 0.5 - apart_N]
    run = Learners(method_of("sparseloco lr=1"), 2, torch.zeros(NUMEL), codec_of("topk(k=1, chunk=16)", feedback))
    for _ in range(200):
        for peer in run.peers:
            peer.model.write(0, peer.anchor_N)
        run.learn({n: 0.1 * (centres[n] - run.peers[n].anchor_N) for n in (0, 1)})
        run.meet((0, 1))
    lost = float((run.peers[0].anchor_N - 0.5).abs().max())
    assert least <= lost <= most
