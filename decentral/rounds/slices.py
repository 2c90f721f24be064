"""Slices of the reduces in progress, as they come, for the owners of their parts."""

from __future__ import annotations

import anyio
from torch import Tensor

from decentral.consensus.round_state import claims_match
from decentral.replica.contents import Tail
from decentral.wire.frames import Frame, Header
from decentral.wire.keys import PeerId
from decentral.wire.messages import ReducePlan

Key = tuple[int, int, int]  # round, plan, part


class Slices:
    """Those of one round, by round, plan and part, then by sender. Whoever was decoding one may be a round late."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._decoded: dict[Key, dict[PeerId, Tensor]] = {}
        self._buffers: dict[Key, dict[PeerId, Tensor]] = {}  # that came with them
        self._headers: dict[Key, dict[PeerId, Header]] = {}
        self.came = anyio.Event()  # replaced when the next one comes

    def add(self, frame: Frame, decoded: Tensor) -> None:
        """Take a checked slice."""
        key = (frame.header.round, frame.header.plan, frame.header.part)
        self._headers.setdefault(key, {})[frame.header.sender] = frame.header
        self._decoded.setdefault(key, {})[frame.header.sender] = decoded
        if (tail_B := self._tail.split(frame)[1]) is not None:
            self._buffers.setdefault(key, {})[frame.header.sender] = tail_B
        self.came.set()
        self.came = anyio.Event()

    def of(self, plan: ReducePlan, part: int) -> tuple[dict[PeerId, Tensor], dict[PeerId, Tensor]]:
        """What came of one part, and the buffers that came with it.

        Not what its sender signed with other claims than the plan names: the result would count it as what it is not.
        """
        key = (plan.round, plan.number, part)
        headers = self._headers.get(key, {})
        right = {ref.peer for ref in plan.contributors if ref.peer in headers and claims_match(headers[ref.peer], ref)}
        decoded, buffers = self._decoded.get(key, {}), self._buffers.get(key, {})
        return (
            {peer: slice_N for peer, slice_N in decoded.items() if peer in right},
            {peer: tail_B for peer, tail_B in buffers.items() if peer in right},
        )

    def forget(self) -> None:
        """The round is over."""
        self._decoded, self._buffers, self._headers = {}, {}, {}
