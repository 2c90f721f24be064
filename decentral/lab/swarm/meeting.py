"""One round that all agree on: the contributions of some peers become a record, and one outer step for everybody.

What peers make, sign and encode is as in a shipped round. All hold the same anchor and state, so the outer step is made
once and installed everywhere. A reduce has one owner, whose result is compressed once as every owner's is: who owns
which range changes no value where blocks do not cross ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.reduce import owned_parts
from decentral.lab.swarm.lab_peer import LabPeer
from decentral.replica.codec import range_shapes
from decentral.replica.contribution import Contribution, header_after
from decentral.replica.outer_step import OuterStep
from decentral.replica.reduction import Reduction
from decentral.rounds.updates import CommittedUpdate
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.messages import FrameRef, Record, ReducePlan

__all__ = ["Met", "body_of", "first_head", "gathered", "reduced", "slice_of"]

Offered = Mapping[int, Contribution]  # by rank

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Met:
    """A round that is over: it is installed on every replica, and waits for each live model."""

    head: Head  # after it
    step: OuterStep
    nbytes: Mapping[int, int]  # bytes of the body that each contributor made, by rank


def first_head(peers: Sequence[LabPeer]) -> Head:
    """The chain of a run that all have joined, and in which nothing was decided yet."""
    first = peers[0]
    run, schema = first.manifest.digest, first.live.schema.digest
    genesis = Head.genesis(run, schema, first.replica.digest, first.signer.peer)
    return replace(genesis, members=tuple(peer.signer.peer for peer in peers))


def body_of(peer: LabPeer, made: Contribution) -> int:
    """Bytes of the body of a gather's contribution, which is encoded once."""
    if made.encoded is None:
        made.encoded = peer.replica.encode(made.fragment, made.gradient_N, made.states, peer.signer.peer)
    return len(made.encoded.body)


def slice_of(peer: LabPeer, made: Contribution) -> int:
    """Bytes of the body that a reduce's one owner gets: made once more when the round is decided, for its plan."""
    numel = peer.replica.numel(made.fragment)
    return len(peer.replica.encode_range(made.fragment, made.gradient_N, 0, numel, states=made.states).body)


def gathered(head: Head, peers: Sequence[LabPeer], offered: Offered) -> Met:
    """Everybody gets every frame."""
    nbytes = {rank: body_of(peers[rank], made) for rank, made in offered.items()}
    frames = {rank: made.frame(head, peers[rank].signer) for rank, made in offered.items()}
    reader = peers[0].replica
    for rank, frame in frames.items():
        encoded = offered[rank].encoded
        reader.contents.unpacked.add(frame, () if encoded is None else encoded.payloads)
    refs = [_ref(head, peers[rank], made, frames[rank].hash) for rank, made in offered.items()]
    record = _record(head, next(iter(offered.values())).fragment, refs)
    step = reader.outer_step(record, {frame.hash: frame for frame in frames.values()})
    reader.contents.unpacked.forget_before(record.round)
    return Met(_decided(head, peers, record, step, offered, {}), step, nbytes)


def reduced(head: Head, peers: Sequence[LabPeer], offered: Offered) -> Met:
    """One owner gets every contribution, and everybody its result."""
    owner = peers[min(offered)]
    fragment = offered[owner.rank].fragment
    contributors = tuple(_ref(head, peers[rank], made, made.commitment(head)) for rank, made in offered.items())
    cut = ((owner.signer.peer, 0, owner.replica.numel(fragment)),)
    plan = ReducePlan(head.epoch, head.round + 1, 0, 0, contributors, cut)
    slices = {
        rank: made.slice_frame(0, plan, head, peers[rank].replica, peers[rank].signer) for rank, made in offered.items()
    }
    mine = {peers[rank].signer.peer: _decoded(owner, frame, plan) for rank, frame in slices.items()}
    result, left = _result(head, owner, fragment, plan, mine)
    ref = FrameRef(owner.signer.peer, result.hash, 0, 1, 1)
    record = _record(head, fragment, [ref], plan)
    step = owner.replica.outer_step(record, {result.hash: result}, {result.hash: _decoded(owner, result, plan)})
    nbytes = {rank: len(frame.body) for rank, frame in slices.items()}
    return Met(_decided(head, peers, record, step, offered, left), step, nbytes)


def _decoded(owner: LabPeer, frame: Frame, plan: ReducePlan) -> Tensor:
    _, start, stop = plan.partition[0]
    channels = frame.header.channels
    return owner.replica.codec.decode(frame.body, range_shapes(start, stop) * channels, channels)


def _result(
    head: Head, owner: LabPeer, fragment: int, plan: ReducePlan, slices: Mapping[bytes, Tensor]
) -> tuple[Frame, dict[bytes, Tensor]]:
    """The owner's result, and what it leaves to owe by the result's hash."""
    replica, me = owner.replica, owner.signer.peer
    assert list(owned_parts(plan, me)) == [0], "one owner has all"
    weights = replica.weights(plan.contributors, head.outer_step)
    beside = replica.state_weights(plan.contributors, head.outer_step, weights)
    outside = replica.outside(plan.contributors, head.outer_step)
    owed_N = replica.owed(fragment)
    made = Reduction(plan, 0, dict(slices)).result(replica.codec, weights, owed_N, beside=beside, outside=outside)
    header = header_after(head, FrameKind.RESULT, fragment, me, 0, 1, plan.number)
    frame = seal(replace(header, states=len(beside)), made.body, owner.signer)
    return frame, {frame.hash: made.feedback["debt"]} if "debt" in made.feedback else {}


def _ref(head: Head, peer: LabPeer, made: Contribution, name: bytes) -> FrameRef:
    """``name``: what the offer names."""
    return FrameRef(peer.signer.peer, name, 0, made.steps, made.tokens, made.based_in(head), made.summary)


def _record(head: Head, fragment: int, refs: Sequence[FrameRef], plan: ReducePlan | None = None) -> Record:
    assert head.anchor is not None, "every step is installed at once"
    told = (plan.contributors, plan.partition) if plan is not None else ((), ())
    return Record(
        head.run, head.epoch, head.round + 1, head.outer_step, fragment, 0, head.hash, head.anchor, head.members,
        tuple(refs), *told, head.members, False,
    )  # fmt: skip


def _decided(
    head: Head,
    peers: Sequence[LabPeer],
    record: Record,
    step: OuterStep,
    offered: Offered,
    left: Mapping[bytes, Tensor],
) -> Head:
    """Book the record with every peer, as `decentral.rounds.bookkeeping` does; the head after it."""
    for peer in peers:
        mine, owed_N = offered.get(peer.rank), peer.replica.owed(record.fragment)
        if mine is not None:
            peer.replica.feedback[record.fragment] = mine.feedback_after(record)
        peer.replica.owe_after(record, peer.signer.peer, left, owed_N)
        peer.replica.install(step)
        peer.replica.senders.keep_only(record.next_members)
        moved = (record.fragment, step.before_N, step.after_N, mine)
        state = step.state if peer.schedule.method.inner else {}
        peer.backlog.append(
            CommittedUpdate(
                record, record.hash, *moved, state=state, channels=step.channels, unmoved=bool(step.unmoved)
            )
        )
    return replace(head.extended(record), anchor=peers[0].replica.digest)
