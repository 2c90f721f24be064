"""What an owner of a reduce owes: booked with its results, passed on when its range moves, never counted twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decentral.compressors import parse_compressor, parse_feedback
from decentral.consensus.chain import Head
from decentral.manifest import preset_manifest
from decentral.node.node import make_replica
from decentral.optimizers.diloco import DiLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import slice_weights
from decentral.replica.codec import Codec
from decentral.replica.contents import NO_TAIL
from decentral.replica.contribution import Contribution, encode_range
from decentral.replica.reduction import Reduction, Slices
from decentral.replica.replica import OWED, Replica, in_own_units, owed_after
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record, ReducePlan

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(2)), key=lambda signer: signer.peer)
A, B = (signer.peer for signer in SIGNERS)
START = Head.genesis(bytes(32), bytes(32), bytes(32), A)
FRAME_A, FRAME_B = b"a" * 32, b"b" * 32


def contributor(peer: bytes, tokens: int = 1) -> FrameRef:
    return FrameRef(peer, bytes(32), 0, 1, tokens)


def record(*contributors: FrameRef) -> Record:
    """A owns [0, 4), B owns [4, 8)."""
    frames = (FrameRef(A, FRAME_A, 0, 1, 1), FrameRef(B, FRAME_B, 1, 1, 1))
    return Record(
        START.run, 0, 1, 1, 0, 0, START.hash, bytes(32), (A, B), frames,
        contributors, ((A, 0, 4), (B, 4, 8)), (A, B), False,
    )  # fmt: skip


def sparse_replica(weighting: str = "equal") -> Replica:
    codec = Codec(parse_compressor("topk(k=1, chunk=4)"), parse_feedback("ef(beta=1)"))
    schema = schema_of({"weight": torch.zeros(8, requires_grad=True)})
    return Replica(schema, [torch.zeros(8)], DiLoCo(), codec, codec, weighting=weighting)


LEFT = {FRAME_A: torch.full((4,), 2.0)}


@pytest.mark.parametrize(
    ("contributors", "left", "owed"),
    [
        ((A, B), LEFT, [2.0] * 4 + [0.0] * 4),  # a result of ours leaves what it lost, and our slices took the rest
        ((B,), LEFT, [2.0] * 4 + [1.0] * 4),  # who contributed nothing keeps what it owes of others' ranges
        ((B,), {}, [0.0] * 4 + [1.0] * 4),  # what a result of an earlier life left: no more, rather than twice
    ],
)
def test_what_an_owner_owes_is_booked_with_its_results_in_a_new_tensor(contributors, left, owed):
    old = torch.ones(8)
    found = owed_after(old, record(*map(contributor, contributors)), A, left, 8)
    assert found.tolist() == owed
    found.fill_(7.0)
    assert torch.equal(old, torch.ones(8))
    assert LEFT[FRAME_A].tolist() == [2.0] * 4


def test_a_gather_and_a_peer_that_never_owed_change_nothing():
    gathered = replace(record(), frames=(FrameRef(A, FRAME_A, 0, 1, 1),), partition=())
    assert owed_after(torch.ones(8), gathered, A, {}, 8) is None
    assert owed_after(None, record(contributor(A)), A, {}, 8) is None


@pytest.mark.parametrize(("weighting", "units"), [("equal", 2.0), ("tokens", 4.0)])
def test_what_is_passed_on_is_in_the_mean_as_much_as_was_owed_of_it(weighting: str, units: float):
    replica = sparse_replica(weighting)
    contributors = (contributor(A, 1), contributor(B, 3))
    weights = slice_weights(replica, contributors, 0)
    assert in_own_units(contributors, weights, A) == units
    replica.feedback[0] = {OWED: torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 3.0, 0.0])}
    made = Contribution(0, START.hash, torch.zeros(8), torch.zeros(8), 1, 1)
    plan = ReducePlan(0, 1, 0, 0, contributors, ((A, 0, 4), (B, 4, 8)))
    for part in (0, 1):
        made.slice_frame(part, plan, START, replica, SIGNERS[0])
    bodies = [made.slices[0][part].body for part in (0, 1)]
    own, passed_on = (replica.codec.decode(body, ((4,),)) for body in bodies)
    assert own.tolist() == [0.0] * 4
    assert (passed_on * weights[0] / sum(weights)).tolist() == [0.0, 0.0, 3.0, 0.0]
    assert OWED not in made.feedback_after(record(*contributors)), "senders' and owners' books are kept apart"


def test_owners_owe_nothing_where_the_manifest_asks_for_no_feedback():
    assert str(Codec(parse_compressor("sign")).for_results().feedback) == "none"
    assert str(Codec(parse_compressor("sign"), parse_feedback("dgc")).for_results().feedback) == "ef(beta=1.0)"


def test_a_checkpoint_holds_what_an_owner_owes():
    replica, other = sparse_replica(), sparse_replica()
    replica.feedback[0] = {"debt": torch.ones(8), OWED: torch.full((8,), 2.0)}
    other.load({**replica.shared_tensors(), **replica.own_tensors()})
    assert torch.equal(other.owed_as_owner(0), torch.full((8,), 2.0))
    other.load(other.shared_tensors())
    assert other.owed_as_owner(0) is None


def test_momentum_does_not_repeat_what_an_owner_hands_on():
    """It went in as gradient, and arrived 3.5 times over under dgc behind a sparse compressor."""
    schema = schema_of({"weight": torch.nn.Parameter(torch.zeros(64))})
    manifest = preset_manifest("sparseloco", compressor={"chain": "topk(k=1, chunk=16)", "feedback": "dgc"})
    replica = make_replica(manifest, schema, [torch.zeros(64)])
    owed_N = torch.arange(1.0, 65.0)
    replica.feedback[0] = {OWED: owed_N}
    made = encode_range(replica, 0, torch.zeros(64), 0, 64, passed_on=2.0)
    assert not made.feedback["velocity"].any()
    sent_N = replica.codec.decode(made.body, ((64,),))
    assert torch.equal(sent_N + made.feedback["debt"], 2.0 * owed_N)


def test_who_counts_nothing_can_pass_nothing_on():
    assert in_own_units((contributor(A), contributor(B)), (0.0, 1.0), A) == 0.0


def test_a_reduce_in_which_nobody_counts_ends_with_zeros_and_owes_what_it_owed():
    """Else an owner makes no result, and the round is planned again without end."""
    codec = Codec(parse_compressor("int8"), parse_feedback("ef"))
    plan = ReducePlan(0, 1, 0, 0, (contributor(A), contributor(B)), ((A, 0, 4), (B, 4, 8)))
    channels_CN = torch.ones(2, 4)
    reduction = Reduction(plan, 0, {A: channels_CN.flatten(), B: channels_CN.flatten()})
    owed_N = torch.full((4,), 0.25)
    made = reduction.result(codec, [0.0, 0.0], owed_N)
    assert not codec.decode(made.body, ((4,), (4,))).any()
    assert torch.equal(made.feedback["debt"], owed_N)


# ---- slices as the owners find them ----


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
