"""What is sent is held until it is encoded, and made again for who asks after that."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from decentral.compressors import Nothing, parse_compressor
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.sparseloco import SparseLoCo
from decentral.parameters import schema_of
from decentral.replica.codec import Codec, Encoded
from decentral.replica.contribution import ROUNDS, Contribution, Outbox
from decentral.replica.measures import Sample
from decentral.replica.replica import Replica
from decentral.wire.frames import FrameKind
from decentral.wire.keys import Signer
from decentral.wire.messages import ReducePlan
from tests.kit.learners import Learners
from tests.kit.machines import START, A, B, record
from tests.kit.replicas import NUMEL

STEP = torch.linspace(-1, 1, NUMEL)


class Halved(SparseLoCo):
    """Sends half of its change."""

    __slots__ = ()

    def contribute(self, anchor_N: Tensor, local_N: Tensor) -> Tensor:
        return (anchor_N - local_N) * 0.5


def contribution_of(method: SparseLoCo) -> Contribution:
    run = Learners(method, 2, torch.full((NUMEL,), 3.0))
    run.learn({0: STEP, 1: STEP})
    peer = run.peers[0]
    made = peer.schedule.take(peer.model, 0, peer.anchor_N, b"", 1, outer_step=0)
    assert made is not None
    return made


def test_a_change_is_let_go_and_comes_back_bit_for_bit() -> None:
    made = contribution_of(SparseLoCo())
    before_N, sample = made.gradient_N.clone(), Sample(NUMEL)
    made.let_go()
    assert made.sent_N is None
    assert torch.equal(made.change_at(sample), sample.of(before_N))
    assert made.sent_N is None, "a look at a few places makes no vector"
    assert torch.equal(made.gradient_N, before_N)


def test_what_a_method_made_itself_is_kept() -> None:
    made = contribution_of(Halved())
    before_N = made.gradient_N.clone()
    made.let_go()
    assert torch.equal(made.gradient_N, before_N)
    assert torch.equal(made.change_at(Sample(NUMEL)), before_N)


# ---- test outbox ----
#
# What a peer remembers of its own contributions, should their rounds be given up.

CODEC = Codec(parse_compressor("none"))
SHAPES = ((4, 2),)


def gathered(value: float, fragment: int = 0, kind: FrameKind = FrameKind.CONTRIBUTION) -> Contribution:
    gradient = torch.full((8,), value)
    made = Contribution(fragment, START.hash, -gradient, gradient, 3, 30, kind=kind)
    made.encoded = CODEC.encode(gradient, {}, SHAPES)
    return made


def named_in(outbox: Outbox, round_: int, contribution: Contribution) -> None:
    outbox.add(replace(record(START, {A: 1}), round=round_), contribution)


def test_to_remember_a_contribution_does_not_make_its_change_again():
    """It was made for its length alone: 20 ms of the event loop with 31 million parameters, before the training side
    heard of the commit.
    """
    made = gathered(1.0)
    made.sent_N, made.base_N = None, torch.zeros(8)  # as after ``let_go``
    outbox = Outbox(CODEC, 1 << 20)
    named_in(outbox, 1, made)
    assert made.sent_N is None
    assert torch.equal(outbox.reclaim(0, 0, SHAPES).gradient_N, torch.ones(8))


def test_the_sum_over_the_rounds_since_the_fork_is_owed_fragment_by_fragment():
    outbox = Outbox(CODEC, 1 << 20)
    for round_ in range(1, 6):
        named_in(outbox, round_, gathered(float(round_), fragment=round_ % 2))
    owed = outbox.reclaim(2, 1, SHAPES)
    assert owed is not None
    assert torch.equal(owed.gradient_N, torch.full((8,), 8.0))
    assert (owed.steps, owed.rounds) == (6, 2)
    assert outbox.reclaim(5, 0, SHAPES) is None
    outbox.forget_after(3)
    assert outbox.reclaim(3, 1, SHAPES) is None
    assert outbox.reclaim(2, 1, SHAPES).rounds == 1


def test_what_only_a_summary_told_is_not_owed():
    """An empty frame was read as a change of zero: rounds counted as kept whose progress was lost."""
    codec = Codec(Nothing())
    outbox, made = Outbox(codec, 1 << 20), gathered(1.0)
    made.encoded = codec.encode(made.gradient_N, {}, SHAPES)
    named_in(outbox, 1, made)
    assert outbox.reclaim(0, 0, SHAPES) is None


def test_what_was_cut_for_a_reduce_is_put_together_again():
    outbox = Outbox(CODEC, 1 << 20)
    gradient = torch.arange(8.0)
    made = Contribution(0, START.hash, -gradient, gradient, 3, 30)
    bodies = {0: gradient[:5], 1: gradient[5:]}
    made.slices[7] = {part: Encoded(CODEC.encode(t, {}, ((t.numel(),),)).body, {}) for part, t in bodies.items()}
    taken = record(START, {A: 1})
    outbox.add(replace(taken, plan=7, partition=((A, 0, 5), (B, 5, 8)), contributors=taken.frames), made)
    owed = outbox.reclaim(0, 0, SHAPES)
    assert owed is not None
    assert torch.equal(owed.gradient_N, gradient)


def test_what_is_remembered_are_the_frames_own_bytes():
    """A body beside its frame would be there twice for 64 rounds, and as large as it could have become."""
    signer, gradient = Signer(bytes(32)), torch.randn(8)
    whole = gathered(1.0)
    frame = whole.frame(START, signer)
    assert whole.encoded.body == frame.body
    assert whole.encoded.body.obj is frame.data
    schema = schema_of({"weight": torch.zeros(8, requires_grad=True)})
    replica = Replica(schema, [torch.zeros(8)], DiLoCo(), CODEC, CODEC)
    cut = Contribution(0, START.hash, -gradient, gradient, 3, 30)
    plan = ReducePlan(epoch=0, round=1, ballot=0, number=7, contributors=(), partition=((A, 0, 5), (B, 5, 8)))
    slice_ = cut.slice_frame(1, plan, START, replica, signer)
    assert cut.slices[7][1].body.obj is slice_.data


def test_memory_is_bounded_by_rounds_and_by_bytes_and_merges_are_not_kept():
    outbox = Outbox(CODEC, 1 << 20)
    for round_ in range(3 * ROUNDS):
        named_in(outbox, round_, gathered(1.0))
    owed = outbox.reclaim(0, 0, SHAPES)
    assert owed is not None
    assert owed.rounds == ROUNDS
    small = Outbox(CODEC, 3 * len(gathered(1.0).encoded.body))
    for round_ in range(9):
        named_in(small, round_, gathered(1.0))
        named_in(small, 100 + round_, gathered(1.0, kind=FrameKind.MERGE))
    assert small.reclaim(-1, 0, SHAPES).rounds == 3
    assert small.nbytes <= small.capacity
