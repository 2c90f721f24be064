"""A reduce at one peer: slices out, slices in, the owned parts summed, their results to everybody."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.abc
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.arrivals import PAUSE
from decentral.dissemination.reduce import in_order, owned_parts
from decentral.optimizers.aggregation.norm_clip import clip_scales
from decentral.replica.contribution import Contribution, header_after, range_of
from decentral.replica.measures import Measure
from decentral.replica.reduction import Reduction
from decentral.rounds.frame_io import FrameIO
from decentral.wire.frames import Frame, FrameKind, seal
from decentral.wire.keys import PeerId
from decentral.wire.messages import (
    Missing,
    ReducePlan,
)


class Reducer(FrameIO):
    """Carries out the plans of a reduce."""

    def _take_slice(self, frame: Frame, decoded: Tensor) -> None:
        key = (frame.header.plan, frame.header.part)
        self._slices.setdefault(key, {})[frame.header.sender] = decoded
        if (tail_B := self.replica.tail.split(frame)[1]) is not None:
            self._tails.setdefault(key, {})[frame.header.sender] = tail_B
        self._slice_came.set()
        self._slice_came = anyio.Event()

    async def _reduce(self, plan: ReducePlan, head: Head) -> None:
        """Send our slices; sum the parts that are ours and give everybody the results."""
        self._cancel_pushes(lambda frame: frame.header.round == plan.round and frame.header.plan < plan.number)
        if self.pending is not None and self.me in {ref.peer for ref in plan.contributors}:
            self._spawn(self._send_slices, self.pending, plan, head)
        for part in owned_parts(plan, self.me):
            self._spawn(self._own, Reduction(plan, part), head)

    async def _send_slices(self, pending: Contribution, plan: ReducePlan, head: Head) -> None:
        """Encoded as they go; every owner's first part before anybody's second, so that it is summed meanwhile."""
        for part in in_order(plan, self.me):
            frame = await self.offload(pending.slice_frame, part, plan, head, self.replica, self.signer)
            owner = plan.partition[part][0]
            if owner == self.me:
                self._take_slice(frame, await self.offload(self._decoded, frame, plan))
            else:
                self._spawn(self._push, frame, (owner,))

    async def _own(self, reduction: Reduction, head: Head) -> None:
        """Make one result. It leaves after this peer's own slices, which the others wait for first."""
        await self._gather_slices(reduction, head)
        if missing := reduction.missing():
            await self._blame(reduction.plan, missing, head)
            return
        frame, decoded, feedback = await self.offload(self._result, reduction, head)
        if self.head.hash == head.hash:
            if "debt" in feedback:
                self._left[frame.hash] = feedback["debt"]
            self._results.add(frame, decoded)
            await self.hold(frame)
            await self._push(frame, head.members)

    async def _gather_slices(self, reduction: Reduction, head: Head) -> None:
        """Wait for as long as slices need by what is known of uplinks, and for those that are coming then."""
        key = (reduction.plan.number, reduction.part)
        began = anyio.current_time()
        while self.head.hash == head.hash:
            came, now, deadline = self._slice_came, anyio.current_time(), began + self.machine.patience(0.5)
            reduction.slices, reduction.tails = dict(self._slices.get(key, {})), dict(self._tails.get(key, {}))
            missing = reduction.missing()
            if not missing or (now >= deadline and not any(map(self.arrivals.is_moving, missing))):
                return
            with anyio.CancelScope(deadline=deadline if now < deadline <= now + PAUSE else now + PAUSE):
                await came.wait()

    def _result(self, reduction: Reduction, head: Head) -> tuple[Frame, Tensor, dict[str, Tensor]]:
        """The frame for everybody, what it decodes to, and what it leaves to owe."""
        plan, fragment = reduction.plan, head.fragment(self.terms.num_fragments)
        owed_N, (start, stop) = self.replica.owed(fragment), reduction.range
        measured = {peer: Measure.of(slice_N) for peer, slice_N in reduction.slices.items()}
        self._measured[(plan.round, plan.number)] = measured
        weights, scales = self.replica.weights(plan.contributors), self._slice_scales(plan, measured)
        made = reduction.result(self.replica.codec, weights, None if owed_N is None else owed_N[start:stop], scales)
        parts, tail = len(plan.partition), self.replica.tail.packed_merge(reduction.told_buffers())
        header = header_after(head, FrameKind.RESULT, fragment, self.me, reduction.part, parts, plan.number)
        frame = seal(header, made.body, self.signer, tail)
        _ = frame.hash  # see Inbox.check
        return frame, self._decoded(frame, plan), made.feedback

    def _slice_scales(self, plan: ReducePlan, measured: Mapping[PeerId, Measure]) -> list[float] | None:
        """An owner clips its part alone, by the slices' norms; everybody applies its result."""
        if self.replica.norm_clip == "none":
            return None
        return clip_scales([measured[ref.peer].norm for ref in plan.contributors])

    def _decoded(self, frame: Frame, plan: ReducePlan) -> Tensor:
        return self.replica.codec.decode(self.replica.tail.split(frame)[0], range_of(plan, frame.header.part))

    async def _blame(self, plan: ReducePlan, missing: tuple[PeerId, ...], head: Head) -> None:
        message = Missing(head.epoch, head.round + 1, plan.number, tuple(sorted(missing)))
        leader = self.machine.leader_of(plan.ballot)
        if leader == self.me:
            await self.feed(self.me, message)
        else:
            await self._send(leader, message)
