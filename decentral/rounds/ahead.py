"""The outer step of a record that this peer voted for, made while the votes are on their way.

Most records that a peer votes for are committed, and an outer step is a pure function of the record, its frames and
the replica. So it need not wait for the commit; only to install it must. What was made of another record, or of a
replica that has moved on meanwhile, is made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import anyio
from torch import Tensor

from decentral.consensus.chain import Digest
from decentral.replica.replica import OuterStep
from decentral.rounds.local_state import LocalState
from decentral.wire.frames import Frame
from decentral.wire.messages import Record

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(slots=True)
class _Making:
    """One step on its way."""

    of: Digest  # the record's hash
    anchor_N: Tensor  # that it is made from, with the method's state: they are replaced, and never written to
    state: Mapping[str, Tensor]
    made: OuterStep | None = None
    over: anyio.Event = field(default_factory=anyio.Event)


class StepAhead:
    """Of one peer: that of one record at a time."""

    def __init__(self, state: LocalState) -> None:
        self._state = state
        self._making: _Making | None = None

    def begin(self, record: Record, frames: Mapping[Digest, Frame]) -> None:
        """Make it, beside the rounds."""
        if self._making is None or self._making.of != record.hash:
            replica, f = self._state.replica, record.fragment
            making = _Making(record.hash, replica.anchors[f], replica.states[f])
            begun = self._state.tasks.spawn(self._make, making, record, frames)
            self._making = making if begun else None

    async def step(self, record: Record, frames: Mapping[Digest, Frame]) -> OuterStep:
        """What the record makes of the replica. Raises what `Replica.outer_step` does."""
        making, self._making = self._making, None
        if making is not None and making.of == record.hash:
            await making.over.wait()
            if making.made is not None and self._fits(making, record.fragment):
                return making.made
        return await self._of(record, frames)

    async def _make(self, making: _Making, record: Record, frames: Mapping[Digest, Frame]) -> None:
        """Shielded, as who waits for it is: a task that begins in a group whose outer scope is cancelled already is
        never told, and anyio on asyncio turned round in it for ever.
        """
        try:
            with anyio.CancelScope(shield=True), suppress(Exception):  # who asks for it meets the error again
                making.made = await self._of(record, frames)
        finally:
            making.over.set()

    async def _of(self, record: Record, frames: Mapping[Digest, Frame]) -> OuterStep:
        state = self._state
        return await state.offload(state.replica.outer_step, record, frames, state.results.by_frame())

    def _fits(self, making: _Making, fragment: int) -> bool:
        """Whether it was made of what the replica holds now."""
        replica = self._state.replica
        return making.anchor_N is replica.anchors[fragment] and making.state is replica.states[fragment]
