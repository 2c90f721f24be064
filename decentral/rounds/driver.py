"""The shell of the round machine: it ticks, and its effects are carried out in order. One per peer, on the event loop.

``Driver._carry_out`` shows the whole of a round: each effect of `decentral.consensus.round_state`, and the part that
does it. The parts act on one `LocalState`: Offering (this peer's contribution), FrameIO (frames and messages), Reducer
(the parts of a reduce), Commits (the outer step, books, news), Adoption (another branch), Membership (this peer's place
among the others), PeerWatch (peers that are silent, or elsewhere). When a round hangs,
`decentral.consensus.machine` says where to look; a step that failed here is in ``Steps.failure``, and ends the peer at
the next tick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import anyio
import anyio.abc

from decentral.consensus.chain import Head, moves_anchor
from decentral.consensus.machine import TICK, RoundMachine
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import CatchUpWith, Decide, Effect, Fetch, Mistake, Persist, Send, SendSlices
from decentral.flow.waiting import Repeats
from decentral.replica.codec import Encoded
from decentral.replica.contents import MAKERS
from decentral.replica.contribution import Contribution, encode_whole
from decentral.rounds.commits import Adoption, Commits
from decentral.rounds.frame_io import SEND_TIMEOUT, FrameIO
from decentral.rounds.local_state import (
    Listeners,
    LocalState,
    OwnParts,
    Steps,
    SwarmAccess,
    tell_unexpected,
)
from decentral.rounds.peer_watch import PeerWatch
from decentral.rounds.reduce import Reducer
from decentral.wire.frames import FrameKind
from decentral.wire.keys import Digest
from decentral.wire.messages import Behind, Commit, JoinRequest, Record, join_text

JOIN_EVERY = 1.0  # s until a peer is asked for the second time to let this one in; then twice as long each time
JOIN_LONGEST = 8.0  # s between requests to the same peer: who begins to lead must know of this one in a round or two
JUDGE_EVERY = 3.0  # s between looks at how long others may take, which is seconds and minutes
LOOK_EVERY = 1.0  # s between looks at who is here; a twentieth of a lease where that is less


class Offering:
    """The way of a contribution to the others: encoded, offered for the open round, and pushed."""

    def __init__(self, state: LocalState, frames: FrameIO) -> None:
        self.state, self.frames = state, frames

    async def prepare(self, contribution: Contribution, head: Head) -> None:
        """Encode what is to be offered; in a reduce commit to it. Raises NonFiniteError."""
        state = self.state
        if state.terms.partition is None and contribution.encoded is None:
            contribution.encoded = await self._encode(contribution)
        elif state.terms.partition is not None:  # slices are encoded when there is a plan: too late to tell the caller
            await state.offload(contribution.check_finite, state.replica)
            contribution.offered = await state.offload(contribution.commitment, head)

    def tell_unsaid(self, made: Contribution) -> None:
        """Tell where what the method says of a contribution cannot go beside its offer."""
        if made.unsaid:
            at = {"round": self.state.head.round + 1, "outer_step": self.state.head.outer_step + 1}
            self.state.on_event("unsaid", {**at, "method": self.state.replica.method.name, "why": made.unsaid})

    async def _encode(self, made: Contribution) -> Encoded:
        replica, me = self.state.replica, self.state.me
        # In the thread ``gradient_N`` is asked for, too: what is sent may not be made yet.
        encoded = await self.state.offload(
            lambda: encode_whole(replica, made.fragment, made.gradient_N, made.states, me)
        )
        made.let_go()
        return encoded

    def takes(self, contribution: Contribution, head: Head) -> bool:
        """Tell whether a contribution fits the round after ``head``, and none is in flight."""
        is_in = self.state.me in head.members and self.state.pending is None
        open_ = head.anchor is not None and not head.final and is_in
        open_ = open_ and contribution.based_on == head.hash
        open_ = open_ and head.outer_step - contribution.base_step(head) <= self.state.terms.max_staleness
        return open_ and contribution.fragment == head.fragment(self.state.terms.num_fragments)

    def takes_again(self, record: Record) -> bool:
        """Tell whether what is in flight is offered again after ``record``."""
        return not moves_anchor(record) and not self.state.head.final and self.state.is_member

    async def offer(self) -> list[Effect]:
        """Offer the pending contribution for the open round; return what is to be carried out. The lock is held."""
        state, head, pending = self.state, self.state.head, self.state.pending
        assert pending is not None
        now = anyio.current_time()
        if state.terms.partition is not None:
            channels = 1 + len(pending.states)
            shapes = ((state.replica.numel(pending.fragment),),) * channels
            nbytes = state.replica.codec.max_body_nbytes(shapes, channels) + MAKERS * len(pending.tail)
            return state.machine.offer(pending.offer(head, pending.offered, nbytes), now)
        if pending.encoded is None:  # see Bookkeeping.forget_leavers
            pending.encoded = await self._encode(pending)
        frame = await state.offload(pending.frame, head, state.signer)
        pending.offered = frame.hash
        payloads = pending.encoded.payloads  # () when there was no room for them before: that is not what it holds
        if payloads and not state.replica.contents.unpacked.add(frame, payloads):
            pending.encoded = replace(pending.encoded, payloads=())
        state.keep(frame)
        effects = state.machine.hold(frame.hash, frame.header, now)
        effects += state.machine.offer(pending.offer(head, frame.hash, len(frame.body)), now)
        state.tasks.spawn(self.frames.pushes.push, frame, head.members)
        if pending.kind == FrameKind.CONTRIBUTION:  # measured meanwhile, as the outer step may need it
            state.tasks.spawn(state.offload, state.replica.contents.measure, frame)
        return effects


class Membership:
    """This peer's place among the members: asked for, given up with a farewell, taken back."""

    def __init__(self, state: LocalState, swarm: SwarmAccess, steps: Steps, frames: FrameIO) -> None:
        self.state, self.directory, self.steps, self.frames = state, swarm.directory, steps, frames
        self.stopping = False
        self.is_ready: Callable[[], bool] = lambda: (
            True
        )  # to contribute: the others would wait for a member that is not
        self._asked, self._requests = -math.inf, Repeats(JOIN_EVERY, JOIN_LONGEST)

    def ask_if_outside(self, now: float) -> None:
        """Ask those who are here to let this peer in, unless it is a member or does not want to be one."""
        head = self.state.head
        is_outside = not self.state.is_member and not self.stopping and head.anchor is not None
        if is_outside and self.is_ready() and now - self._asked >= JOIN_EVERY:
            self._asked = now
            self.directory.greet(head.members)
            request = self._request(head)
            asked = self.state.terms.voting.let_in_by(head, self.directory.live())
            for peer in self._requests.due(request, asked, now):
                self.state.tasks.spawn(self.frames.send, peer, request)

    async def say_goodbye(self) -> None:
        """Tell everybody that this peer leaves, so that nobody waits for it; ``come_back`` takes it back."""
        state = self.state
        self.stopping, state.left_out = True, None
        with anyio.move_on_after(SEND_TIMEOUT / 2):
            async with self.steps.lock:  # what a step decides on is durable, and said, before this is
                farewell, members = state.machine.leave(), state.head.members
            async with anyio.create_task_group() as group:
                for peer in members:
                    if peer != state.me:
                        group.start_soon(self.frames.send, peer, farewell)

    def come_back(self) -> None:
        """Vote again, and ask to be let in where this peer was left out meanwhile."""
        state = self.state
        self.stopping = False
        state.machine.stay()
        for peer in state.head.members:
            if peer != state.me:
                state.tasks.spawn(self.frames.send, peer, self._request(state.head))

    def _request(self, head: Head) -> JoinRequest:
        signature = self.state.signer.sign(join_text(head.run, head.round, head.hash))
        return JoinRequest(head.round, head.hash, signature)


