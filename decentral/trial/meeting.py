"""Rounds of replicas in one process: of all, whose contributions become a record and one outer step, and of pairs.

What peers make, sign and encode is as in a shipped round. Where all agree they hold the same anchor and state, so the
outer step is made once and installed everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.chain import Head
from decentral.optimizers.aggregation.base import Sent
from decentral.optimizers.base import Part
from decentral.replica.apply import outer_step, outside_of, slice_state_weights, slice_weights
from decentral.replica.codec import range_shapes
from decentral.replica.contribution import Contribution, encode_range, encode_whole, header_after
from decentral.replica.measures import Measure
from decentral.replica.pair_step import GossipStep, encode_half, install, step_alone, step_together
from decentral.replica.reduction import Reduction
from decentral.replica.replica import OuterStep, owed_after
from decentral.replica.weights import Unusable, contributors_of, scales_of
from decentral.rounds.local_state import CommittedUpdate
from decentral.rounds.partners import partner_of
from decentral.rounds.reduce import partition
from decentral.trial.replicas import TrialPeer, TrialWorld
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.messages import FrameRef, Record, ReducePlan

__all__ = [
    "Gossiping",
    "Met",
    "Result",
    "Slices",
    "body_of",
    "first_head",
    "gather",
    "plan_of",
    "reduce",
    "results",
    "slice_of",
    "slices_of",
    "step_apart",
    "step_as_pair",
]


# Shape suffix: N = elements of one fragment, flat float32.

Offered = Mapping[int, Contribution]  # by rank


@dataclass(frozen=True, slots=True)
class Met:
    """A round that is over: it is installed on every replica, and waits for each live model."""

    head: Head  # after it
    step: OuterStep
    nbytes: Mapping[int, int]  # bytes of the body that each contributor made, by rank


def first_head(peers: Sequence[TrialPeer]) -> Head:
    """Return the chain of a run that all have joined, and in which nothing was decided yet."""
    first = peers[0]
    run, schema = first.manifest.digest, first.live.schema.digest
    genesis = Head.genesis(run, schema, first.replica.digest, first.signer.peer)
    return replace(genesis, members=tuple(peer.signer.peer for peer in peers))


def body_of(peer: TrialPeer, made: Contribution) -> int:
    """Return the bytes of the body of a gather's contribution, which is encoded once."""
    if made.encoded is None:
        made.encoded = encode_whole(peer.replica, made.fragment, made.gradient_N, made.states, peer.signer.peer)
    return len(made.encoded.body)


def slice_of(peer: TrialPeer, made: Contribution) -> int:
    """Return the bytes of the slices of a reduce, as one body: made again once the round is decided, for its plan."""
    numel = peer.replica.numel(made.fragment)
    return len(encode_range(peer.replica, made.fragment, made.gradient_N, 0, numel, states=made.states).body)


def gather(head: Head, peers: Sequence[TrialPeer], offered: Offered) -> Met:
    """Hold a round in which everybody gets every frame."""
    nbytes = {rank: body_of(peers[rank], made) for rank, made in offered.items()}
    frames = {rank: made.frame(head, peers[rank].signer) for rank, made in offered.items()}
    reader = peers[0].replica
    for rank, frame in frames.items():
        encoded = offered[rank].encoded
        reader.contents.unpacked.add(frame, () if encoded is None else encoded.payloads)
    refs = [_ref(head, peers[rank], made, frames[rank].hash) for rank, made in offered.items()]
    record = _record(head, next(iter(offered.values())).fragment, refs)
    step = outer_step(reader, record, {frame.hash: frame for frame in frames.values()})
    reader.contents.unpacked.forget_before(record.round)
    return Met(_decide(head, peers, record, step, offered, {}), step, nbytes)


def reduce(head: Head, peers: Sequence[TrialPeer], offered: Offered) -> Met:
    """Hold a round in which each owner gets its part of every contribution, and everybody its result."""
    fragment = next(iter(offered.values())).fragment
    contributors = [_ref(head, peers[rank], made, made.commitment(head)) for rank, made in offered.items()]
    plan = plan_of(head, contributors, peers[0].replica.numel(fragment))
    slices = slices_of(plan, head, peers, offered)
    found = list(results(plan, head, fragment, peers, slices))
    record = _record(head, fragment, [one.ref for one in found], plan)
    frames, holds = {one.frame.hash: one.frame for one in found}, {one.frame.hash: one.holds for one in found}
    step = outer_step(peers[0].replica, record, frames, holds)
    left = {one.frame.hash: one.left for one in found if one.left is not None}
    nbytes = {rank: sum(len(frame.body) for frame in frames) for rank, frames in slices.items()}
    return Met(_decide(head, peers, record, step, offered, left), step, nbytes)


def _ref(head: Head, peer: TrialPeer, made: Contribution, name: bytes) -> FrameRef:
    """``name``: what the offer names."""
    return FrameRef(peer.signer.peer, name, 0, made.steps, made.tokens, made.base_step(head), made.summary)


