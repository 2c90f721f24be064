"""Gossip steps: two peers swap frames, and both apply the pair's mean, or neither, unless one dies meanwhile.

Two-phase: each pushes its frame, the method's channels; the peer with the smaller id, once it knows that
its frame is there, asks the other to commit, and the answer is remembered, so that a lost answer is asked for again and
says the same. A peer whose partner does not come takes its step alone. The mean of the two slow weights is conserved
up to float rounding, and what compression loses of the changes is owed: booked with the step, never before it
(`decentral.replica.pair_step`).
Sent per step: one body to one peer, whatever the size of the swarm.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import anyio
from torch import Tensor

from decentral.consensus.allowance import allowance
from decentral.consensus.chain import NOTHING, Head
from decentral.dissemination import gather
from decentral.dissemination.pairing import partner_of
from decentral.errors import PayloadError, TransportError
from decentral.replica.pair_step import GossipStep, half_of, step_alone, step_together
from decentral.rounds.driver import Driver
from decentral.rounds.partners import AHEAD, Partners
from decentral.rounds.punctuality import HELD_UP
from decentral.transport import Stream
from decentral.transport.requests import handled, request, send, serve_requests
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import PeerId, peer_name

# Shape suffix: N = elements of one fragment, flat float32.

PAIR = "/decentral/pair/1"
UNDECIDED = 8.0  # s a commit is asked about, whatever is cancelled meanwhile: leaving takes less than 10 s
LOOK_EVERY = 0.5  # s between looks whether an awaited partner is still there
ASK_AGAIN = 2.0  # s until a follower that has not answered is asked beside that: one stream that hangs is no dead link
REMEMBERED = 256  # gossip steps whose outcome is kept for a partner that asks again
_COMMIT = struct.Struct("<Q32s32s")  # step, my frame, your frame
COMMIT_NBYTES = _COMMIT.size  # of the request that one of the two makes; the answer is one byte
YES, NO, WAIT = b"\x01", b"\x00", b"\x02"


@dataclass(frozen=True, slots=True)
class Swapped:
    """The outcome of one gossip step on one fragment."""

    step: int
    before_N: Tensor
    after_N: Tensor
    partner: PeerId | None  # None: taken alone
    disagreement: float | None  # rms of (ours - theirs) over rms of ours
    buffers_B: Tensor | None = None  # what the live buffers become; None: they stay
    unmoved: bool = False  # the step could not be used: what was learnt for it is given up
    meets: bool = True  # whether pairs meet in this step; False: everybody takes it alone
    matched: bool = True  # whether this peer was to meet one; False: nobody meets, or their number is odd


@dataclass(slots=True)
class _Swap:
    """The step this peer is in."""

    step: int
    frame: Frame
    partner: PeerId
    theirs: Frame | None = None  # the partner's, once both have committed


@dataclass(slots=True)
class _Question:
    """Whether the follower commits."""

    to: PeerId
    body: bytes
    answer: bytes = WAIT
    unheard: int = 0  # times that it was asked and did not answer


class Gossip:
    """This peer's gossip steps; membership comes from the driver's chain."""

    def __init__(self, driver: Driver, partners: Partners) -> None:
        """``partners``: those that the driver tells of the frames that come."""
        self.driver, self.state, self.transport = driver, driver.state, driver.swarm.transport
        self.partners, self.punctuality = partners, partners.punctuality
        self._current: _Swap | None = None
        self._outcomes: dict[int, tuple[bytes, bytes]] = {}  # step -> (partner's frame, YES or NO)
        self._settled = partners.step  # no step below it may be taken again: by a pair, or by a previous incarnation
        serve_requests(self.transport, PAIR, self._on_commit, limit=_COMMIT.size)

    @property
    def step(self) -> int:
        """Gossip steps that this peer has made, or follows others as if it had."""
        return self.partners.step

    def follow(self, step: int) -> None:
        """Go on from the replica of a peer that is at ``step``."""
        self.partners.step = step

    @property
    def is_swapping(self) -> bool:
        """Whether a pair is being made now: its other half may have stepped already."""
        return self._current is not None

    async def exchange(
        self,
        fragment: int,
        change_N: Tensor,
        steps: int,
        tokens: int,
        tail: bytes = b"",
        states: tuple[Tensor, ...] = (),
    ) -> Swapped:
        """One gossip step: swap with this step's partner if it comes in time, else step alone.

        ``change_N`` and ``states``: the method's channels that are due. ``tail``: this peer's buffers, where fragment
        0 carries them.
        """
        state, head, step = self.state, self.state.head, self.step
        half = theirs = swap = None
        meets = self._meets(step)
        partner = partner_of(head.run, step, head.members, state.me) if meets and state.is_member else None
        if partner is not None:  # a send that failed in an earlier step: no message of rounds undoes it
            state.machine.state.presence.heard(partner)
        if partner is not None and state.machine.state.presence.present(partner):
            half = await state.offload(half_of, state.replica, fragment, change_N, states)
            if half.feedback:
                await state.offload(state.ledger.swap_begins)
            frame = seal(self._header(head, fragment, steps, tokens, len(states)), half.body, state.signer, tail)
            swap = _Swap(step, frame, partner)
            theirs = await self._swap(swap)
        if tail:
            self._merge_buffers(tail, None if swap is None else swap.theirs)
        if half is None or theirs is None:
            alone = step_alone(state.replica, fragment, step, change_N, states)
            return self._book(fragment, None, alone, matched=partner is not None)
        self._settled = step + 1
        together = step_together(state.replica, fragment, step, half, theirs)
        self.driver.looking.at_pair(step, fragment, half, theirs, together)
        return self._book(fragment, partner, together)

    # ---- the swap ----

    async def _swap(self, swap: _Swap) -> Tensor | None:
        """The partner's decoded frame once both have committed, else None."""
        self._current = swap
        began = anyio.current_time()
        patience = self.punctuality.patience()
        self.punctuality.began(swap.step, swap.partner, began)
        try:
            sent = await self._push(swap)
            with anyio.move_on_after(patience + self._allowed(swap.partner, swap)):
                return await (self._lead(swap, sent) if self.state.me < swap.partner else self._follow(swap, sent))
            return await self._too_late(swap)
        finally:
            self._current = None
            self._forget(swap.step)

    async def _push(self, swap: _Swap) -> Stream | None:
        """The stream on which the partner says when it has our frame; None when it cannot be sent."""
        longest = self.punctuality.ceiling + self._allowed(self.state.me, swap)
        with anyio.move_on_after(longest):  # the training thread waits for it
            try:
                return await send(self.transport, swap.partner, gather.PUSH, swap.frame.data, gather.ANSWER)
            except TransportError:
                await self.driver.frames.unreachable(swap.partner)
        return None

    def _allowed(self, peer: PeerId, swap: _Swap) -> float:
        """Seconds that a frame as large as ours may be on its way from ``peer``."""
        nbytes, pair = len(swap.frame.body), (self.state.me, swap.partner)
        return allowance(nbytes, 1, self.state.terms.takes(nbytes, peer, pair))

    async def _lead(self, swap: _Swap, sent: Stream | None) -> Tensor | None:
        """Asks when the partner has our frame, and not when it was sent.

        Buffers on the way hold a megabyte of it. A commit behind that came when it had been asked about in vain: on an
        uplink of 1 Mbit/s a leader took every step alone that its follower took with it.
        """
        arrived = sent is not None and await handled(sent, gather.PUSH)
        while (found := self.partners.frame(swap.partner, swap.step)) is None or not arrived:
            if not await self._changes(swap):
                return None
        frame, decoded = found
        swap.theirs = frame if await self._ask(swap, frame) else None
        return decoded if swap.theirs is not None else None

    async def _changes(self, swap: _Swap) -> bool:
        """Wait until something came from a partner; False once it is known to be away."""
        with anyio.move_on_after(LOOK_EVERY):
            await self.partners.changed()
        passed = self.partners.seen(swap.partner) > swap.step
        return self.state.machine.state.presence.present(swap.partner) and not passed

    async def _follow(self, swap: _Swap, sent: Stream | None = None) -> Tensor | None:
        arrived = sent is not None and await handled(sent, gather.PUSH)
        met_at: float | None = None  # when both had both frames, and the leader could ask
        while swap.step not in self._outcomes:
            if arrived and met_at is None and self.partners.frame(swap.partner, swap.step) is not None:
                met_at = anyio.current_time()
            is_over = met_at is not None and anyio.current_time() - met_at > HELD_UP
            if is_over or not await self._changes(swap):
                self._outcomes.setdefault(swap.step, (NOTHING, NO))
        frame_hash, answer = self._outcomes[swap.step]
        held = self.partners.frame(swap.partner, swap.step)
        if answer != YES or held is None or held[0].hash != frame_hash:
            return None
        swap.theirs = held[0]
        return held[1]

    async def _too_late(self, swap: _Swap) -> Tensor | None:
        """The follower closes the step, so that a late commit is answered NO; the leader's answer decides for it."""
        if self.state.me > swap.partner:
            if swap.step not in self._outcomes:
                self._outcomes[swap.step] = (NOTHING, NO)
            return await self._follow(swap)
        return None

    async def _ask(self, swap: _Swap, theirs: Frame) -> bool:
        """Ask the follower to commit until it answers: only it knows whether it did, however silent it seems."""
        question = _Question(swap.partner, _COMMIT.pack(swap.step, swap.frame.hash, theirs.hash))
        began = anyio.current_time()
        with anyio.move_on_after(UNDECIDED, shield=True):  # once asked, a deadline must not leave the pair half applied
            async with anyio.create_task_group() as group:
                while True:
                    group.start_soon(self._answer, question, group.cancel_scope)
                    await anyio.sleep(ASK_AGAIN)
        if question.unheard and question.answer == WAIT:
            seconds = round(anyio.current_time() - began, 1)
            self.state.on_event("undecided", {"round": swap.step, "peer": peer_name(swap.partner), "seconds": seconds})
        return question.answer == YES

    async def _answer(self, question: _Question, until: anyio.CancelScope) -> None:
        """Ask once more; what the follower says ends ``until``."""
        question.unheard += 1
        try:
            answer = await request(self.transport, question.to, PAIR, question.body, limit=1, timeout=UNDECIDED)
        except TransportError:
            return  # it may have heard that
        except PayloadError:
            answer = NO
        question.unheard -= 1
        if answer != WAIT:
            question.answer = answer
            until.cancel()

    def _fall_in(self) -> None:
        """Go to the step that most of the members heard of are at.

        A peer that is behind would wait at every step for a partner that has passed it, and fall back further. One
        that took steps alone while it was cut off is ahead, and would wait at every step for one that does not come: it
        goes back as far as those steps reach.
        """
        members = self.state.head.members
        ahead, back = max(0, self.partners.front(members) - self.step), self.partners.lead(members)
        back = min(back, self.step - self._settled) if back > AHEAD else 0
        self.partners.move(ahead - back)
        if back:
            self._outcomes = {step: outcome for step, outcome in self._outcomes.items() if step < self.step}

    async def _on_commit(self, peer: PeerId, data: bytes) -> bytes:
        if len(data) != _COMMIT.size:
            raise PayloadError(f"pair commit of {len(data)} bytes, want {_COMMIT.size}; drop it")
        step, theirs, ours = _COMMIT.unpack(data)
        if step in self._outcomes:
            frame, answer = self._outcomes[step]
            return answer if frame == theirs else NO
        current = self._current
        if step > self.step or (current is None and step == self.step):
            return WAIT  # not there yet
        if current is None or current.step != step or current.partner != peer or current.frame.hash != ours:
            return NO
        held = self.partners.frame(peer, step)
        made = held is not None and held[0].hash == theirs  # it was here; one too far ahead is not kept
        self._outcomes[step] = (theirs, YES) if made else (NOTHING, NO)
        self.partners.wake()
        return YES if made else NO

    # ---- the step ----

    def _meets(self, step: int) -> bool:
        """Whether the method lets pairs meet in a step of the run."""
        return self.state.replica.method.meets(step // self.partners.num_fragments)

    def _book(self, fragment: int, partner: PeerId | None, taken: GossipStep, *, matched: bool = True) -> Swapped:
        replica, step = self.state.replica, self.step
        if taken.unmoved:
            self.state.on_event("unmoved", {"round": step, "method": replica.method.name, "why": taken.unmoved})
        replica.anchors[fragment], replica.states[fragment] = taken.after_N, taken.state
        replica.feedback[fragment] = taken.feedback
        replica.refresh(fragment)
        self.partners.step += 1
        self._fall_in()  # here, not when the next step begins: the caller reads from ``step`` which fragment that is of
        buffers_B = replica.shared_buffers(fragment)
        moved = (taken.before_N, taken.after_N, partner, taken.disagreement, buffers_B)
        return Swapped(step, *moved, unmoved=bool(taken.unmoved), meets=self._meets(step), matched=matched)

    def _merge_buffers(self, tail: bytes, theirs: Frame | None) -> None:
        """What both told becomes the same on both sides; a peer that steps alone has its own."""
        replica = self.state.replica
        told = {self.state.me: replica.tail.unpack(tail)}
        if theirs is not None and (theirs_B := replica.tail.split(theirs)[1]) is not None:
            told[theirs.header.sender] = theirs_B
        replica.buffers_B = replica.tail.merged([told[peer] for peer in sorted(told)])

    def _header(self, head: Head, fragment: int, steps: int, tokens: int, states: int) -> Header:
        return Header(
            kind=FrameKind.SWAP, run=head.run, epoch=head.epoch, round=self.step, fragment=fragment, part=0, parts=1,
            plan=0, base=NOTHING, sender=self.state.me, steps=steps, tokens=tokens, states=states,
        )  # fmt: skip

    def _forget(self, step: int) -> None:
        self.partners.forget(step)
        self._outcomes = {s: outcome for s, outcome in self._outcomes.items() if s > step - REMEMBERED}
