"""Peers of one run without a network: what they run is called here, and its answers booked as rounds/ books them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.reduce import owned_parts
from decentral.manifest import Manifest
from decentral.node.terms import make_replica
from decentral.optimizers import RoundInfo
from decentral.parameters import schema_of
from decentral.replica.codec import range_shapes
from decentral.replica.contribution import Contribution, header_after
from decentral.replica.pair_step import GossipStep
from decentral.replica.reduction import Reduction
from decentral.replica.replica import Replica
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record, ReducePlan

Books = tuple[dict[str, Tensor], ...]

SIGNERS = sorted((Signer(bytes([n] * 32)) for n in range(3)), key=lambda signer: signer.peer)
PARAMETERS = {"matrix": torch.zeros(40, 24, requires_grad=True), "vector": torch.zeros(37, requires_grad=True)}
NUMEL = sum(parameter.numel() for parameter in PARAMETERS.values())
METHODS = ("diloco", "streaming", "sparseloco")


def peer_of(manifest: Manifest, start_N: Tensor) -> Replica:
    return make_replica(manifest, schema_of(PARAMETERS), [start_N])


class Heard:
    """An outer optimizer that remembers the mean it was given."""

    def __init__(self, replica: Replica) -> None:
        self.inner, self.mean_N = replica.method, torch.zeros(NUMEL)
        replica.method = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:  # Any: whatever the method has
        return getattr(self.inner, name)

    def outer_step(
        self, anchor: Tensor, received: Mapping[str, Tensor], state: Mapping[str, Tensor], info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        self.mean_N = received["change"].clone()
        return self.inner.outer_step(anchor, received, state, info)


class Swarm:
    """Three peers; each has another outer method, for what is sent does not depend on it."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.peers = [peer_of(manifests[n], torch.zeros(NUMEL)) for n in range(len(SIGNERS))]
        self.heard = [Heard(peer) for peer in self.peers]
        digest = bytes(32)
        self.head = Head.genesis(digest, digest, digest, SIGNERS[0].peer)

    def gather(self, given: Mapping[int, Tensor]) -> Tensor:
        """One round: the contributions of ``given``, by peer, in one commit. Returns the mean that all applied."""
        offered = {n: self._contribution(gradient_N) for n, gradient_N in given.items()}
        frames = []
        for n, made in offered.items():
            made.encoded = self.peers[n].encode(0, made.gradient_N, me=SIGNERS[n].peer)
            frames.append(made.frame(self.head, SIGNERS[n]))
        record = self._record(tuple(_ref(frame) for frame in frames))
        self._book(record, offered, {})
        return self._apply(record, frames)

    def reduce(self, given: Mapping[int, Tensor], *cuts: Sequence[tuple[int, int, int]]) -> Tensor:
        """One round: a plan for each of ``cuts`` (owner, start, stop), the last of which is committed."""
        offered = {n: self._contribution(gradient_N) for n, gradient_N in given.items()}
        left: dict[bytes, Tensor] = {}
        for number, cut in enumerate(cuts):
            partition = tuple((SIGNERS[n].peer, start, stop) for n, start, stop in cut)
            contributors = tuple(
                FrameRef(SIGNERS[n].peer, made.commitment(self.head), 0, 1, 1) for n, made in offered.items()
            )
            plan = ReducePlan(0, self.head.round + 1, 0, number, contributors, partition)
            results = self._results(plan, self._slices(plan, offered), left)
        record = self._record(tuple(_ref(frame) for frame in results), plan)
        self._book(record, offered, left)
        return self._apply(record, results)

    def owed(self) -> Tensor:
        """What all owners owe, in units of the mean."""
        owed = [peer.owed(0) for peer in self.peers]
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
            (part, n): self.peers[n].codec.decode(
                made.slice_frame(part, plan, self.head, self.peers[n], SIGNERS[n]).body, range_shapes(start, stop)
            )
            for part, (_, start, stop) in enumerate(plan.partition)
            for n, made in offered.items()
        }

    def _results(
        self, plan: ReducePlan, slices: Mapping[tuple[int, int], Tensor], left: dict[bytes, Tensor]
    ) -> list[Frame]:
        """As `Reducer._result` makes them, and what `Reducer._own` keeps."""
        frames = []
        for n, signer in enumerate(SIGNERS):
            for part in owned_parts(plan, signer.peer):
                mine = {SIGNERS[k].peer: slice_N for (p, k), slice_N in slices.items() if p == part}
                frame, made = self._result(n, Reduction(plan, part, mine))
                if "debt" in made:
                    left[frame.hash] = made["debt"]
                frames.append(frame)
        return sorted(frames, key=lambda frame: (frame.header.sender, frame.header.part))

    def _result(self, n: int, reduction: Reduction) -> tuple[Frame, dict[str, Tensor]]:
        peer, (start, stop), plan = self.peers[n], reduction.range, reduction.plan
        owed_N = peer.owed(0)
        weights = peer.weights(plan.contributors, 0)
        made = reduction.result(peer.codec, weights, None if owed_N is None else owed_N[start:stop])
        parts, me = len(plan.partition), SIGNERS[n]
        header = header_after(self.head, FrameKind.RESULT, 0, me.peer, reduction.part, parts, plan.number)
        return seal(header, made.body, me), made.feedback

    def _record(self, refs: tuple[FrameRef, ...], plan: ReducePlan | None = None) -> Record:
        head, members = self.head, tuple(signer.peer for signer in SIGNERS)
        assert head.anchor is not None
        number, contributors, partition = (
            (0, (), ()) if plan is None else (plan.number, plan.contributors, plan.partition)
        )
        return Record(
            head.run, 0, head.round + 1, head.outer_step, 0, number, head.hash, head.anchor, members, refs,
            contributors, partition, members, False,
        )  # fmt: skip

    def _book(self, record: Record, offered: Mapping[int, Contribution], left: Mapping[bytes, Tensor]) -> None:
        """As `Bookkeeping._settle` does."""
        for n, peer in enumerate(self.peers):
            owed_N = peer.owed(0)
            if n in offered:
                peer.feedback[0] = offered[n].feedback_after(record)
            peer.owe_after(record, SIGNERS[n].peer, left, owed_N)

    def _apply(self, record: Record, frames: Sequence[Frame]) -> Tensor:
        """A reduce decodes results when they come, as `Results` remembers."""
        decoded, codec = {}, self.peers[0].codec
        for frame in frames if record.partition else ():
            _, start, stop = record.partition[frame.header.part]
            decoded[frame.hash] = codec.decode(frame.body, range_shapes(start, stop))
        for peer in self.peers:
            peer.install(peer.outer_step(record, {frame.hash: frame for frame in frames}, decoded))
        first, *others = (heard.mean_N for heard in self.heard)
        assert all(torch.equal(first, other) for other in others), "the same bits on every peer"
        return first


def install(replica: Replica, step: GossipStep) -> None:
    """As `Gossip._book` does."""
    replica.anchors[0], replica.states[0], replica.feedback[0] = step.after_N, step.state, step.feedback


def _ref(frame: Frame) -> FrameRef:
    return FrameRef(frame.header.sender, frame.hash, frame.header.part, 1, 1)


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
