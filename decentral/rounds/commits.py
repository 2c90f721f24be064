"""Work that follows a commit: its outer step, the books of this peer's progress, another branch taken over.

*What happens to a peer's debt (its residual) when its frame came too late.* It stays as it was. What compression loses
of a contribution is booked with the commit that names its frame, and never before (``Bookkeeping.complete``). A commit
that does not name it books nothing: the contribution in flight is dropped, the debt is the one of the round before, and
the progress is still in the live parameters, of which the next contribution is measured. So it is sent later, once: as
much of it as H steps and the peer's usual norm allow. After more rounds than the method bears (``Quorum.staleness``),
as many steps as those, or four times the usual norm, both are given up, and the peer says so: ``share_of`` in
`decentral.training.progress`, ``anchors_without_debt`` in `decentral.training.outer_loop`.
After a commit that moves no anchor the same contribution is offered again.

A frame that a previous incarnation sent may be named too, and its debt died with that process: see
`decentral.replica.contribution` (``forget_sent``). Rounds that are given up for another branch are reclaimed: see
``Adoption``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import torch
from torch import Tensor

from decentral.compressors.feedback import SENT
from decentral.consensus.chain import Branch, Head, contributions, moves_anchor, rank_of
from decentral.replica.apply import outer_step
from decentral.replica.contribution import Contribution, Reclaimed, forget_sent
from decentral.replica.replica import OWED, Loaded, OuterStep, Replica, owed_after
from decentral.rounds.frame_io import FrameIO
from decentral.rounds.local_state import CommittedUpdate, Decision, LocalState, Steps, WentOn
from decentral.tensors.device import on_device_of
from decentral.wire.frames import Frame
from decentral.wire.keys import Digest, peer_name
from decentral.wire.messages import Commit, Record

# Shape suffix: N = elements of one fragment, flat float32.

# ---- the outer step, ahead of votes ----
#
# Most records that a peer votes for are committed, and an outer step is a pure function of the record, its frames and
# the replica. So it is made while the votes are on their way; only to install it must it wait for the commit. What was
# made of another record, or of a replica that has moved on meanwhile, is made again.


@dataclass(slots=True)
class _Making:
    """An outer step on its way."""

    of: Digest  # the record's hash
    anchor_N: Tensor  # that it is made from, with the method's state: they are replaced, and never written to
    state: Mapping[str, Tensor]
    made: OuterStep | None = None
    over: anyio.Event = field(default_factory=anyio.Event)


class StepAhead:
    """The outer step that is made ahead of votes, of one record at a time."""

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
        """Return the outer step that the record makes. Raises what `outer_step` does."""
        making, self._making = self._making, None
        if making is not None and making.of == record.hash:
            await making.over.wait()
            if making.made is not None and self._fits(making, record.fragment):
                return making.made
        return await self._of(record, frames)

    async def _make(self, making: _Making, record: Record, frames: Mapping[Digest, Frame]) -> None:
        """Make the step, shielded, as the commit that waits for it is: a task that begins in a group whose outer scope
        is cancelled already is never told, and anyio on asyncio turned round in it for ever.
        """
        try:
            with anyio.CancelScope(shield=True), suppress(Exception):  # who asks for it meets the error again
                making.made = await self._of(record, frames)
        finally:
            making.over.set()

    async def _of(self, record: Record, frames: Mapping[Digest, Frame]) -> OuterStep:
        state = self._state
        return await state.offload(outer_step, state.replica, record, frames, state.sums.results.by_frame())

    def _fits(self, making: _Making, fragment: int) -> bool:
        """Tell whether it was made of what the replica holds now."""
        replica = self._state.replica
        return making.anchor_N is replica.anchors[fragment] and making.state is replica.states[fragment]


# ---- books of progress and debt ----
#
# A commit takes something of this peer's progress, and leaves this peer something to owe.
#
# A frame that a previous incarnation of this peer sent may be named long after that one ended. Where it has a value,
# this peer's progress may be in the anchor already, and goes: a crash may lose steps, and none may count twice.


class Bookkeeping:
    """The books of this peer: contributions, with the commits that name them."""

    def __init__(self, state: LocalState) -> None:
        self.state = state
        self.me, self.replica, self.outbox = state.me, state.replica, state.outbox

    async def complete(self, step: OuterStep, record: Record, frames: Mapping[bytes, Frame]) -> OuterStep:
        """Return the step of ``record`` with this peer's books after it; off the event loop where they are as long as
        the fragment.
        """
        mine, owed_N = self._find_named(record), self.replica.owed_as_owner(record.fragment)
        lost = mine is None and any(ref.peer == self.me for ref in contributions(record))
        if lost or record.partition:
            return await self.state.offload(self._complete, step, record, frames, mine, owed_N, lost)
        return step if mine is None else replace(step, feedback=mine.feedback_after(record))

    def _complete(
        self,
        step: OuterStep,
        record: Record,
        frames: Mapping[bytes, Frame],
        mine: Contribution | None,
        owed_N: Tensor | None,
        lost: bool,
    ) -> OuterStep:
        """Add the books; ``lost``: the record names a contribution of a previous incarnation."""
        feedback, taken_N = forget_sent(self.replica, record, frames, self.me) if lost else (None, None)
        if mine is not None:
            feedback = mine.feedback_after(record)
        keeps = mine is not None and (record.round, record.plan) in mine.keeps_owed
        after_N = owed_after(owed_N, record, self.me, self.state.sums.left, self.replica.numel(record.fragment), keeps)
        return replace(step, feedback=feedback, owed_N=after_N, taken_N=taken_N)

    def settle(self, record: Record, step: OuterStep) -> Contribution | None:
        """Note a step that is installed: nothing is in flight any more. Returns what was, if the record names it."""
        mine = self._find_named(record)
        self.state.pending, self.state.inherits = None, False
        if mine is not None:
            self.state.contributed += 1
            self.outbox.add(record, mine)
        if step.taken_N is not None:
            self.forget_given()
        return mine

    def _find_named(self, record: Record) -> Contribution | None:
        """Return the contribution in flight, if it is what the record names of this peer."""
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
        """Forget what was given where receivers remember: what they held is known back to the last break and no
        further.
        """
        if self.replica.senders.names:
            self.outbox.forget_after(-1)


# ---- a commit, applied ----


class Commits:
    """The work that follows a commit: durable first, then installed, booked and told."""

    def __init__(self, state: LocalState, frames: FrameIO) -> None:
        self.state, self.frames = state, frames
        self.ahead, self.bookkeeping = StepAhead(state), Bookkeeping(state)

    async def apply(self, commit: Commit, known_since: float) -> Digest:
        """Make a commit durable, then install its step, then tell the training side; return the anchor's digest."""
        state, record = self.state, commit.record
        sending = self.frames.pushes.seconds(None if state.pending is None else state.pending.offered)
        frames = {ref.frame: state.find_stored(ref.frame) for ref in record.frames}
        data = [frames[ref.frame].data for ref in record.frames]
        await state.offload(state.ledger.append, commit, data)
        step, began = None, anyio.current_time()
        if moves_anchor(record):
            step = await self.bookkeeping.complete(await self.ahead.step(record, frames), record, frames)
            state.replica.install(step)
            if step.unmoved:
                at = {"round": record.round, "outer_step": record.outer_step + 1}
                state.on_event("unmoved", {**at, "method": state.replica.method.name, "why": step.unmoved})
        decision = self._decision(commit, sending, anyio.current_time() - began)
        named = None if step is None else self.bookkeeping.settle(record, step)
        self._show(record, frames, step, named)
        self.bookkeeping.forget_leavers(record)
        self.frames.pushes.end_round(record, known_since)
        self._tell_shrunk(record)
        state.note_members(record.members, decision.leader, anyio.current_time())
        self.frames.tidy(record.round)
        update = self._update(record, step, named, decision)
        state.on_update(update)
        return update.anchor

    def _update(
        self, record: Record, step: OuterStep | None, named: Contribution | None, decision: Decision
    ) -> CommittedUpdate:
        """Return a commit as the training side sees it; without a step only the membership changed."""
        replica, where = self.state.replica, (record, record.hash, record.fragment)
        if step is None:
            return CommittedUpdate(*where, None, None, None, record.base, decision=decision)
        return CommittedUpdate(
            *where,
            step.before_N,
            step.after_N,
            named,
            replica.digest,
            buffers_B=replica.shared_buffers(record.fragment),
            state=step.state if replica.method.inner else {},
            channels=step.channels,
            unmoved=bool(step.unmoved),
            taken_N=step.taken_N,
            decision=decision,
        )

    def _show(
        self, record: Record, frames: Mapping[Digest, Frame], step: OuterStep | None, named: Contribution | None
    ) -> None:
        """Show a commit to observers, with what the round measured itself: estimates, or slices of a part of ours."""
        state = self.state
        known = (None if step is None else step.measures) or state.sums.measured.get((record.round, record.plan))
        for observer in state.observers:
            state.tasks.spawn(observer.name_contributors, record, frames, known)
            if step is not None:
                observer.see_commit(record, frames, step, named, known)

    def _decision(self, commit: Commit, sending: float | None, applying: float) -> Decision:
        """Describe a commit. The order of leaders is that of the round it ends: the machine stands at the next one."""
        record, ballot = commit.record, commit.certificate.ballot
        before = self.state.machine.state.history.at((record.round - 1, record.previous))
        assert before is not None, "the machine has just gone on from there"
        leaders = self.state.terms.voting.leaders(before)
        leader = leaders[ballot % len(leaders)]
        return Decision(leader, ballot, len(commit.certificate.votes), sending, applying)

    def _tell_shrunk(self, record: Record) -> None:
        given_up = self.state.machine.state.given_up
        gone = given_up & (set(record.members) - set(record.next_members))
        if gone:
            if gone == given_up and self.state.me not in gone:  # else it had gone on without others before, or away
                self.state.went_on = WentOn(record.outer_step, anyio.current_time())
            names = [peer_name(peer) for peer in sorted(gone)]
            head = self.state.head
            where = {"round": record.round, "epoch": head.epoch, "outer_step": head.outer_step}
            fields = {**where, "given_up": names, "away": self.state.me in gone}
            self.state.on_event("shrunk", {**fields, "members": [peer_name(peer) for peer in record.next_members]})


