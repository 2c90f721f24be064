"""A reduce at one peer: a fragment cut among owners, slices out and in, the owned parts summed, results to everybody.

Each owner sums its parts of the contributors' slices and returns re-quantised results, one for each part. Right for
dense frames: sent per peer and round ``2 (N-1)/N * body``, whatever N. Everybody applies the owners' result frames, so
all apply the same bits although sums were made in one place only (`decentral.replica.reduction`).

Source: the bandwidth-optimal all-reduce of Patarasuk and Yuan, 2009; re-quantising once per owner instead of once per
hop, as decentral training runs do since INTELLECT-1 (Jaghouar et al., 2024, arXiv:2412.01152).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

import anyio
import anyio.abc
from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.chain import Head
from decentral.dissemination.reassembly import PAUSE
from decentral.flow.pacing import order_after
from decentral.optimizers.aggregation.base import Sent
from decentral.optimizers.base import Part
from decentral.replica.apply import outside_of, slice_state_weights, slice_weights
from decentral.replica.contribution import Contribution, header_after, range_of
from decentral.replica.measures import Measure
from decentral.replica.reduction import Reduction
from decentral.replica.weights import Unusable, contributors_of, scales_of
from decentral.rounds.frame_io import FrameIO
from decentral.rounds.local_state import LocalState
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import PeerId
from decentral.wire.messages import Missing, ReducePlan

# ---- a fragment cut among its owners ----
#
# Each owner reduces a part, in pieces. A piece is summed, and its result sent, while slices of the next are still
# coming: else every uplink idles from its own last slice until the last slice of all is there. Ranges are cut at
# multiples of the compressors' block, so that a slice compresses to the same bytes however the fragment is cut.

MOST_PIECES = 4  # of one owner; each costs a signature, a stream to everybody and 128 bytes of the record
MOST_PARTS = 256  # of a fragment; a record holds 1,024

Ranges = tuple[tuple[PeerId, int, int], ...]  # owner, start, stop


@dataclass(frozen=True, slots=True)
class Grain:
    """The least sizes into which a fragment may be cut, in elements."""

    align: int = 4096  # the compressors' block
    piece: int = 1 << 17  # the least that is worth a frame: half a megabyte of float32; see experiments/LOG.md


USUAL_GRAIN = Grain()


def shares(uplinks: Sequence[float]) -> list[float]:
    """Return the share of a reduce that each peer should own, given what it can send per second; any unit, sum 1.

    Of a body of one, peer i sends ``1 - s_i`` as slices and ``(N - 1) s_i`` as its result, ``1 + (N - 2) s_i`` in all.
    All are done at the same time T when ``1 + (N - 2) s_i = T u_i``; who is too slow even for its slices owns nothing,
    which is water-filling: T is such that the shares ``max(0, T u_i - 1) / (N - 2)`` sum to one. Peers that can send
    nothing own nothing; equal shares when none can.
    """
    room = len(uplinks) - 2
    most = sorted((u for u in uplinks if u > 0), reverse=True)
    if room <= 0 or not most:
        total = sum(most)
        return [max(u, 0.0) / total for u in uplinks] if most else [1.0 / len(uplinks)] * len(uplinks)
    finish = next(
        time for k in range(len(most), 0, -1) if (time := (room + k) / sum(most[:k])) * most[k - 1] >= 1.0 - 1e-9
    )
    return [max(0.0, finish * u - 1.0) / room for u in uplinks]


def partition(
    numel: int, owners: Sequence[PeerId], weights: Sequence[float] | None = None, grain: Grain = USUAL_GRAIN
) -> Ranges:
    """Cut ``[0, numel)`` among ``owners`` in proportion to ``weights`` (equal when None), each share in pieces.

    Owners whose share rounds to nothing are left out; together the ranges cover everything exactly once.
    """
    shares = [1.0] * len(owners) if weights is None else list(weights)
    total, blocks = sum(shares), -(-numel // grain.align)
    most = max(1, min(MOST_PIECES, MOST_PARTS // len(owners)))
    ranges: list[tuple[PeerId, int, int]] = []
    done, cumulated = 0, 0.0
    for owner, share in zip(owners, shares, strict=True):
        cumulated += share
        upto = blocks if owner == owners[-1] else round(blocks * cumulated / total)
        ends = (min(end * grain.align, numel) for end in _in_pieces(done, upto, grain, most))
        ranges += [(owner, start, stop) for start, stop in pairwise(ends)]
        done = max(done, upto)
    return tuple(ranges)


def _in_pieces(start: int, stop: int, grain: Grain, most: int) -> list[int]:
    """Return the ends, in blocks, of as many equal pieces as are large enough, and no more than ``most``."""
    if stop <= start:
        return []
    count = max(1, min(most, (stop - start) * grain.align // grain.piece))
    return [start + (stop - start) * number // count for number in range(count + 1)]


# ---- a plan, carried out ----


def parts_of(plan: ReducePlan, peer: PeerId) -> list[int]:
    """Return the indices of the parts that ``peer`` owns in ``plan``."""
    return [part for part, (owner, _, _) in enumerate(plan.partition) if owner == peer]


def in_order(plan: ReducePlan, me: PeerId) -> list[int]:
    """Return the parts in the order in which ``me`` sends their slices: of each owner the first, then the second."""
    owners = order_after({owner for owner, _, _ in plan.partition}, me)
    rounds = zip_longest(*(parts_of(plan, owner) for owner in owners))
    return [part for parts in rounds for part in parts if part is not None]


class Reducer:
    """The plans of a reduce, carried out."""

    def __init__(self, state: LocalState, frames: FrameIO) -> None:
        self.state, self.frames = state, frames
        self.me, self.replica = state.me, state.replica

    async def reduce(self, plan: ReducePlan, head: Head) -> None:
        """Send our slices; sum the parts that are ours and give everybody the results."""
        self.frames.pushes.cancel(lambda frame: frame.header.round == plan.round and frame.header.plan < plan.number)
        pending = self.state.pending
        if pending is not None and self.me in {ref.peer for ref in plan.contributors}:
            self.state.tasks.spawn(self.send_slices, pending, plan, head)
        for part in parts_of(plan, self.me):
            self.state.tasks.spawn(self._own, Reduction(plan, part), head)

    async def send_slices(self, pending: Contribution, plan: ReducePlan, head: Head) -> None:
        """Send slices, encoded as they go; every owner's first part before anybody's second, so that it is summed
        meanwhile.
        """
        state = self.state
        for part in in_order(plan, state.me):
            frame = await state.offload(pending.slice_frame, part, plan, head, state.replica, state.signer)
            owner = plan.partition[part][0]
            if owner == state.me:
                state.sums.slices.add(frame, await state.offload(self._decode, frame, plan))
            else:
                state.tasks.spawn(self.frames.pushes.push, frame, (owner,))

    async def _own(self, reduction: Reduction, head: Head) -> None:
        """Make one result. It leaves after this peer's own slices, which the others wait for first."""
        await self._gather_slices(reduction, head)
        if missing := reduction.missing():
            await self._blame(reduction.plan, missing, head)
            return
        frame, decoded, left_N = await self.state.offload(self._result, reduction, head)
        self._tell_unmoved(reduction)
        if self.state.head.hash == head.hash:
            if left_N is not None:
                self.state.sums.left[frame.hash] = left_N
            self.state.sums.results.add(frame, decoded)
            await self.frames.hold(frame)
            await self.frames.pushes.push(frame, head.members)

    async def _gather_slices(self, reduction: Reduction, head: Head) -> None:
        """Wait for as long as slices need by what is known of uplinks, and for those that are coming then."""
        state, arrivals, began = self.state, self.frames.arrivals, anyio.current_time()
        (start, stop), channels = reduction.range, len(self.replica.due(head.outer_step))
        while state.head.hash == head.hash:
            slices, now = state.sums.slices, anyio.current_time()
            came, deadline = slices.came, began + state.machine.state.patience(0.5)
            found, reduction.tails = slices.of(reduction.plan, reduction.part)
            # who sends another number of channels than are due might as well send nothing
            reduction.slices = {peer: one for peer, one in found.items() if one.numel() == channels * (stop - start)}
            missing = reduction.missing()
            if not missing or (now >= deadline and not any(map(arrivals.is_moving, missing))):
                return
            with anyio.CancelScope(deadline=deadline if now < deadline <= now + PAUSE else now + PAUSE):
                await came.wait()

    def _result(self, reduction: Reduction, head: Head) -> tuple[Frame, Tensor, Tensor | None]:
        """Make the frame for everybody; return it, what it decodes to, and the residual that it leaves, if any."""
        plan, state, replica = reduction.plan, self.state, self.replica
        fragment = head.fragment(state.terms.num_fragments)
        owed_N, (start, stop) = replica.owed_as_owner(fragment), reduction.range
        measured = {
            peer: Measure.of((slice_N[: stop - start],), stop - start) for peer, slice_N in reduction.slices.items()
        }
        state.sums.measured[(plan.round, plan.number)] = measured
        norms = [measured[ref.peer].norm for ref in plan.contributors]
        weights = slice_weights(replica, plan.contributors, head.outer_step, norms)
        scales, outside = self._slice_scales(reduction, norms, weights), self._outside(reduction, head)
        if reduction.unmoved:
            scales = [0.0] * len(scales)
        of_states = slice_state_weights(replica, plan.contributors, head.outer_step, weights)
        made = reduction.result(
            replica.codec, weights, None if owed_N is None else owed_N[start:stop], scales, of_states, outside
        )
        parts, tail = len(plan.partition), replica.tail.pack_merge(reduction.contributor_buffers())
        header = header_after(head, FrameKind.RESULT, fragment, state.me, reduction.part, parts, plan.number)
        header = replace(header, states=len(replica.due(head.outer_step)) - 1)
        frame = seal(header, made.body, state.signer, tail)
        _ = frame.hash  # see Inbox.check
        return frame, replica.codec.decompress(made.payloads, header.channels), made.feedback.get(DEBT)

    def _slice_scales(self, reduction: Reduction, norms: Sequence[float], weights: Sequence[float]) -> list[float]:
        """Return a scale for each slice. An owner knows the norms of its own part's slices, and no more.

        Zeros where the rule gives nothing that fits: nobody's change is in the part, and all are given that alike.
        """
        try:
            return scales_of(self.replica.rule, Sent.of_norms(norms, weights))
        except Unusable as error:
            reduction.unmoved = str(error)
            return [0.0] * len(norms)

    def _outside(self, reduction: Reduction, head: Head) -> list[Part]:
        try:
            told = contributors_of(reduction.plan.contributors, head.outer_step, len(self.replica.anchors))
            return outside_of(self.replica, head.outer_step, told)
        except Unusable as error:
            reduction.unmoved = str(error)
            return []

    def _tell_unmoved(self, reduction: Reduction) -> None:
        if reduction.unmoved:
            why = f"in part {reduction.part}, which this peer sums, {reduction.unmoved}"
            at = {"round": reduction.plan.round, "outer_step": self.state.head.outer_step + 1}
            self.state.on_event("unmoved", {**at, "method": self.replica.method.name, "why": why})

    def _decode(self, frame: Frame, plan: ReducePlan) -> Tensor:
        (body, _), channels = self.replica.tail.split(frame), frame.header.channels
        return self.replica.codec.decode(body, range_of(plan, frame.header.part) * channels, channels)

    async def _blame(self, plan: ReducePlan, missing: tuple[PeerId, ...], head: Head) -> None:
        message = Missing(head.epoch, head.round + 1, plan.number, tuple(sorted(missing)))
        leader = self.state.machine.state.leader_of(plan.ballot)
        if leader == self.me:
            await self.frames.feed(self.me, message)
        else:
            await self.frames.send(leader, message)
