"""Peers of one run without a network: what they run is called here, and its answers booked as rounds/ books them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decentral.compressors import parse_compressor, parse_feedback
from decentral.consensus.chain import Head
from decentral.manifest import Manifest
from decentral.node.node import make_replica
from decentral.optimizers import RoundInfo
from decentral.optimizers.diloco import DiLoCo
from decentral.parameters import schema_of
from decentral.replica.apply import outer_step, slice_state_weights, slice_weights
from decentral.replica.codec import Codec, range_shapes
from decentral.replica.contribution import Contribution, encode_whole, header_after
from decentral.replica.reduction import Reduction
from decentral.replica.replica import OuterStep, Replica, owed_after
from decentral.rounds.reduce import parts_of
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record, ReducePlan

Books = tuple[dict[str, Tensor], ...]
Cut = Sequence[tuple[int, int, int]]  # the plan of a reduce: owner, start, stop

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(3)), key=lambda signer: signer.peer)
PARAMETERS = {"matrix": torch.zeros(40, 24, requires_grad=True), "vector": torch.zeros(37, requires_grad=True)}
NUMEL = sum(parameter.numel() for parameter in PARAMETERS.values())


def peer_of(manifest: Manifest, start_N: Tensor) -> Replica:
    return make_replica(manifest, schema_of(PARAMETERS), [start_N])


@dataclass(frozen=True)
class Met:
    """One round that is over."""

    record: Record
    steps: Sequence[OuterStep]  # by peer
    mean_N: Tensor  # what the outer method was handed as the change: of some methods (K, N)
    info: RoundInfo  # and what it was told


def remembering_replica(feedback: str = "ef21", fragments: int = 1) -> Replica:
    """Of a run whose receivers keep what each sender sent."""
    codec = Codec(parse_compressor("none"), parse_feedback(feedback))
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(fragments)))
    return Replica(schema_of(model, fragments), [torch.zeros(16)] * fragments, DiLoCo(), codec, codec)


class Heard:
    """An outer optimizer that remembers what it was handed."""

    def __init__(self, replica: Replica) -> None:
        self.inner, self.received, self.info = replica.method, {"change": torch.zeros(NUMEL)}, RoundInfo()
        replica.method = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:  # Any: whatever the method has
        return getattr(self.inner, name)

    def outer_step(
        self, anchor: Tensor, received: Mapping[str, Tensor], state: Mapping[str, Tensor], info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.received, self.info = {name: one.clone() for name, one in received.items()}, info
        return self.inner.outer_step(anchor, received, state, info)


class Swarm:
    """Three peers; each may have another outer method, where what is sent does not depend on it."""

    def __init__(self, peers: Sequence[Replica]) -> None:
        self.peers, self.heard = list(peers), [Heard(peer) for peer in peers]
        genesis = Head.genesis(bytes(32), bytes(32), peers[0].digest, SIGNERS[0].peer)
        self.head = replace(genesis, members=tuple(signer.peer for signer in SIGNERS))

    def gather(self, given: Mapping[int, Tensor]) -> Tensor:
        """One round: the contributions of ``given``, by peer, in one commit. Returns the mean that all applied."""
        return self.gathered({n: self._contribution(gradient_N) for n, gradient_N in given.items()}).mean_N

    def reduce(self, given: Mapping[int, Tensor], *cuts: Cut) -> Tensor:
        """One round: a plan for each of ``cuts``, the last of which is committed. Returns the mean that all applied."""
        return self.reduced({n: self._contribution(gradient_N) for n, gradient_N in given.items()}, *cuts).mean_N

    def gathered(self, offered: Mapping[int, Contribution]) -> Met:
        """The same of contributions as peers made them."""
        frames = {}
        for n, made in offered.items():
            made.encoded = encode_whole(self.peers[n], 0, made.gradient_N, made.states, SIGNERS[n].peer)
            frames[n] = made.frame(self.head, SIGNERS[n])
        record = self._record(tuple(self._ref(n, offered[n], frame.hash) for n, frame in frames.items()))
        self._book(record, offered, {})
        return self._apply(record, list(frames.values()))

    def reduced(self, offered: Mapping[int, Contribution], *cuts: Cut) -> Met:
        """The same of contributions as peers made them."""
        left: dict[bytes, Tensor] = {}
        for number, cut in enumerate(cuts):
            partition = tuple((SIGNERS[n].peer, start, stop) for n, start, stop in cut)
            contributors = tuple(self._ref(n, made, made.commitment(self.head)) for n, made in offered.items())
            plan = ReducePlan(0, self.head.round + 1, 0, number, contributors, partition)
            slices = self._slices(plan, offered)
            results = self._results(plan, slices, left)
        record = self._record(
            tuple(FrameRef(frame.header.sender, frame.hash, frame.header.part, 1, 1) for frame in results), plan
        )
        self._book(record, offered, left)
        return self._apply(record, results)

    def owed(self) -> Tensor:
        """What all owners owe, in units of the mean."""
        owed = [peer.owed_as_owner(0) for peer in self.peers]
        return sum((one.double() for one in owed if one is not None), torch.zeros(NUMEL, dtype=torch.float64))

    def books(self) -> Books:
        """What every peer remembers as a sender."""
        return tuple(dict(peer.feedback[0]) for peer in self.peers)

    # ---- what rounds/ does ----

    def _contribution(self, gradient_N: Tensor) -> Contribution:
        return Contribution(0, self.head.hash, -gradient_N, gradient_N, 1, 1)

    def _slices(self, plan: ReducePlan, offered: Mapping[int, Contribution]) -> dict[tuple[int, int], Tensor]:
        """By part and peer, what the part's owner decodes."""
        return {
            (part, n): self._decoded(made.slice_frame(part, plan, self.head, self.peers[n], SIGNERS[n]), start, stop)
            for part, (_, start, stop) in enumerate(plan.partition)
            for n, made in offered.items()
        }

    def _decoded(self, frame: Frame, start: int, stop: int) -> Tensor:
        channels = frame.header.channels
        return self.peers[0].codec.decode(frame.body, range_shapes(start, stop) * channels, channels)

    def _results(
        self, plan: ReducePlan, slices: Mapping[tuple[int, int], Tensor], left: dict[bytes, Tensor]
    ) -> list[Frame]:
        """As `Reducer._result` makes them, and what `Reducer._own` keeps."""
        frames = []
        for n, signer in enumerate(SIGNERS):
            for part in parts_of(plan, signer.peer):
                mine = {SIGNERS[k].peer: slice_N for (p, k), slice_N in slices.items() if p == part}
                frame, made = self._result(n, Reduction(plan, part, mine))
                if "debt" in made:
                    left[frame.hash] = made["debt"]
                frames.append(frame)
        return sorted(frames, key=lambda frame: (frame.header.sender, frame.header.part))

    def _result(self, n: int, reduction: Reduction) -> tuple[Frame, dict[str, Tensor]]:
        peer, (start, stop), plan = self.peers[n], reduction.range, reduction.plan
        owed_N = peer.owed_as_owner(0)
        weights = slice_weights(peer, plan.contributors, self.head.outer_step)
        beside = slice_state_weights(peer, plan.contributors, self.head.outer_step, weights)
        made = reduction.result(peer.codec, weights, None if owed_N is None else owed_N[start:stop], beside=beside)
        parts, me = len(plan.partition), SIGNERS[n]
        header = header_after(self.head, FrameKind.RESULT, 0, me.peer, reduction.part, parts, plan.number)
        return seal(replace(header, states=len(beside)), made.body, me), made.feedback

    def _ref(self, n: int, made: Contribution, name: bytes) -> FrameRef:
        """``name``: what the offer names."""
        return FrameRef(SIGNERS[n].peer, name, 0, made.steps, made.tokens, made.base_step(self.head), made.summary)

    def _record(self, refs: tuple[FrameRef, ...], plan: ReducePlan | None = None) -> Record:
        head, nothing = self.head, ReducePlan(0, 0, 0, 0, (), ())
        assert head.anchor is not None
        made = plan or nothing
        return Record(
            head.run, head.epoch, head.round + 1, head.outer_step, 0, made.number, head.hash, head.anchor, head.members,
            refs, made.contributors, made.partition, head.members, False,
        )  # fmt: skip

    def _book(self, record: Record, offered: Mapping[int, Contribution], left: Mapping[bytes, Tensor]) -> None:
        """As `Bookkeeping._settle` does."""
        for n, peer in enumerate(self.peers):
            owed_N = peer.owed_as_owner(0)
            if n in offered:
                peer.feedback[0] = offered[n].feedback_after(record)
            peer.owe(0, owed_after(owed_N, record, SIGNERS[n].peer, left, peer.numel(0)))

    def _apply(self, record: Record, frames: Sequence[Frame]) -> Met:
        """A reduce decodes results when they come, as `Results` remembers."""
        decoded = {}
        for frame in frames if record.partition else ():
            _, start, stop = record.partition[frame.header.part]
            decoded[frame.hash] = self._decoded(frame, start, stop)
        steps = [outer_step(peer, record, {frame.hash: frame for frame in frames}, decoded) for peer in self.peers]
        for peer, step in zip(self.peers, steps, strict=True):
            peer.install(step)
        first, *others = (heard.received["change"] for heard in self.heard)
        assert all(torch.equal(first, other) for other in others), "the same bits on every peer"
        self.head = replace(self.head.extended(record), anchor=self.peers[0].digest)
        return Met(record, steps, first, self.heard[0].info)


def changed_books(
    feedback: object, given_N: Tensor, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> Tensor:
    """What a sender's books say that it sent, in float64: what was given and owed less what is owed now.

    The decay of ``ef`` and the momentum of ``dgc`` are what their equations say, and no loss of the exchange.
    """
    debt = before.get("debt", torch.zeros(NUMEL)).double() * getattr(feedback, "beta", 1.0)
    velocity = before.get("velocity", torch.zeros(NUMEL)).double() * getattr(feedback, "momentum", 0.0)
    return given_N.double() + velocity + debt - after.get("debt", torch.zeros(NUMEL)).double()


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors) / math.fsum(1.0 for _ in tensors)  # type: ignore[return-value]
