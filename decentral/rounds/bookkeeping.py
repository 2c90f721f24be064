"""What becomes of this peer's own progress when the chain moves: taken by a commit, given up with a branch, or kept.

The training side is told moves of the anchor. Progress is the anchor less the live parameters, so what must stay or go
is said by where the move begins: further from the live parameters by what is owed again, nearer by what was taken.
A frame that a previous incarnation of this peer sent may be named long after that one ended. Where it has a value, this
peer's progress may be in the anchor already, and goes: a crash may lose steps, and none may count twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import torch
from torch import Tensor

from decentral.consensus.chain import Head, contributions, moves_anchor
from decentral.consensus.history import Branch
from decentral.replica.contribution import Contribution
from decentral.replica.outbox import Owed
from decentral.replica.owing import OWED, owed_after
from decentral.rounds.frame_io import FrameIO
from decentral.rounds.local_state import LocalState
from decentral.rounds.steps import Steps
from decentral.rounds.updates import CommittedUpdate
from decentral.tensors.devices.transfer import beside
from decentral.wire.frames import Frame
from decentral.wire.messages import Record

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Due:
    """What a commit has this peer book; None: nothing new, or nothing that takes time to make."""

    feedback: dict[str, Tensor] | None = None  # as a contributor
    owed_N: Tensor | None = None  # as an owner


NOTHING_DUE = Due()


class Bookkeeping:
    """Books contributions with the commits that name them, and adopts branches."""

    def __init__(self, state: LocalState, steps: Steps, frames: FrameIO) -> None:
        self.state, self.steps, self.frames = state, steps, frames
        self.me, self.replica, self.outbox = state.me, state.replica, state.outbox

    async def adopt(self, head: Head, tensors: Mapping[str, Tensor], branch: Branch) -> None:
        """Take over a verified snapshot: another branch, or too far ahead to replay. Gossip takes over no tensors.

        What this peer gave to rounds that are given up is owed again, and what the records of the branch took from it
        is not: the debt stays as it is.
        """
        state = self.state
        async with self.steps.lock:
            if head.weight <= state.head.weight:
                return  # ours grew meanwhile
            owed = await state.offload(self._owed, branch)
            taken = self._taken(branch)
            state.reclaimed = state.reclaimed or bool(owed)
            self._settle_as_owner(branch)
            before = list(state.replica.anchors)
            await state.offload(state.ledger.adopt, head, tensors)
            if tensors:
                state.replica.load({**tensors, **state.replica.own_tensors()})
            self._tell_adopted(head, branch, owed)
            state.pending, state.inherits = None, False
            state.machine.state.switch(head, branch, anyio.current_time())
            self.frames.tidy(head.round)
            if not state.machine.state.forgetful:
                await state.offload(state.ledger.save_acceptor, state.machine.state.acceptor.to_bytes())
            if state.gossips:  # a swap may have moved replica and live model meanwhile
                state.on_update(CommittedUpdate(None, head.hash, 0, None, None, None, state.replica.digest))
                return
            rounds = _rounds_of_each(head, branch, len(before))
            for f, old_N in enumerate(before):
                state.on_update(self._move(head, f, old_N, owed.get(f), taken, rounds))

    def _move(
        self,
        head: Head,
        f: int,
        old_N: Tensor,
        owed: Owed | None,
        taken: Mapping[int, Contribution | None],
        rounds: int,
    ) -> CommittedUpdate:
        """One fragment's part of an adoption, as the training side sees it.

        What the branch took is booked as its commit would have: progress and debt apart. Taking all that was sent from
        the progress leaves the same sum, until a crash drops one of the two. It is taken as it was measured: of a slow
        peer more is sent, after an absence less, and what is over is given up.
        """
        before_N, steps = (old_N, 0) if owed is None else (old_N + owed.gradient_N, owed.steps)
        taken_N, mine = None, taken.get(f)
        if mine is not None:
            assert mine.encoded is not None, "see _taken"
            before_N = before_N - beside(mine.measured_N, before_N)
            self.replica.feedback[f] = mine.encoded.feedback
            steps -= mine.trained
        elif f in taken:
            taken_N, self.replica.feedback[f] = torch.ones(len(old_N), dtype=torch.bool), self._owed_as_owner(f)
        after_N, anchor = self.replica.anchors[f], self.replica.digest
        buffers_B = self.replica.shared_buffers(f)
        method = self.replica.method
        return CommittedUpdate(
            None, head.hash, f, before_N, after_N, None, anchor, steps, rounds, buffers_B, took=mine is not None,
            taken_N=taken_N, state=self.replica.states[f] if method.inner else {},
            channels=frozenset(channel.name for channel in method.channels()),
        )  # fmt: skip

    def _owed(self, branch: Branch) -> dict[int, Owed]:
        """By fragment, what this peer gave to the rounds since ``branch`` left; nothing where that is not known."""
        if branch.shared is None:
            return {}
        fragments = range(len(self.replica.anchors))
        replica, after = self.replica, branch.shared.round
        sent = [replica.senders.of(f, self.me).get("sent") for f in fragments]  # None under most mechanisms
        found = {f: self.outbox.owed(after, f, replica.shapes(f), sent[f]) for f in fragments}
        return {f: owed for f, owed in found.items() if owed is not None}

    def _taken(self, branch: Branch) -> dict[int, Contribution | None]:
        """By fragment, what the records of ``branch`` took from this peer; None: something, and nobody knows what."""
        if branch.shared is None:
            unsure = self.state.inherits or self.state.reclaimed or self.state.pending is not None
            return dict.fromkeys(range(len(self.replica.anchors)), None) if unsure else {}
        found: dict[int, Contribution | None] = {}
        for record in branch.records:
            for ref in contributions(record):
                if ref.peer == self.me:
                    found[record.fragment] = self._pending_as(ref.frame)
        return found

    def _pending_as(self, frame: bytes) -> Contribution | None:
        """The contribution in flight, if ``frame`` is what it offered and all of that is known."""
        pending = self.state.pending
        known = pending is not None and pending.encoded is not None and pending.offered == frame
        return pending if known else None

    def _settle_as_owner(self, branch: Branch) -> None:
        """Book what a branch that follows on our chain took. Of another, contributors owe again all that they gave to
        the rounds given up: nothing is owed as their owner any more.
        """
        follows = branch.shared is not None and branch.shared.hash == self.state.head.hash
        for record in branch.records if follows else ():
            self.replica.owe_after(record, self.me, self.state.left, self.replica.owed(record.fragment))
        if not follows:
            kept = [{name: own[name] for name in own if name != OWED} for own in self.replica.feedback]
            self.replica.feedback = kept

    def _owed_as_owner(self, fragment: int) -> dict[str, Tensor]:
        owed_N = self.replica.owed(fragment)
        return {} if owed_N is None else {OWED: owed_N}

    async def made_of(self, record: Record) -> Due:
        """What is to be booked with ``record``, of a reduce: as long as the fragment, so not made on the event loop."""
        if not record.partition:
            return NOTHING_DUE
        owed_N, mine = self.replica.owed(record.fragment), self._named(record)
        return await self.state.offload(self._made_of, record, mine, owed_N)

    def _made_of(self, record: Record, mine: Contribution | None, owed_N: Tensor | None) -> Due:
        keeps = mine is not None and (record.round, record.plan) in mine.hands_on_nothing
        after_N = owed_after(owed_N, record, self.me, self.state.left, self.replica.numel(record.fragment), keeps)
        return Due(None if mine is None else mine.feedback_after(record), after_N)

    def settle(
        self, record: Record, frames: Mapping[bytes, Frame], due: Due
    ) -> tuple[Contribution | None, Tensor | None]:
        """Book the debts if the record names our contribution or our results; else they stay as they are, and the
        contribution whole in the local parameters. ``due``: what ``made_of`` it.

        Returns the contribution if it is the one in flight; where a previous incarnation sent it, what it took.
        """
        if not moves_anchor(record):
            return None, None
        named, taken_N = self._settle_contribution(record, frames, due)
        if taken_N is not None:
            self._forget_given()
        self.replica.owe(record.fragment, due.owed_N)
        return named, taken_N

    def _settle_contribution(
        self, record: Record, frames: Mapping[bytes, Frame], due: Due
    ) -> tuple[Contribution | None, Tensor | None]:
        mine = self._named(record)
        self.state.pending, self.state.inherits = None, False
        if mine is None:
            names_me = any(ref.peer == self.me for ref in contributions(record))
            return None, self.replica.forget_sent(record, frames, self.me) if names_me else None
        self.state.contributed += 1
        self.outbox.add(record, mine)
        made = due.feedback if due.feedback is not None else mine.feedback_after(record)
        self.replica.feedback[record.fragment] = made
        return mine, None

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
            self._forget_given()
            if self.state.pending is not None:
                self.state.pending.encoded = None

    def _forget_given(self) -> None:
        """Where receivers remember, what they held of this peer is known back to the last break and no further."""
        if self.replica.senders.names:
            self.outbox.forget_after(-1)

    def _tell_adopted(self, head: Head, branch: Branch, owed: Mapping[int, Owed]) -> None:
        """Events of an adoption; ``healed`` when rounds of ours are given up for it."""
        old, shared = self.state.head, branch.shared
        self.outbox.forget_after(-1 if shared is None else shared.round)
        self._forget_given()
        where = {"record": head.hash.hex(), "anchor": self.replica.digest.hex()}
        self.state.on_event("resynced", {"round": head.round, "epoch": head.epoch, **where})
        if shared is not None and shared.hash == old.hash:
            return
        self.state.on_event(
            "healed",
            {
                "round": head.round,
                "epoch": head.epoch,
                "given_up": None if shared is None else old.outer_step - shared.outer_step,
                "kept": sum(one.rounds for one in owed.values()),
                "steps": sum(one.steps for one in owed.values()),
            },
        )


def _rounds_of_each(head: Head, branch: Branch, num_fragments: int) -> int:
    """Outer steps of each fragment on ``branch``; all of the run's where it left ours too long ago to be known."""
    left = 0 if branch.shared is None else branch.shared.outer_step
    return -(-(head.outer_step - left) // num_fragments)
