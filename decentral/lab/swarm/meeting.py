"""One round that all agree on: the contributions of some peers become a record, and one outer step for everybody.

What peers make, sign and encode is as in a shipped round. All hold the same anchor and state, so the outer step is made
once and installed everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.lab.swarm.lab_peer import LabPeer
from decentral.lab.swarm.reducing import plan_of, results, slices_of
from decentral.replica.contribution import Contribution
from decentral.replica.replica import OuterStep
from decentral.rounds.local_state import CommittedUpdate
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
    """Bytes of the slices of a reduce, as one body: made once more when the round is decided, for its plan."""
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
    """Each owner gets its part of every contribution, and everybody its result."""
    fragment = next(iter(offered.values())).fragment
    contributors = [_ref(head, peers[rank], made, made.commitment(head)) for rank, made in offered.items()]
    plan = plan_of(head, contributors, peers[0].replica.numel(fragment))
    slices = slices_of(plan, head, peers, offered)
    found = list(results(plan, head, fragment, peers, slices))
    record = _record(head, fragment, [one.ref for one in found], plan)
    frames, holds = {one.frame.hash: one.frame for one in found}, {one.frame.hash: one.holds for one in found}
    step = peers[0].replica.outer_step(record, frames, holds)
    left = {one.frame.hash: one.left for one in found if one.left is not None}
    nbytes = {rank: sum(len(frame.body) for frame in frames) for rank, frames in slices.items()}
    return Met(_decided(head, peers, record, step, offered, left), step, nbytes)


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
    """Book the record with every peer, as `decentral.rounds.commits` does; the head after it."""
    for peer in peers:
        mine, owed_N = offered.get(peer.rank), peer.replica.owed(record.fragment)
        if mine is not None:
            peer.replica.feedback[record.fragment] = mine.feedback_after(record)
        keeps = mine is not None and (record.round, record.plan) in mine.hands_on_nothing
        peer.replica.owe_after(record, peer.signer.peer, left, owed_N, keeps)
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
