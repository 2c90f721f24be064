"""A reduce at one peer: slices out, slices in, the owned partition summed, its result to everybody."""

from __future__ import annotations

import anyio
import anyio.abc
from torch import Tensor

from decentral.exchange.reduce import Reduction, owned_part
from decentral.rounds.carrier import Carrier
from decentral.rounds.chain import Head
from decentral.rounds.contribution import header_after, range_of
from decentral.wire.frames import Frame, Kind, seal
from decentral.wire.keys import PeerId
from decentral.wire.messages import (
    Missing,
    Plan,
)


class Reducer(Carrier):
    """Carries out the plans of a reduce."""

    def _take_slice(self, frame: Frame, decoded: Tensor) -> None:
        key = (frame.header.plan, frame.header.part)
        self._slices.setdefault(key, {})[frame.header.sender] = decoded
        self._slice_came.set()
        self._slice_came = anyio.Event()

    async def _reduce(self, plan: Plan, head: Head) -> None:
        """Send our slices; if a partition is ours, sum it and give everybody the result."""
        if self.pending is not None and self.me in {ref.peer for ref in plan.contributors}:
            made = await self.offload(self.pending.slice_frames, plan, head, self.replica, self.signer)
            for (owner, _, _), frame in zip(plan.partition, made, strict=True):
                if owner == self.me:
                    decoded = self.replica.codec.decode(frame.body, range_of(plan, frame.header.part))
                    self._take_slice(frame, decoded)
                else:
                    self._spawn(self._push, frame, (owner,))
        part = owned_part(plan, self.me)
        if part is not None:
            await self._own(Reduction(plan, part), head)

    async def _own(self, reduction: Reduction, head: Head) -> None:
        key = (reduction.plan.number, reduction.part)
        with anyio.move_on_after(self.terms.patience):
            while True:
                reduction.slices = dict(self._slices.get(key, {}))
                if not reduction.missing():
                    break
                await self._slice_came.wait()
        if missing := reduction.missing():
            await self._blame(reduction.plan, missing, head)
            return
        weights = self.replica.weights(reduction.plan.contributors)
        body = await self.offload(reduction.result, self.replica.codec, weights)
        fragment, parts = head.fragment(self.terms.num_fragments), len(reduction.plan.partition)
        header = header_after(head, Kind.RESULT, fragment, self.me, reduction.part, parts, reduction.plan.number)
        frame = seal(header, body, self.signer)
        if self.head.hash == head.hash:
            await self.hold(frame)
            await self._push(frame, head.members)

    async def _blame(self, plan: Plan, missing: tuple[PeerId, ...], head: Head) -> None:
        message = Missing(head.epoch, head.round + 1, plan.number, tuple(sorted(missing)))
        leader = self.machine.leader_of(plan.ballot)
        if leader == self.me:
            await self.feed(self.me, message)
        else:
            await self._send(leader, message)
