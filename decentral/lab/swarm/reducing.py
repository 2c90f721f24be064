"""A reduce of the laboratory: the owners of a shipped round where all uplinks are equal, up to eight, with their parts.

Who owns what changes values: an owner knows its part of each contribution and no more, so a rule that clips by norms
clips part by part, and what compressing a result loses is owed by the one who made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.reduce import partition
from decentral.lab.swarm.lab_peer import LabPeer
from decentral.optimizers.aggregation.base import Sent
from decentral.optimizers.base import Part
from decentral.replica.codec import range_shapes
from decentral.replica.contribution import Contribution, header_after
from decentral.replica.measures import Measure
from decentral.replica.reduction import Reduction
from decentral.replica.weights import Unusable, scales_of
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.messages import FrameRef, ReducePlan

__all__ = ["Result", "Slices", "plan_of", "results", "slices_of"]

_MOST_OWNERS = 8  # a shipped round has more; 24 of 64 peers took 2.5 ms for a replica's step, twice its gradients

Slices = Mapping[int, Sequence[Frame]]  # by rank, a frame for each part


@dataclass(frozen=True, slots=True)
class Result:
    """What an owner made of its part."""

    frame: Frame
    holds: Tensor  # flat float32, all channels
    left: Tensor | None  # that the owner owes once a record names it

    @property
    def ref(self) -> FrameRef:
        """As a record names it."""
        header = self.frame.header
        return FrameRef(header.sender, self.frame.hash, header.part, 1, 1)


def plan_of(head: Head, contributors: Sequence[FrameRef], numel: int) -> ReducePlan:
    """Who owns what of a fragment of ``numel`` elements."""
    cut = partition(numel, sorted(ref.peer for ref in contributors)[:_MOST_OWNERS])
    return ReducePlan(head.epoch, head.round + 1, 0, 0, tuple(contributors), cut)


def slices_of(plan: ReducePlan, head: Head, peers: Sequence[LabPeer], offered: Mapping[int, Contribution]) -> Slices:
    """What each contributor sends to each owner."""
    parts = range(len(plan.partition))
    return {
        rank: [made.slice_frame(part, plan, head, peers[rank].replica, peers[rank].signer) for part in parts]
        for rank, made in offered.items()
    }


def results(plan: ReducePlan, head: Head, fragment: int, peers: Sequence[LabPeer], slices: Slices) -> Iterator[Result]:
    """Part by part."""
    by_id = {peer.signer.peer: peer for peer in peers}
    for part, (owner, _, _) in enumerate(plan.partition):
        yield _result(plan, part, head, fragment, by_id[owner], [frames[part] for frames in slices.values()])


def _result(plan: ReducePlan, part: int, head: Head, fragment: int, owner: LabPeer, frames: Sequence[Frame]) -> Result:
    """See `decentral.rounds.reducing`, which waits for slices besides."""
    replica, (_, start, stop) = owner.replica, plan.partition[part]
    reduction = Reduction(plan, part, {f.header.sender: _decoded(owner, f, stop - start) for f in frames})
    weights, owed_N = replica.weights(plan.contributors, head.outer_step), replica.owed(fragment)
    beside = replica.state_weights(plan.contributors, head.outer_step, weights)
    made = reduction.result(
        replica.codec,
        weights,
        None if owed_N is None else owed_N[start:stop],
        _scales(owner, reduction, weights),
        beside,
        _outside(owner, plan, head),
    )
    header = header_after(head, FrameKind.RESULT, fragment, owner.signer.peer, part, len(plan.partition), plan.number)
    frame = seal(replace(header, states=len(beside)), made.body, owner.signer)
    return Result(frame, replica.codec.decompress(made.payloads, frame.header.channels), made.feedback.get("debt"))


def _decoded(owner: LabPeer, frame: Frame, numel: int) -> Tensor:
    channels = frame.header.channels
    return owner.replica.codec.decode(frame.body, range_shapes(0, numel) * channels, channels)


def _scales(owner: LabPeer, reduction: Reduction, weights: Sequence[float]) -> list[float]:
    """By the norms of the part's slices; zeros where the rule gives nothing that fits."""
    start, stop = reduction.range
    slices = [reduction.slices[ref.peer][: stop - start] for ref in reduction.plan.contributors]
    try:
        norms = [Measure.of((slice_N,), stop - start).norm for slice_N in slices]
        return scales_of(owner.replica.rule, Sent.of_norms(norms, weights))
    except Unusable:
        return [0.0] * len(weights)


def _outside(owner: LabPeer, plan: ReducePlan, head: Head) -> list[Part]:
    try:
        return owner.replica.outside(plan.contributors, head.outer_step)
    except Unusable:
        return []