class Driver:
    """The loop of one peer's rounds: gives the machine time and contributions, and carries out what it asks for.

    ``run`` it in a task; ``contribute`` from the training side.
    """

    def __init__(self, parts: OwnParts, swarm: SwarmAccess, listeners: Listeners) -> None:
        self.state, self.swarm = LocalState(parts, listeners), swarm
        self.steps = Steps(self._carry_out)
        self.watch = PeerWatch(self.state, swarm)
        self.frames = FrameIO(self.state, swarm, self.steps, self.watch, parts.readings)
        self.membership = Membership(self.state, swarm, self.steps, self.frames)
        self.reducer, self.offering = Reducer(self.state, self.frames), Offering(self.state, self.frames)
        self.commits = Commits(self.state, self.frames)
        self.adoption = Adoption(self.state, self.steps, self.frames, self.commits.bookkeeping)
        self.allowed = 0.0  # s that what was offered for the round may be under way
        self.pressed: tuple[Digest, float] | None = None  # head after which the others wait for this peer, seconds left
        self.full_times: tuple[float, ...] = ()  # s that others take for a full contribution
        self.untrained: Digest | None = None  # head after which a turn has to pass without those who train its fragment
        self._judged = -math.inf  # when both were made last
        self._away = parts.away

    @property
    def machine(self) -> RoundMachine:
        """Return the machine that decides; there is one from the moment at which the rounds run."""
        return self.state.machine

    @property
    def head(self) -> Head:
        """Return the head of this peer's chain."""
        return self.state.head

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled."""
        self.state.begin(anyio.current_time(), self.frames.limit)
        if self.state.resumed:
            self._awake_after(self._away)
        try:
            async with anyio.create_task_group() as group:
                self.state.tasks.begin(group)
                task_status.started()
                await self._tick_forever()
        finally:
            self.state.tasks.end()

    async def _tick_forever(self) -> None:
        looked = -math.inf
        while True:
            now = anyio.current_time()
            self.steps.check()
            await self.steps.take(self.state.machine.tick)
            if now - looked >= min(LOOK_EVERY, self.watch.lease / 20):
                looked = now
                await self._look_around(now)
            self.membership.ask_if_outside(now)
            left = self.state.machine.time_left(now)
            self.pressed = None if left is None else (self.state.head.hash, left)
            await anyio.sleep(TICK)

    async def _look_around(self, now: float) -> None:
        """Look at all that goes by leases, which change in seconds: at every tick, this was 29 % of a simulation."""
        state = self.state
        if slept := self.watch.slept(now):
            self._awake_after(slept)
        self.watch.look_who_answers(now)
        seen, directory = self.watch.absent(now), self.swarm.directory
        known, parts = frozenset(directory.live()), directory.parts()
        await self.steps.take(
            lambda now: state.machine.liveness(
                seen.expired, seen.gone, now, missed=seen.missed, known=known, parts=parts
            )
        )
        self.untrained = state.head.hash if state.machine.state.is_untrained(now) else None
        if now - self._judged >= JUDGE_EVERY:
            self._judged = now
            self.allowed = state.machine.state.allowed()
            self.full_times = state.machine.full_times()
        self.watch.look_for_other_chains(now)
        self.watch.look_who_remembers(now)

    def _awake_after(self, away: float) -> None:
        """Listen before voting again: this peer was away for so many seconds, asleep or down."""
        excused = away > self.swarm.shrink_after
        self.machine.listen_first(anyio.current_time(), excused=excused, away=away)
        self.state.on_event(
            "awake", {"away": round(away, 1), "round": self.head.round, "outer_step": self.head.outer_step}
        )

    # ---- taking part ----

    async def contribute(self, contribution: Contribution) -> bool:
        """Offer a pseudo-gradient for the next round; False when it does not fit the chain as it stands now.

        Nothing of this peer's state changes before a commit names it. Raises NonFiniteError.
        """
        state, head = self.state, self.state.head
        if not self.offering.takes(contribution, head):
            return False
        await self.offering.prepare(contribution, head)
        async with self.steps.lock:
            if not self.offering.takes(contribution, state.head) or state.head.anchor != head.anchor:
                return False
            state.pending = contribution
            self.offering.tell_unsaid(contribution)
            await self._offer()
        return True

    async def _offer(self) -> None:
        """Offer the pending contribution for the open round. The lock is held."""
        await self._carry_out(await self.offering.offer())
        self.allowed = self.state.machine.state.allowed()

    # ---- what the machine asks for ----

    async def _carry_out(self, effects: list[Effect]) -> None:
        state = self.state
        for effect in effects:
            match effect:
                case Send():
                    state.tasks.spawn(self.frames.send, effect.to, effect.message)
                case Persist():
                    await self._persist(effect.acceptor)
                case Fetch():
                    if effect.record is not None and effect.record.contributors:
                        self.frames.inbox.expect(effect.record)
                    state.tasks.spawn(self.frames.fetcher.fetch, effect)
                case SendSlices():
                    self.frames.inbox.expect(effect.plan)
                    state.tasks.spawn(self.reducer.reduce, effect.plan, state.head)
                case Decide():
                    await self._decide(effect.commit, effect.known_since)
                case CatchUpWith():
                    if effect.peer in state.head.members or effect.peer in self.swarm.directory.live():
                        state.catch_up.ask(effect.peer)  # of nobody else: what a stranger says of rounds is no news
                case Mistake():
                    tell_unexpected(state.on_event, effect.what, effect.error)

    async def _persist(self, acceptor: Acceptor) -> None:
        """Write the vote, and before it the frames it vouches for: a later leader may find them here only."""
        state, record = self.state, acceptor.accepted
        if record is not None and all(ref.frame in state.store for ref in record.frames):
            frames = {ref.frame: state.find_stored(ref.frame) for ref in record.frames}
            if moves_anchor(record):
                self.commits.ahead.begin(record, frames)  # while the disk writes
            await state.offload(state.ledger.keep, record, [frames[ref.frame].data for ref in record.frames])
        await state.offload(state.ledger.save_acceptor, acceptor.to_bytes())

    async def _decide(self, commit: Commit, known_since: float) -> None:
        """Apply a commit; then go on from it, and offer again what it passed by without moving the anchor."""
        state, record = self.state, commit.record
        anchor = await self.commits.apply(commit, known_since)
        await self._carry_out(state.machine.note_applied(anchor, anyio.current_time()))
        if record.final:
            self._tell_the_end(record)
        if state.pending is not None and self.offering.takes_again(record):
            await self._offer()

    def _tell_the_end(self, record: Record) -> None:
        """Say that this peer has the last record: nothing follows that would show it to peers that stay, and
        followers.
        """
        for peer in dict.fromkeys((*record.next_members, *self.swarm.directory.live())):
            if peer != self.state.me:
                self.state.tasks.spawn(self.frames.send, peer, Behind(record.round))
