"""Gossip steps: two peers swap frames, the method's channels, and both apply the pair's mean, or neither.

A peer whose partner does not come takes its step alone. The mean of the two slow weights is conserved up to float
rounding, and what compression loses of the changes is owed: booked with the step, never before it
(`decentral.replica.pair_step`).

Sent per step: one body to one peer, whatever the size of the swarm. Four trips follow the last byte that leaves: its
own, the partner's word that it has the frame, the question, the answer. What both make of it is made meanwhile.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
from torch import Tensor

from decentral.consensus.chain import NOTHING, Head
from decentral.consensus.timing import allowance
from decentral.dissemination import broadcast
from decentral.errors import PayloadError, StreamClosed, TransportError
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep, decode_half, encode, install, stay, step_alone, step_together
from decentral.rounds.driver import Driver
from decentral.rounds.partners import AHEAD, HELD_UP, LANE, LANE_NBYTES, LANES, WIDE, Lanes, Partners, cut, partner_of
from decentral.transport.requests import (
    ignore_count,
    request,
    send,
    sequence,
    serve_requests,
    serve_sequences,
    wait_until_handled,
)
from decentral.wire.frames import Frame, FrameKind, Header, seal
from decentral.wire.keys import PeerId, peer_name

# Shape suffix: N = elements of one fragment, flat float32.

# ---- steps of one peer ----


class Gossip:
    """The gossip steps of one peer; membership comes from the driver's chain."""

    def __init__(self, driver: Driver, partners: Partners) -> None:
        """``partners``: those that the driver tells of the frames that come."""
        self.driver, self.state, self.partners = driver, driver.state, partners
        self.swapping = Swapping(driver, partners)
        self.is_swapping = False  # whether a step is under way: its other half may have stepped already
        self._settled = partners.step  # no step below it may be taken again: by a pair, or by a previous incarnation

    @property
    def step(self) -> int:
        """Return the gossip steps that this peer has made, or follows others as if it had."""
        return self.partners.step

    def follow(self, step: int) -> None:
        """Go on from the replica of a peer that is at ``step``."""
        self.partners.step = step

    async def exchange(self, mine: Contribution) -> GossipStep:
        """Make one gossip step: swap with this step's partner if it comes in time, else step alone.

        ``mine``: this peer's channels that are due, and its buffers where fragment 0 carries them.
        """
        self.is_swapping = True
        try:
            return await self._exchange(mine)
        finally:
            self.is_swapping = False

    async def _exchange(self, mine: Contribution) -> GossipStep:
        state, head, step = self.state, self.state.head, self.step
        theirs = swap = None
        partner = self._partner(head)
        if partner is not None and state.machine.state.presence.present(partner):
            await state.offload(encode, state.replica, mine)
            assert mine.encoded is not None
            if mine.encoded.feedback:
                await state.offload(state.ledger.swap_begins)
            sealed = await state.offload(seal, self._header(head, mine), mine.encoded.body, state.signer, mine.tail)
            decode, make = partial(decode_half, state.replica, mine), partial(step_together, state.replica, step, mine)
            swap = Swap(step, sealed, partner, decode, make)
            theirs = await self.swapping.swap(swap)
        if mine.tail:
            self._merge_buffers(mine.tail, None if swap is None else swap.theirs)
        if swap is None or theirs is None:
            alone = await self._take_step(partial(step_alone, state.replica, step, mine))
            return self._book(replace(alone, matched=partner is not None))
        self._settled = step + 1
        together = swap.made or await self._take_step(partial(swap.make, swap.mine_CN, theirs))
        for observer in state.observers:
            observer.see_pair(mine, swap.mine_CN, theirs, together)
        return self._book(replace(together, partner=partner))

    def _partner(self, head: Head) -> PeerId | None:
        """Return the peer to meet; None: nobody meets in this step, or one is left over and it is this one."""
        meets = self.state.replica.method.meets(self.step // self.partners.num_fragments)
        if not self.state.is_member or not meets:
            return None
        partner = partner_of(head.run, self.step, head.members, self.state.me)
        if partner is not None:  # a send that failed in an earlier step: no message of rounds undoes it
            self.state.machine.state.presence.heard(partner)
        return partner

    async def _take_step(self, work: Callable[[], GossipStep]) -> GossipStep:
        """Make the step that both agreed on, which the partner takes: nothing that cancels may come between."""
        with anyio.CancelScope(shield=True):
            taken = await self.state.offload(work)
        return taken

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
            self.swapping.forget_from(self.step)

    def _book(self, taken: GossipStep) -> GossipStep:
        replica, fragment = self.state.replica, taken.fragment
        if replica.anchors[fragment] is not taken.before_N:
            why = "the replica was merged with all others meanwhile"
            stayed = stay(replica, fragment, taken.step, why)
            taken = replace(stayed, partner=taken.partner, matched=taken.matched)
        if taken.unmoved:
            at = {"round": taken.step, "outer_step": taken.step + 1}
            self.state.on_event("unmoved", {**at, "method": replica.method.name, "why": taken.unmoved})
        install(replica, taken)
        self.partners.step += 1
        self._fall_in()  # here, not when the next step begins: the caller reads from ``step`` which fragment that is of
        return replace(taken, buffers_B=replica.shared_buffers(fragment))

    def _merge_buffers(self, tail: bytes, theirs: Frame | None) -> None:
        """Merge the buffers of both, to the same on both sides; a peer that steps alone has its own."""
        replica = self.state.replica
        told = {self.state.me: replica.tail.unpack(tail)}
        if theirs is not None and (theirs_B := replica.tail.split(theirs)[1]) is not None:
            told[theirs.header.sender] = theirs_B
        replica.buffers_B = replica.tail.merge([told[peer] for peer in sorted(told)])

    def _header(self, head: Head, mine: Contribution) -> Header:
        return Header(
            kind=FrameKind.SWAP, run=head.run, epoch=head.epoch, round=self.step, fragment=mine.fragment, part=0,
            parts=1, plan=0, base=NOTHING, sender=self.state.me, steps=mine.steps, tokens=mine.tokens,
            states=len(mine.states),
        )  # fmt: skip


# ---- one swap of two peers ----
#
# Each pushes its frame, and both have both at the end, or neither, unless one dies meanwhile.
#
# Two-phase: the peer with the smaller id, the leader, once it knows that its frame is there, asks the other, the
# follower, to commit; the answer is remembered, so that a lost answer is asked for again and says the same.

PAIR = "/decentral/pair/1"
UNDECIDED = 8.0  # s a commit is asked about, whatever is cancelled meanwhile: leaving takes less than 10 s
LOOK_EVERY = 0.5  # s between looks whether an awaited partner is still there
ASK_AGAIN = 2.0  # s until a follower that has not answered is asked beside that: one stream that hangs is no dead link
REMEMBERED = 256  # gossip steps whose outcome is kept for a partner that asks again
_COMMIT = struct.Struct("<Q32s32s")  # step, my frame, your frame
COMMIT_NBYTES = _COMMIT.size  # of the request that one of the two makes; the answer is one byte
YES, NO, WAIT = b"\x01", b"\x00", b"\x02"


@dataclass(slots=True)
class Swap:
    """The swap that this peer is in."""

    step: int
    frame: Frame
    partner: PeerId
    decode: Callable[[], Tensor]  # our frame, as the partner does
    make: Callable[[Tensor, Tensor], GossipStep]  # of what the two frames decode to; pure
    mine_CN: Tensor = field(init=False)  # by it, while the frame is on its way
    made: GossipStep | None = None  # while the two agree on the step: nothing of it counts until they have
    theirs: Frame | None = None  # the partner's, once both have committed
    sending: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    written: anyio.Event = field(default_factory=anyio.Event)  # all of the frame has left, or nothing more will
    sent: anyio.Event = field(default_factory=anyio.Event)  # the partner said that it has it, or never will
    arrived: bool = False  # it said so
    answer: bytes = WAIT  # of the follower, asked whether it commits
    unheard: int = 0  # times that it was asked and did not answer


class Swapping:
    """The swaps of one peer."""

    def __init__(self, driver: Driver, partners: Partners) -> None:
        """``partners``: those that the driver tells of the frames that come."""
        self.driver, self.state, self.transport = driver, driver.state, driver.swarm.transport
        self.partners, self.punctuality = partners, partners.punctuality
        self._current: Swap | None = None
        self._outcomes: dict[int, tuple[bytes, bytes]] = {}  # step -> (partner's frame, YES or NO)
        self._lanes = Lanes(self._max_nbytes)
        serve_requests(self.transport, PAIR, self._on_commit, limit=_COMMIT.size)
        serve_sequences(
            self.transport, LANE, self._on_piece, limit=LANE_NBYTES, watch=lambda peer: nullcontext(ignore_count)
        )

    def forget_from(self, step: int) -> None:
        """Forget the outcomes of steps from ``step`` on, which are taken anew."""
        self._outcomes = {past: outcome for past, outcome in self._outcomes.items() if past < step}

    async def swap(self, swap: Swap) -> Tensor | None:
        """Return the partner's decoded frame once both have committed, else None."""
        self._current = swap
        began = anyio.current_time()
        patience = self.punctuality.patience()
        self.punctuality.began(swap.step, swap.partner, began)
        try:
            if not self.state.tasks.spawn(self._send, swap):
                return None
            await self.state.offload(self._look_at_ours, swap)
            with anyio.move_on_after(self.punctuality.ceiling + self._seconds_allowed(self.state.me, swap)) as longest:
                await swap.written.wait()  # the training thread waits for it
            if longest.cancelled_caught:
                swap.sending.cancel()
            with anyio.move_on_after(patience + self._seconds_allowed(swap.partner, swap)):
                await swap.sent.wait()
                return await (self._lead(swap) if self.state.me < swap.partner else self._follow(swap))
            return await self._too_late(swap)
        finally:
            swap.sending.cancel()
            self._current = None
            self._forget(swap.step)

    def _look_at_ours(self, swap: Swap) -> None:
        """Do what needs our frame alone while it is on its way."""
        _ = swap.frame.hash  # kept in it: the question names it
        swap.mine_CN = swap.decode()

    async def _send(self, swap: Swap) -> None:
        """Send our frame, and wait until the partner says that it has it."""
        try:
            with swap.sending:
                await (self._send_whole(swap) if swap.frame.nbytes < WIDE else self._send_by_lanes(swap))
        except TransportError:
            if not swap.written.is_set():
                await self.driver.frames.unreachable(swap.partner)
        finally:
            swap.written.set()
            swap.sent.set()

    async def _send_whole(self, swap: Swap) -> None:
        stream = await send(self.transport, swap.partner, broadcast.PUSH, swap.frame.data, broadcast.ANSWER)
        swap.written.set()
        swap.arrived = await wait_until_handled(stream, broadcast.PUSH)

    async def _send_by_lanes(self, swap: Swap) -> None:
        pieces = cut(swap.frame)  # of all lanes: whichever is free takes the next
        window = self.driver.frames.broadcast.window

        async def send_some() -> None:
            async with sequence(self.transport, swap.partner, LANE, broadcast.ANSWER, window) as send_piece:
                for piece in pieces:
                    await send_piece(piece)
                swap.written.set()

        failed: Exception | None = None
        try:
            async with anyio.create_task_group() as group:
                for _ in range(LANES):
                    group.start_soon(send_some)
        except* (TransportError, PayloadError) as errors:
            failed = errors.exceptions[0]
        if failed is not None:
            raise StreamClosed(f"{peer_name(swap.partner)}: a frame of a pair did not get there: {failed}") from failed
        swap.arrived = True

    async def _on_piece(self, peer: PeerId, data: bytes) -> None:
        if not self.state.running:
            return
        self.driver.frames.watch.heard(peer, anyio.current_time())
        whole = self._lanes.add(data, peer)
        if whole is not None:
            await self.driver.frames.take(whole)

    def _max_nbytes(self, header: Header) -> int:
        """Return the bytes that the body of a swap may have. PayloadError before any of it is kept, for one of a peer
        that is no member, or of no step.
        """
        self.partners.check(header, self.state.head)
        return self.driver.frames.max_nbytes(header, self.state.head)

    def _seconds_allowed(self, peer: PeerId, swap: Swap) -> float:
        """Return the seconds that a frame as large as ours may be on its way from ``peer``."""
        nbytes, pair = len(swap.frame.body), (self.state.me, swap.partner)
        return allowance(nbytes, 1, self.state.terms.takes(nbytes, peer, pair))

    async def _lead(self, swap: Swap) -> Tensor | None:
        """Ask the follower to commit when it has our frame, and not when that was sent.

        Buffers on the way hold a megabyte of it. A commit behind that came when it had been asked about in vain: on an
        uplink of 1 Mbit/s a leader took every step alone that its follower took with it.
        """
        while (found := self.partners.frame(swap.partner, swap.step)) is None or not swap.arrived:
            if not await self._changes(swap):
                return None
        frame, decoded = found
        swap.theirs = frame if await self._ask(swap, frame, decoded) else None
        return decoded if swap.theirs is not None else None

    async def _changes(self, swap: Swap) -> bool:
        """Wait until something came from a partner; False once it is known to be away."""
        with anyio.move_on_after(LOOK_EVERY):
            await self.partners.changed()
        passed = self.partners.seen(swap.partner) > swap.step
        return self.state.machine.state.presence.present(swap.partner) and not passed

    async def _follow(self, swap: Swap) -> Tensor | None:
        met_at: float | None = None  # when both had both frames, and the leader could ask
        while swap.step not in self._outcomes:
            if swap.arrived and met_at is None and (found := self.partners.frame(swap.partner, swap.step)) is not None:
                met_at = anyio.current_time()
                await self._make(swap, found[1])
                continue  # it may have been asked meanwhile
            is_over = met_at is not None and anyio.current_time() - met_at > HELD_UP
            if is_over or not await self._changes(swap):
                self._outcomes.setdefault(swap.step, (NOTHING, NO))
        frame_hash, answer = self._outcomes[swap.step]
        held = self.partners.frame(swap.partner, swap.step)
        if answer != YES or held is None or held[0].hash != frame_hash:
            return None
        swap.theirs = held[0]
        return held[1]

    async def _too_late(self, swap: Swap) -> Tensor | None:
        """Close the step as its follower, so that a late commit is answered NO; a leader goes by the answer it got."""
        if self.state.me > swap.partner:
            if swap.step not in self._outcomes:
                self._outcomes[swap.step] = (NOTHING, NO)
            return await self._follow(swap)
        return None

    async def _make(self, swap: Swap, theirs_CN: Tensor) -> None:
        """Make the step of both, shielded: who has answered yes meanwhile takes it, whatever is cancelled."""
        with anyio.CancelScope(shield=True):
            if swap.made is None:
                swap.made = await self.state.offload(swap.make, swap.mine_CN, theirs_CN)

    async def _ask(self, swap: Swap, theirs: Frame, theirs_CN: Tensor) -> bool:
        """Ask the follower to commit until it answers: only it knows whether it did, however silent it seems."""
        question = _COMMIT.pack(swap.step, swap.frame.hash, theirs.hash)
        began = anyio.current_time()
        with anyio.move_on_after(UNDECIDED, shield=True):  # once asked, a deadline must not leave the pair half applied
            async with anyio.create_task_group() as group:
                group.start_soon(self._make, swap, theirs_CN)
                while True:
                    group.start_soon(self._hear, swap, question, group.cancel_scope)
                    await anyio.sleep(ASK_AGAIN)
        if swap.unheard and swap.answer == WAIT:
            seconds = round(anyio.current_time() - began, 1)
            self.state.on_event("undecided", {"round": swap.step, "peer": peer_name(swap.partner), "seconds": seconds})
        return swap.answer == YES

    async def _hear(self, swap: Swap, question: bytes, until: anyio.CancelScope) -> None:
        """Ask once more; what the follower says ends ``until``."""
        swap.unheard += 1
        try:
            answer = await request(self.transport, swap.partner, PAIR, question, limit=1, timeout=UNDECIDED)
        except TransportError:
            return  # it may have heard that
        except PayloadError:
            answer = NO
        swap.unheard -= 1
        if answer != WAIT:
            swap.answer = answer
            until.cancel()

    async def _on_commit(self, peer: PeerId, data: bytes) -> bytes:
        if len(data) != _COMMIT.size:
            raise PayloadError(f"pair commit of {len(data)} bytes, want {_COMMIT.size}; drop it")
        step, theirs, ours = _COMMIT.unpack(data)
        if step in self._outcomes:
            frame, answer = self._outcomes[step]
            return answer if frame == theirs else NO
        current = self._current
        if step > self.partners.step or (current is None and step == self.partners.step):
            return WAIT  # not there yet
        if current is None or current.step != step or current.partner != peer or current.frame.hash != ours:
            return NO
        held = self.partners.frame(peer, step)
        made = held is not None and held[0].hash == theirs  # it was here; one too far ahead is not kept
        self._outcomes[step] = (theirs, YES) if made else (NOTHING, NO)
        self.partners.wake()
        return YES if made else NO

    def _forget(self, step: int) -> None:
        self.partners.forget(step)
        self._lanes.forget(step)
        self._outcomes = {s: outcome for s, outcome in self._outcomes.items() if s > step - REMEMBERED}
