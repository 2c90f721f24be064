"""What a commit takes of this peer's progress, and what it leaves this peer to owe.

A frame that a previous incarnation of this peer sent may be named long after that one ended. Where it has a value, this
peer's progress may be in the anchor already, and goes: a crash may lose steps, and none may count twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from decentral.consensus.chain import contributions, moves_anchor
from decentral.replica.contribution import Contribution, forgotten
from decentral.replica.replica import owed_after
from decentral.rounds.local_state import LocalState
from decentral.wire.frames import Frame
from decentral.wire.messages import Record

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Due:
    """What a commit has this peer book; None: as before."""

    feedback: dict[str, Tensor] | None = None  # as a contributor
    owed_N: Tensor | None = None  # as an owner
    sent_N: Tensor | None = None  # bool: where a previous incarnation sent something, which the commit took


NOTHING_DUE = Due()


class Bookkeeping:
    """Books contributions with the commits that name them."""

    def __init__(self, state: LocalState) -> None:
        self.state = state
        self.me, self.replica, self.outbox = state.me, state.replica, state.outbox

    async def made_of(self, record: Record, frames: Mapping[bytes, Frame]) -> Due:
        """What is to be booked with ``record``; made off the event loop where it is as long as the fragment."""
        mine, owed_N = self._named(record), self.replica.owed(record.fragment)
        lost = mine is None and any(ref.peer == self.me for ref in contributions(record))
        if lost or record.partition:
            return await self.state.offload(self._made_of, record, frames, mine, owed_N, lost)
        return Due(None if mine is None else mine.feedback_after(record))

    def _made_of(
        self,
        record: Record,
        frames: Mapping[bytes, Frame],
        mine: Contribution | None,
        owed_N: Tensor | None,
        lost: bool,
    ) -> Due:
        """``lost``: the record names a contribution of a previous incarnation."""
        left = forgotten(self.replica, record, frames, self.me) if lost else None
        feedback = mine.feedback_after(record) if mine is not None else None if left is None else left.feedback
        keeps = mine is not None and (record.round, record.plan) in mine.hands_on_nothing
        after_N = owed_after(owed_N, record, self.me, self.state.left, self.replica.numel(record.fragment), keeps)
        return Due(feedback, after_N, None if left is None else left.sent_N)

    def settle(self, record: Record, due: Due) -> Contribution | None:
        """Book what is ``due``: the record names our contribution or our results, or both stay as they are.

        Returns the contribution if it is the one in flight.
        """
        if not moves_anchor(record):
            return None
        mine, f = self._named(record), record.fragment
        self.state.pending, self.state.inherits = None, False
        if mine is not None:
            self.state.contributed += 1
            self.outbox.add(record, mine)
        if due.feedback is not None:
            self.replica.feedback[f] = due.feedback
        if due.sent_N is not None:
            self.forget_given()
        self.replica.owe(f, due.owed_N)
        return mine

    def _named(self, record: Record) -> Contribution | None:
        """The contribution in flight, if it is what the record names of this peer."""
        pending = self.state.pending
        ref = next((ref for ref in contributions(record) if ref.peer == self.me), None)
        return pending if pending is not None and ref is not None and ref.frame == pending.offered else None

    def forget_leavers(self, record: Record) -> None:
        """Keep nothing of a sender that ``record`` left out. If that is this peer, what it has in flight holds a
        change of what was kept of it: that is encoded anew when it is offered again.
        """
        senders = self.replica.senders
        senders.keep_only(record.next_members)
        if senders.names and self.me not in record.next_members:
            self.forget_given()
            if self.state.pending is not None:
                self.state.pending.encoded = None

    def forget_given(self) -> None:
        """Where receivers remember, what they held of this peer is known back to the last break and no further."""
        if self.replica.senders.names:
            self.outbox.forget_after(-1)
