"""Peers of one method that train and meet without a network: real schedules, replicas, bodies, frames and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.consensus.chain import Head
from decentral.optimizers import Aggregation, OuterMethod
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step
from decentral.replica.codec import Codec
from decentral.replica.contribution import Contribution, encode_whole
from decentral.replica.pair_step import GossipStep, encode_half, install, step_alone, step_together
from decentral.replica.replica import OuterStep, Replica
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.lessons import Descent
from decentral.simulate.training import FlatModel
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule
from decentral.wire.frames import Frame
from decentral.wire.messages import FrameRef, Record
from tests.kit.replicas import NUMEL, PARAMETERS, SIGNERS

# Shape suffix: N = elements of the one fragment, flat float32.

SCHEMA = schema_of(PARAMETERS)
EXACT = Codec(parse_compressor("none"))


def codec_of(method: OuterMethod) -> Codec:
    """What the method's preset compresses with; ours loses nothing where it has none."""
    preset = method.preset
    return Codec(parse_compressor(preset.compressor), parse_feedback(preset.feedback)) if preset else EXACT


def replica_of(method: OuterMethod, start_N: Tensor, codec: Codec = EXACT, rule: Aggregation | None = None) -> Replica:
    return Replica(SCHEMA, [start_N], method, codec, EXACT, rule=rule)