def _record(head: Head, fragment: int, refs: Sequence[FrameRef], plan: ReducePlan | None = None) -> Record:
    assert head.anchor is not None, "every step is installed at once"
    told = (plan.contributors, plan.partition) if plan is not None else ((), ())
    return Record(
        head.run, head.epoch, head.round + 1, head.outer_step, fragment, 0, head.hash, head.anchor, head.members,
        tuple(refs), *told, head.members, False,
    )  # fmt: skip


def _decide(
    head: Head,
    peers: Sequence[TrialPeer],
    record: Record,
    step: OuterStep,
    offered: Offered,
    left: Mapping[bytes, Tensor],
) -> Head:
    """Book the record with every peer, as `decentral.rounds.commits` does; the head after it."""
    for peer in peers:
        mine, owed_N = offered.get(peer.rank), peer.replica.owed_as_owner(record.fragment)
        if mine is not None:
            peer.replica.feedback[record.fragment] = mine.feedback_after(record)
        keeps = mine is not None and (record.round, record.plan) in mine.keeps_owed
        numel = peer.replica.numel(record.fragment)
        peer.replica.owe(record.fragment, owed_after(owed_N, record, peer.signer.peer, left, numel, keeps))
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


# ---- a reduce ----
#
# The owners of a shipped round where all uplinks are equal, up to eight, with their parts.
#
# Who owns what changes values: an owner knows its part of each contribution and no more, so a rule that clips by norms
# clips part by part, and what compressing a result loses is owed by the one who made it.

_MOST_OWNERS = 8  # a shipped round has more; 24 of 64 peers took 2.5 ms for a replica's step, twice its gradients

Slices = Mapping[int, Sequence[Frame]]  # by rank, a frame for each part


@dataclass(frozen=True, slots=True)
class Result:
    """The result that an owner made of its part."""

    frame: Frame
    holds: Tensor  # flat float32, all channels
    left: Tensor | None  # that the owner owes once a record names it

    @property
    def ref(self) -> FrameRef:
        """Return the reference by which a record names it."""
        header = self.frame.header
        return FrameRef(header.sender, self.frame.hash, header.part, 1, 1)


def plan_of(head: Head, contributors: Sequence[FrameRef], numel: int) -> ReducePlan:
    """Plan who owns what of a fragment of ``numel`` elements."""
    cut = partition(numel, sorted(ref.peer for ref in contributors)[:_MOST_OWNERS])
    return ReducePlan(head.epoch, head.round + 1, 0, 0, tuple(contributors), cut)


def slices_of(plan: ReducePlan, head: Head, peers: Sequence[TrialPeer], offered: Mapping[int, Contribution]) -> Slices:
    """Return what each contributor sends to each owner."""
    parts = range(len(plan.partition))
    return {
        rank: [made.slice_frame(part, plan, head, peers[rank].replica, peers[rank].signer) for part in parts]
        for rank, made in offered.items()
    }


def results(
    plan: ReducePlan, head: Head, fragment: int, peers: Sequence[TrialPeer], slices: Slices
) -> Iterator[Result]:
    """Yield the results part by part."""
    by_id = {peer.signer.peer: peer for peer in peers}
    for part, (owner, _, _) in enumerate(plan.partition):
        yield _result(plan, part, head, fragment, by_id[owner], [frames[part] for frames in slices.values()])


def _result(
    plan: ReducePlan, part: int, head: Head, fragment: int, owner: TrialPeer, frames: Sequence[Frame]
) -> Result:
    """Reduce as ``Reducer`` in `decentral.rounds.reduce`, which waits for slices besides."""
    replica, (_, start, stop) = owner.replica, plan.partition[part]
    reduction = Reduction(plan, part, {f.header.sender: _decode(owner, f, stop - start) for f in frames})
    norms, owed_N = _norms(reduction), replica.owed_as_owner(fragment)
    weights = slice_weights(replica, plan.contributors, head.outer_step, norms)
    of_states = slice_state_weights(replica, plan.contributors, head.outer_step, weights)
    made = reduction.result(
        replica.codec,
        weights,
        None if owed_N is None else owed_N[start:stop],
        _scales(owner, norms, weights),
        of_states,
        _outside(owner, plan, head),
    )
    header = header_after(head, FrameKind.RESULT, fragment, owner.signer.peer, part, len(plan.partition), plan.number)
    frame = seal(replace(header, states=len(of_states)), made.body, owner.signer)
    return Result(frame, replica.codec.decompress(made.payloads, frame.header.channels), made.feedback.get(DEBT))


def _decode(owner: TrialPeer, frame: Frame, numel: int) -> Tensor:
    channels = frame.header.channels
    return owner.replica.codec.decode(frame.body, range_shapes(0, numel) * channels, channels)


def _norms(reduction: Reduction) -> list[float]:
    """Return the norms of the part's slices."""
    start, stop = reduction.range
    slices = [reduction.slices[ref.peer][: stop - start] for ref in reduction.plan.contributors]
    return [Measure.of((slice_N,), stop - start).norm for slice_N in slices]