# ---- adopting another branch ----
#
# It is another branch of the chain, or a place too far ahead to replay to; this peer has progress of its own, some of
# which stays and some of which goes.
#
# The training side is told moves of the anchor. Progress is the anchor less the live parameters, so what must stay or
# go is said by where the move begins: further from the live parameters by what is owed again, nearer by what was taken.


class Adoption:
    """The taking over of verified snapshots."""

    def __init__(self, state: LocalState, steps: Steps, frames: FrameIO, bookkeeping: Bookkeeping) -> None:
        self.state, self.steps, self.frames, self.bookkeeping = state, steps, frames, bookkeeping
        self.me, self.replica, self.outbox = state.me, state.replica, state.outbox

    async def adopt(self, head: Head, tensors: Mapping[str, Tensor], branch: Branch) -> None:
        """Take over a verified snapshot: another branch, or too far ahead to replay. Gossip takes over no tensors.

        What this peer gave to rounds that are given up is owed again, and what the records of the branch took from it
        is not: the debt stays as it is.
        """
        state = self.state
        async with self.steps.lock:
            if not self._is_still_better(head, branch):
                return  # ours grew meanwhile
            if branch.shared is None and state.head.anchor is not None:
                await state.offload(state.ledger.set_aside, state.head, self._all_of_ours())
            owed = await state.offload(self._reclaim, branch)
            taken = {} if state.gossips else self._find_taken(branch)
            was, book = list(state.replica.feedback), partial(self._book_after, branch, taken)
            books = await state.offload(lambda: [book(f, own) for f, own in enumerate(was)])
            loaded = await state.offload(state.replica.read, tensors) if tensors else None
            moves = await state.offload(self._moves, head, branch, owed, taken, loaded)
            await state.offload(state.ledger.adopt, head, tensors)
            # From here on nothing is waited for until all of it is there. A pair may have stepped meanwhile, or the
            # live model started over without its debts: what they booked counts.
            state.reclaimed = state.reclaimed or bool(owed)
            self._take_over(loaded)
            for f, own in enumerate(state.replica.feedback):
                state.replica.feedback[f] = books[f] if own is was[f] else book(f, own)
            self._tell_adopted(head, branch, owed)
            state.pending, state.inherits = None, False
            heals = branch.shared is None or branch.shared.hash != state.head.hash
            members = state.head.members
            state.machine.state.switch(head, branch, anyio.current_time())
            state.note_members(members, None, anyio.current_time())
            if heals:
                state.machine.listen_first(anyio.current_time(), excused=False)
            self.frames.tidy(head.round)
            for move in moves or [self._no_move(head)]:
                state.on_update(replace(move, anchor=state.replica.digest))
            if not state.machine.state.forgetful:
                await state.offload(state.ledger.save_acceptor, state.machine.state.acceptor.to_bytes())

    def _is_still_better(self, head: Head, branch: Branch) -> bool:
        machine = self.state.machine.state
        if branch.shared is None:  # whoever could check it has said so
            return head.hash != self.state.head.hash
        way = (branch.shared, *(branch.heads or (head,)))
        return rank_of(way, machine.terms.voting) > rank_of(machine.history.since(branch.shared), machine.terms.voting)

    def _all_of_ours(self) -> dict[str, Tensor]:
        return {**self.replica.shared_tensors(), **self.replica.own_tensors()}

    def _take_over(self, loaded: Loaded | None) -> None:
        """Install what a snapshot holds; it has nothing of what this peer owes."""
        if loaded is not None:
            self.replica.take_over(replace(loaded, feedback=self.replica.feedback))

    def _no_move(self, head: Head) -> CommittedUpdate:
        """Make the update of an adoption in gossip: a swap may have moved replica and live model meanwhile."""
        return CommittedUpdate(None, head.hash, 0, None, None, None, adopted=True)

    def _moves(
        self,
        head: Head,
        branch: Branch,
        owed: Mapping[int, Reclaimed],
        taken: Mapping[int, Contribution | None],
        loaded: Loaded | None,
    ) -> list[CommittedUpdate]:
        """Return an adoption as the training side sees it, an update for each fragment; nothing in gossip."""
        if self.state.gossips:
            return []
        to, last = loaded or self.replica, len(self.replica.anchors) - 1
        moves = [self._move(f, old_N, to, owed.get(f), taken) for f, old_N in enumerate(self.replica.anchors)]
        rounds, parted = _rounds_of_each(head, branch, len(moves)), _step_of_parting(self.state.head, branch)
        return [
            replace(move, head=head.hash, rounds=rounds, parted=parted, whole=f == last) for f, move in enumerate(moves)
        ]

    def _move(
        self,
        f: int,
        old_N: Tensor,
        to: Loaded | Replica,
        owed: Reclaimed | None,
        taken: Mapping[int, Contribution | None],
    ) -> CommittedUpdate:
        """Return the update of one fragment.

        What the branch took is taken as it was measured: of a slow peer more is sent, after an absence less, and what
        is over is given up.
        """
        before_N, steps = (old_N, 0) if owed is None else (old_N + owed.gradient_N, owed.steps)
        taken_N, mine = None, taken.get(f)
        if mine is not None:
            before_N = before_N - on_device_of(mine.live_progress_N, before_N)
            steps -= mine.trained
        elif f in taken:
            taken_N = torch.ones(len(old_N), dtype=torch.bool, device="cpu")
        method = self.replica.method
        return CommittedUpdate(
            None, b"", f, before_N, to.anchors[f], None, reclaimed_steps=steps, adopted=True, took=mine is not None,
            buffers_B=to.buffers_B if self.replica.tail.nbytes(f) else None,
            taken_N=taken_N, state=to.states[f] if method.inner else {},
            channels=frozenset(channel.name for channel in method.channels()),
        )  # fmt: skip

    def _reclaim(self, branch: Branch) -> dict[int, Reclaimed]:
        """Reclaim, by fragment, what this peer gave to the rounds since ``branch`` left; nothing where that is not
        known.
        """
        if branch.shared is None:
            return {}
        fragments = range(len(self.replica.anchors))
        replica, after = self.replica, branch.shared.round
        sent = [replica.senders.of(f, self.me).get(SENT) for f in fragments]  # None under most mechanisms
        found = {f: self.outbox.reclaim(after, f, replica.shapes(f), sent[f]) for f in fragments}
        return {f: owed for f, owed in found.items() if owed is not None}

    def _find_taken(self, branch: Branch) -> dict[int, Contribution | None]:
        """Find, by fragment, what the records of ``branch`` took from this peer; None: something, and nobody knows
        what.
        """
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
        """Return the contribution in flight, if ``frame`` is what it offered and all of that is known."""
        pending = self.state.pending
        known = pending is not None and pending.encoded is not None and pending.offered == frame
        return pending if known else None

    def _book_after(
        self, branch: Branch, taken: Mapping[int, Contribution | None], f: int, own: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the debts of a fragment on ``branch``, where they are ``own`` now.

        What the branch took is booked as its commit would have: progress and debt apart. Taking all that was sent from
        the progress leaves the same sum, until a crash drops one of the two.
        """
        own = self._book_as_owner(branch, f, own)
        if f not in taken:
            return own
        mine = taken[f]
        if mine is None:
            return {OWED: own[OWED]} if OWED in own else {}
        assert mine.encoded is not None, "see _find_taken"
        return mine.encoded.feedback

    def _book_as_owner(self, branch: Branch, f: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the debts after what a branch that follows on our chain took. On another branch contributors send
        again all that they gave to the rounds given up: nothing is owed as their owner any more.
        """
        if branch.shared is None or branch.shared.hash != self.state.head.hash:
            return {name: own[name] for name in own if name != OWED} if OWED in own else own
        for record in branch.records:
            if record.fragment == f:
                owed_N = owed_after(own.get(OWED), record, self.me, self.state.sums.left, self.replica.numel(f))
                own = own if owed_N is None else {**own, OWED: owed_N}
        return own

    def _tell_adopted(self, head: Head, branch: Branch, owed: Mapping[int, Reclaimed]) -> None:
        """Tell the events of an adoption; ``healed`` when rounds of ours are given up for it."""
        old, shared, parted = self.state.head, branch.shared, _step_of_parting(self.state.head, branch)
        self.outbox.forget_after(-1 if shared is None else shared.round)
        self.bookkeeping.forget_given()
        at: dict[str, object] = {"round": head.round, "epoch": head.epoch, "outer_step": head.outer_step}
        what = {"record": head.hash.hex(), "anchor": self.replica.digest.hex()}
        self.state.on_event("resynced", {**at, **what})
        if parted is None:
            return
        self.state.went_on = None  # that was the other branch
        self.state.on_event(
            "healed",
            {
                **at,
                "parted": None if self.state.gossips else parted,
                "given_up": None if shared is None else old.outer_step - parted,
                "kept": sum(one.rounds for one in owed.values()),
                "steps": sum(one.steps for one in owed.values()),
            },
        )


def _step_of_parting(ours: Head, branch: Branch) -> int | None:
    """Return the outer step after which our rounds are given up for ``branch``: 0 where it left too long ago to be
    known; None where it follows ``ours``.
    """
    if branch.shared is None:
        return 0
    return None if branch.shared.hash == ours.hash else branch.shared.outer_step


def _rounds_of_each(head: Head, branch: Branch, num_fragments: int) -> int:
    """Return the outer steps of each fragment on ``branch``; all of the run's where it left ours too long ago to be
    known.
    """
    left = 0 if branch.shared is None else branch.shared.outer_step
    return -(-(head.outer_step - left) // num_fragments)