class Inner(Descent):
    """An inner optimizer that steps at rate 1, with moments that only methods move."""

    def __init__(self, number: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(number)
        self.moments = {
            name: torch.rand(NUMEL, generator=random, dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq")
        }

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        return self.moments[name].clone() if name in self.moments else None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        self.moments[name] = moment_N.clone()
        return True


@dataclass
class Learner:
    """One peer."""

    replica: Replica
    model: FlatModel
    inner: Inner
    schedule: SyncSchedule

    @property
    def live_N(self) -> Tensor:
        return self.model.read(0)

    @property
    def anchor_N(self) -> Tensor:
        return self.replica.anchors[0]

    def learn(self, step_N: Tensor) -> None:
        """One inner step, by ``step_N`` unless the method wants another."""
        (taken_N,) = self.inner.step([-step_N], self.schedule.calls.before_step)
        self.model.write(0, self.live_N - taken_N)
        self.schedule.stepped()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin where a checkpoint or a snapshot is."""
        self.replica.load(tensors)
        self.model.write(0, self.anchor_N)


def held(peer: Learner) -> dict[str, Tensor]:
    """All that its checkpoint has of its replica."""
    return dict(peer.replica.shared_tensors()) | dict(peer.replica.own_tensors())


@dataclass
class Offered:
    """What the present peers offer to one round, and the record that names it; nothing has changed yet."""

    record: Record
    frames: dict[bytes, Frame]
    made: dict[int, Contribution]
    steps: dict[int, OuterStep] = field(default_factory=dict)


class Learners:
    """A run of one fragment, where a round is due after each inner step."""

    def __init__(
        self,
        method: OuterMethod,
        num_peers: int,
        start_N: Tensor,
        codec: Codec = EXACT,
        rule: Aggregation | None = None,
    ) -> None:
        self.method, self.codec, self.start_N, self.rule = method, codec, start_N, rule
        self.peers = [self.begun(n) for n in range(num_peers)]
        digest = self.peers[0].replica.digest
        genesis = Head.genesis(bytes(32), bytes(32), digest, SIGNERS[0].peer)
        self.head = replace(genesis, members=tuple(signer.peer for signer in SIGNERS))
        self.next_members = self.head.members  # that the next records set

    def begun(self, number: int) -> Learner:
        """A peer at the start of the run."""
        model, inner = FlatModel([self.start_N]), Inner(number)
        schedule = SyncSchedule(1, 0, self.method, bytes(32), live=LiveSide(model, inner, SIGNERS[number].peer, SCHEMA))
        return Learner(replica_of(self.method, self.start_N, self.codec, self.rule), model, inner, schedule)

    def learn(self, steps: Mapping[int, Tensor]) -> None:
        for n, step_N in steps.items():
            self.peers[n].learn(step_N)

    def meet(self, present: Sequence[int], summaries: Mapping[int, bytes] | None = None) -> None:
        """One round: those who are present contribute, and all learn what came of it."""
        if self.method.topology == "pair":
            self._swap(present)
        else:
            self.commit(self.offer(present, summaries or {}))

    # ---- with consensus ----

    def offer(self, present: Sequence[int], summaries: Mapping[int, bytes] | None = None) -> Offered:
        made = {n: self._taken(n, (summaries or {}).get(n)) for n in present}
        frames = {n: one.frame(self.head, SIGNERS[n]) for n, one in made.items()}
        refs = tuple(self._ref(frame, made[n]) for n, frame in frames.items())
        return Offered(self._record(refs), {frame.hash: frame for frame in frames.values()}, made)

    def commit(self, offered: Offered) -> None:
        """Pure at first, so that what a peer refuses changes nobody."""
        record = offered.record
        steps = [outer_step(peer.replica, record, offered.frames) for peer in self.peers]
        for n, (peer, step) in enumerate(zip(self.peers, steps, strict=True)):
            mine = offered.made.get(n)
            peer.replica.install(step)
            peer.replica.senders.keep_only(record.next_members)
            if mine is not None:
                peer.replica.feedback[0] = mine.feedback_after(record)
            moved = (0, step.before_N, step.after_N, mine)
            update = CommittedUpdate(record, record.hash, *moved, state=step.state, unmoved=bool(step.unmoved))
            peer.schedule.merge(update, peer.model)
        self.head = replace(self.head.extended(record), anchor=self.peers[0].replica.digest)

    def _taken(self, n: int, summary: bytes | None) -> Contribution:
        peer, head = self.peers[n], self.head
        made = peer.schedule.take(peer.model, 0, peer.anchor_N, head.hash, 1, outer_step=head.outer_step)
        assert made is not None
        made.encoded = encode_whole(peer.replica, 0, made.gradient_N, made.states, SIGNERS[n].peer)
        made.summary = made.summary if summary is None else summary
        return made

    def _ref(self, frame: Frame, made: Contribution) -> FrameRef:
        return FrameRef(frame.header.sender, frame.hash, 0, 1, 1, made.base_step(self.head), made.summary)

    def _record(self, refs: tuple[FrameRef, ...]) -> Record:
        head = self.head
        assert head.anchor is not None
        return Record(
            head.run, head.epoch, head.round + 1, head.outer_step, 0, 0, head.hash, head.anchor, head.members, refs, (),
            (), self.next_members, False,
        )  # fmt: skip

    # ---- in pairs ----

    def _swap(self, present: Sequence[int]) -> None:
        """Neighbours of ``present`` are pairs; who is left over steps alone."""
        taken = {n: self._change(n) for n in present}
        steps: dict[int, GossipStep] = {}
        for i in range(0, len(present), 2):
            steps |= self._pair(present[i : i + 2], taken)
        for n, step in steps.items():
            peer = self.peers[n]
            install(peer.replica, step)
            peer.schedule.merge_swap(peer.model, 0, step.after_N, unmoved=bool(step.unmoved))
        self.head = replace(self.head, round=self.head.round + 1, outer_step=self.head.outer_step + 1)

    def _change(self, n: int) -> Contribution:
        peer, head = self.peers[n], self.head
        made = peer.schedule.take(peer.model, 0, peer.anchor_N, head.hash, 1, outer_step=head.outer_step)
        assert made is not None
        return made

    def _pair(self, group: Sequence[int], taken: Mapping[int, Contribution]) -> dict[int, GossipStep]:
        step, replicas = self.head.outer_step, [self.peers[n].replica for n in group]
        made = [taken[n] for n in group]
        if len(group) == 1:
            return {group[0]: step_alone(replicas[0], step, made[0])}
        halves = [encode_half(replica, one) for replica, one in zip(replicas, made, strict=True)]
        return {
            n: step_together(replica, step, mine, mine_CN, theirs_CN)
            for n, replica, mine, mine_CN, theirs_CN in zip(
                group, replicas, made, halves, reversed(halves), strict=True
            )
        }