def _scales(owner: TrialPeer, norms: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the rule's scales by the norms of the part's slices; zeros where it gives nothing that fits."""
    try:
        return scales_of(owner.replica.rule, Sent.of_norms(norms, weights))
    except Unusable:
        return [0.0] * len(weights)


def _outside(owner: TrialPeer, plan: ReducePlan, head: Head) -> list[Part]:
    try:
        told = contributors_of(plan.contributors, head.outer_step, len(owner.replica.anchors))
        return outside_of(owner.replica, head.outer_step, told)
    except Unusable:
        return []


# ---- pairs ----
#
# Of a gossip run: each peer waits for its partner of the step, and for nobody else.


@dataclass(frozen=True, slots=True)
class _Offered:
    """A peer that stands still for its step."""

    made: Contribution
    half_CN: Tensor | None  # what it sends, as its partner decodes it; None: it has no partner
    at: float


class Gossiping:
    """Pairs that wait for each other."""

    def __init__(self, head: Head, peers: Sequence[TrialPeer], world: TrialWorld) -> None:
        self._head, self._peers, self._world = head, peers, world
        self._rank_of = {peer.signer.peer: peer.rank for peer in peers}
        self._offers: dict[int, _Offered] = {}  # by rank
        self._sent: dict[int, float] = {}  # bytes of all peers, by gossip step

    def offers(self, peer: TrialPeer, now: float) -> bool:
        """Note that a peer's step is due; False where it starts over instead, and need not wait."""
        made = peer.take(self._head, peer.outer_step)
        if made is None:
            return False
        half_CN = encode_half(peer.replica, made) if len(self._group(peer.rank)) == 2 else None
        self._offers[peer.rank] = _Offered(made, half_CN, now)
        return True

    @property
    def next_at(self) -> float:
        """Return when the next pair has met."""
        return min((self._met_at(group) for group in self._ready()), default=float("inf"))

    def meet(self, now: float) -> list[TrialPeer]:
        """Let pairs that have met by ``now`` take their step; return the peers, which may step on."""
        moved = list[TrialPeer]()
        for group in list(self._ready()):
            if self._met_at(group) <= now:
                moved += self._swap(group)
        return moved

    def nbytes_of(self, step: int) -> float:
        """Return the bytes that one peer sent in this step, on average."""
        return self._sent.pop(step, 0.0) / len(self._peers)

    def _ready(self) -> list[list[int]]:
        """Return the groups of which everybody is there, each once."""
        groups = {tuple(sorted(self._group(rank))) for rank in self._offers}
        return [list(group) for group in sorted(groups) if self._all_there(group)]

    def _group(self, rank: int) -> list[int]:
        peer = self._peers[rank]
        method, fragments = peer.schedule.method, peer.schedule.num_fragments
        partner = None
        if method.meets(peer.outer_step // fragments):
            partner = partner_of(self._head.run, peer.outer_step, self._head.members, peer.signer.peer)
        return [rank] if partner is None else [rank, self._rank_of[partner]]

    def _all_there(self, group: Sequence[int]) -> bool:
        return all(r in self._offers for r in group) and len({self._peers[r].outer_step for r in group}) == 1

    def _met_at(self, group: Sequence[int]) -> float:
        begun = max(self._offers[rank].at for rank in group)
        return begun + max(self._seconds(rank, len(group)) for rank in group)

    def _seconds(self, rank: int, taking_part: int) -> float:
        encoded = self._offers[rank].made.encoded
        return 0.0 if encoded is None else self._world.seconds_of_round(rank, len(encoded.body), "pair", taking_part)

    def _swap(self, group: Sequence[int]) -> list[TrialPeer]:
        members, offered = [self._peers[rank] for rank in group], [self._offers.pop(rank) for rank in group]
        step, made = members[0].outer_step, [one.made for one in offered]
        halves = [one.half_CN for one in offered if one.half_CN is not None]
        if len(halves) == 2:
            step_as_pair(members, made, halves, step)
        else:
            step_apart(members[0], made[0], step)
        sent = sum(len(one.encoded.body) for one in made if one.encoded is not None)
        self._sent[step] = self._sent.get(step, 0.0) + sent
        return members


# ---- one gossip step ----
#
# Of a pair, or of a peer alone: as ``Swapping`` in `decentral.rounds.gossip` makes it once both have committed.


def step_apart(peer: TrialPeer, made: Contribution, step: int) -> None:
    """Take gossip step ``step`` of a peer without a partner."""
    _take_over(peer, step_alone(peer.replica, step, made))


def step_as_pair(peers: Sequence[TrialPeer], made: Sequence[Contribution], halves: Sequence[Tensor], step: int) -> None:
    """Take gossip step ``step`` of two peers, by what each sends."""
    steps = [
        step_together(peer.replica, step, mine, mine_CN, theirs_CN)
        for peer, mine, mine_CN, theirs_CN in zip(peers, made, halves, reversed(halves), strict=True)
    ]
    for peer, one in zip(peers, steps, strict=True):
        _take_over(peer, one)


def _take_over(peer: TrialPeer, step: GossipStep) -> None:
    install(peer.replica, step)
    peer.schedule.merge_swap(peer.live, step.fragment, step.after_N, unmoved=bool(step.unmoved))
    peer.schedule.absences.clear()
    peer.live.averages.resume()
    peer.outer_step += 1
