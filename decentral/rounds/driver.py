"""Carries out what the round machine decides: offers, logs, applies. One per peer, on the swarm's event loop.

Layered by role: carrier (frames and messages), reducing (partitions), settling (what of this peer's progress a commit
takes), driver (contributions, commits, time).
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.abc

from decentral.consensus.acceptor import Acceptor
from decentral.consensus.chain import Head, moves_anchor
from decentral.consensus.effects import CatchUpWith, Decide, Effect, Fetch, Persist, Send, SendSlices
from decentral.consensus.machine import TICK, RoundMachine
from decentral.replica.contribution import Contribution
from decentral.replica.measures import Measure
from decentral.rounds.bookkeeping import Bookkeeping
from decentral.rounds.frame_io import SEND_TIMEOUT, CommittedUpdate, Ledger
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import (
    Behind,
    Commit,
    JoinRequest,
    Record,
)

__all__ = ["CommittedUpdate", "Driver", "Ledger"]

JOIN_EVERY = 1.0  # s between requests to be let in


class Driver(Bookkeeping):
    """One peer's rounds. ``run`` it in a task; ``contribute`` from the training side."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled."""
        head, acceptor, past = self._start
        self.machine = RoundMachine(self.signer, head, self.terms, anyio.current_time(), acceptor)
        self.machine.remember(past)
        self._make_room()
        for frame in past.frames:
            self._keep(frame)
        try:
            async with anyio.create_task_group() as group:
                self._group = group
                task_status.started()
                await self._tick_forever()
        finally:
            self._over = True

    async def contribute(self, contribution: Contribution) -> bool:
        """Offer a pseudo-gradient for the next round; False when it does not fit the chain as it stands now.

        Nothing of this peer's state changes before a commit names it. Raises NonFiniteError.
        """
        head = self.head
        if not self._takes(contribution, head):
            return False
        if self.terms.partition is None and contribution.encoded is None:
            contribution.encoded = await self.offload(
                self.replica.encode, contribution.fragment, contribution.gradient_N
            )
        elif self.terms.partition is not None:  # slices are encoded when there is a plan: too late to tell the caller
            await self.offload(self.replica.check_finite, contribution.fragment, contribution.gradient_N)
            contribution.offered = await self.offload(contribution.commitment)
        async with self._lock:
            if not self._takes(contribution, self.head) or self.head.anchor != head.anchor:
                return False
            self.pending = contribution
            await self._offer()
        return True

    async def goodbye(self) -> None:
        """Tell everybody that this peer leaves, so that nobody waits for it; ``come_back`` takes it back."""
        self.stopping = True
        with anyio.move_on_after(SEND_TIMEOUT / 2):
            async with self._lock:  # what a step decides on is durable, and said, before this is
                farewell, members = self.machine.leave(), self.head.members
            async with anyio.create_task_group() as group:
                for peer in members:
                    if peer != self.me:
                        group.start_soon(self._send, peer, farewell)

    async def come_back(self) -> None:
        """Vote again, and ask to be let in where this peer was left out meanwhile."""
        self.stopping = False
        self.machine.stay()
        for peer in self.head.members:
            if peer != self.me:
                self._spawn(self._send, peer, JoinRequest(self.head.round, self.head.hash))

    async def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._spawn(self._send, effect.to, effect.message)
            elif isinstance(effect, Persist):
                await self._persist(effect.acceptor)
            elif isinstance(effect, Fetch):
                if effect.record is not None and effect.record.contributors:
                    self.inbox.expect(effect.record)
                self._spawn(self.asking.fetch, effect, self.head.round + 1)
            elif isinstance(effect, SendSlices):
                self.inbox.expect(effect.plan)
                self._spawn(self._reduce, effect.plan, self.head)
            elif isinstance(effect, Decide):
                await self._decide(effect.commit)
            elif isinstance(effect, CatchUpWith):
                self.catch_up(effect.peer)

    async def _persist(self, acceptor: Acceptor) -> None:
        """The vote, and before it the frames it vouches for: a later leader may find them here only."""
        record = acceptor.accepted
        if record is not None and all(ref.frame in self.store for ref in record.frames):
            await self.offload(self.ledger.keep, record, [self._stored(ref.frame).data for ref in record.frames])
        await self.offload(self.ledger.save_acceptor, acceptor.to_bytes())

    async def _decide(self, commit: Commit) -> None:
        """Durable first, then applied, then announced."""
        record = commit.record
        frames = {ref.frame: self._stored(ref.frame) for ref in record.frames}
        data = [frames[ref.frame].data for ref in record.frames]
        await self.offload(self.ledger.append, commit, data)
        before_N = after_N = buffers_B = None
        if moves_anchor(record):
            step = await self.offload(self.replica.outer_step, record, frames, self._results.by_frame())
            before_N, after_N = step.before_N, step.after_N
            self.replica.install(step)
            buffers_B = self.replica.shared_buffers(record.fragment)
        self._spawn(self._look_at, record, frames, self._measured.get((record.round, record.plan)))
        named, taken_N = self._settle(record, frames)
        self._end_pushes(record)
        self._tell_shrunk(record)
        self._tidy(record.round)
        anchor = self.replica.digest if moves_anchor(record) else record.base
        moved = (record.fragment, before_N, after_N, named, anchor)
        self.on_advance(CommittedUpdate(record, record.hash, *moved, buffers_B=buffers_B, taken_N=taken_N))
        await self._carry_out(self.machine.applied(anchor, anyio.current_time()))
        if record.final:
            self._tell_the_end(record)
        if self.pending is not None and self._takes_again(record):
            await self._offer()

    async def _look_at(
        self, record: Record, frames: Mapping[bytes, Frame], slices: Mapping[PeerId, Measure] | None
    ) -> None:
        """Tell of outliers and twins: in a gather every peer sees all, in a reduce an owner its part of all."""
        if record.contributors:
            measured = slices or {}
        else:
            named = [(ref.peer, frames[ref.frame]) for ref in record.frames]
            gathered = [(peer, frame) for peer, frame in named if frame.header.kind == FrameKind.CONTRIBUTION]
            measured = {peer: await self.offload(self.replica.measure, frame) for peer, frame in gathered}
        for event, fields in self.scrutiny.events(record, measured):
            self.on_event(event, fields)

    def _tell_the_end(self, record: Record) -> None:
        """Nothing follows that would show who has it: say so, for those who stay until everybody has."""
        for peer in record.next_members:
            if peer != self.me:
                self._spawn(self._send, peer, Behind(record.round))

    def lacks_the_end(self, peer: PeerId) -> bool:
        """Whether a member is here and has not reached this peer's head, as far as it said."""
        lease = self.directory.live().get(peer)
        if lease is None or peer in self.machine.presence.leaving:
            return False
        return max(lease.round, self.machine.stands_at.get(peer, 0)) < self.head.round

    def _tell_shrunk(self, record: Record) -> None:
        gone = self.machine.given_up & (set(record.members) - set(record.next_members))
        if gone:
            names = [peer_name(peer) for peer in sorted(gone)]
            fields = {"round": record.round, "epoch": self.head.epoch, "given_up": names}
            self.on_event("shrunk", {**fields, "members": [peer_name(peer) for peer in record.next_members]})

    def _takes(self, contribution: Contribution, head: Head) -> bool:
        open_ = head.anchor is not None and not head.final and self.me in head.members and self.pending is None
        open_ = open_ and contribution.based_on == head.hash
        return open_ and contribution.fragment == head.fragment(self.terms.num_fragments)

    def _takes_again(self, record: Record) -> bool:
        return not moves_anchor(record) and not self.head.final and self.is_member

    async def _offer(self) -> None:
        """Offer the pending contribution for the open round. The lock is held."""
        pending, head, now = self.pending, self.head, anyio.current_time()
        assert pending is not None
        if self.terms.partition is not None:
            nbytes = self.replica.codec.max_body_nbytes(((self.replica.numel(pending.fragment),),)) + len(pending.tail)
            offer = pending.offer(head, pending.offered, nbytes)
            await self._carry_out(self.machine.offer(offer, now))
            self.allowed = self.machine.allowed()
            return
        assert pending.encoded is not None
        frame = await self.offload(pending.frame, head, self.signer)
        pending.offered = frame.hash
        self._keep(frame)
        effects = self.machine.hold(frame.hash, frame.header, now)
        effects += self.machine.offer(pending.offer(head, frame.hash, len(frame.body)), now)
        self._spawn(self._push, frame, head.members)
        if pending.kind == FrameKind.CONTRIBUTION:
            self._spawn(self.offload, self.replica.measure, frame)  # meanwhile: the outer step may need it
        await self._carry_out(effects)
        self.allowed = self.machine.allowed()

    async def _tick_forever(self) -> None:
        asked = -JOIN_EVERY
        while True:
            now = anyio.current_time()
            if self._fatal is not None:
                raise self._fatal
            await self._step(self.machine.tick)
            await self._step(lambda now: self.machine.liveness(*self._absent(now), now))
            if not self.is_member and not self.stopping and self.head.anchor and now - asked >= JOIN_EVERY:
                asked = now
                for peer in self.directory.live():
                    self._spawn(self._send, peer, JoinRequest(self.head.round, self.head.hash))
            self.allowed = self.machine.allowed()
            left = self.machine.time_left(now)
            self.pressed = None if left is None else (self.head.hash, left)
            self._look_for_other_chains(now)
            self._look_who_remembers(now)
            await anyio.sleep(TICK)

    def _absent(self, now: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Members not heard of for a lease, and for so long that they are given up."""
        self._leave_out_own_sleep(now)
        live = self.directory.live()
        for peer in self.head.members:
            if peer in live or peer not in self._heard:
                self._heard[peer] = now
        silent = {peer: now - self._heard[peer] for peer in self.head.members if peer != self.me}
        expired = frozenset(peer for peer, s in silent.items() if s > self.lease / 2)
        return expired, frozenset(peer for peer in expired if silent[peer] > self.shrink_after)

    def _leave_out_own_sleep(self, now: float) -> None:
        """Time in which this process stood still is nobody else's silence.

        A laptop that was shut for longer than ``shrink_after`` gave up all the others the moment it woke, and
        committed a round of its own that they had committed long ago.
        """
        slept = now - (now if self._looked is None else self._looked)
        self._looked = now
        if slept > self.lease / 2:
            self._heard = {peer: min(now, heard + slept) for peer, heard in self._heard.items()}

    def _look_who_remembers(self, now: float) -> None:
        """Rounds that this peer's disk forgot: once all members have said for a lease that they know none, go on."""
        if not self.machine.forgetful:
            self._asked_since = None
            return
        live, given_up = self.directory.live(), self.machine.presence.given_up()
        told = [
            p in live and live[p].round <= self.head.round for p in self.head.members if p not in {self.me, *given_up}
        ]
        self._asked_since = (now if self._asked_since is None else self._asked_since) if all(told) else None
        if self._asked_since is not None and now - self._asked_since > self.lease:
            self.machine.forget()
            self.on_event("forgot", {"round": self.head.round})

    def _look_for_other_chains(self, now: float) -> None:
        """A peer two rounds ahead, or one round for long: we missed a commit. One that stays on another branch: either
        must adopt. A member may stand there, too, that left us out in the same round.

        Branches come from a partition, or from a chain that was given up and came back; comparing them is the
        catch-up's work, and both sides start it, so it does not matter which is the longer.
        """
        head, rivals = self.head, {}
        for peer, lease in self.directory.live().items():
            if lease.round > head.round + 1:
                self.catch_up(peer)
            elif lease.digest != head.hash and (lease.round >= head.round or self._is_outside(peer)):
                rivals[peer] = self._rivals.get(peer, now)
        for peer, since in rivals.items():
            if now - since > self.lease:
                rivals[peer] = now
                self.catch_up(peer)
        self._rivals = rivals

    def _is_outside(self, peer: PeerId) -> bool:
        return peer not in self.head.members and peer not in self.machine.joiners
