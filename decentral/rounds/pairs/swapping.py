"""One swap of two peers: each pushes its frame, and both have both at the end, or neither, unless one dies meanwhile.

Two-phase: the peer with the smaller id, the leader, once it knows that its frame is there, asks the other, the
follower, to commit; the answer is remembered, so that a lost answer is asked for again and says the same.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import anyio
from torch import Tensor

from decentral.consensus.chain import NOTHING
from decentral.consensus.timing import allowance
from decentral.dissemination import broadcast
from decentral.errors import PayloadError, TransportError
from decentral.rounds.driver import Driver
from decentral.rounds.pairs.partners import Partners
from decentral.rounds.pairs.punctuality import HELD_UP
from decentral.transport import Stream
from decentral.transport.requests import handled, request, send, serve_requests
from decentral.wire.frames import Frame
from decentral.wire.keys import PeerId, peer_name

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


class Swapping:
    """This peer's swaps."""

    def __init__(self, driver: Driver, partners: Partners) -> None:
        """``partners``: those that the driver tells of the frames that come."""
        self.driver, self.state, self.transport = driver, driver.state, driver.swarm.transport
        self.partners, self.punctuality = partners, partners.punctuality
        self._current: Swap | None = None
        self._outcomes: dict[int, tuple[bytes, bytes]] = {}  # step -> (partner's frame, YES or NO)
        serve_requests(self.transport, PAIR, self._on_commit, limit=_COMMIT.size)

    def forget_from(self, step: int) -> None:
        """Steps from ``step`` on are taken anew."""
        self._outcomes = {past: outcome for past, outcome in self._outcomes.items() if past < step}

    async def swap(self, swap: Swap) -> Tensor | None:
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

    async def _push(self, swap: Swap) -> Stream | None:
        """The stream on which the partner says when it has our frame; None when it cannot be sent."""
        longest = self.punctuality.ceiling + self._allowed(self.state.me, swap)
        with anyio.move_on_after(longest):  # the training thread waits for it
            try:
                return await send(self.transport, swap.partner, broadcast.PUSH, swap.frame.data, broadcast.ANSWER)
            except TransportError:
                await self.driver.frames.unreachable(swap.partner)
        return None

    def _allowed(self, peer: PeerId, swap: Swap) -> float:
        """Seconds that a frame as large as ours may be on its way from ``peer``."""
        nbytes, pair = len(swap.frame.body), (self.state.me, swap.partner)
        return allowance(nbytes, 1, self.state.terms.takes(nbytes, peer, pair))

    async def _lead(self, swap: Swap, sent: Stream | None) -> Tensor | None:
        """Asks when the partner has our frame, and not when it was sent.

        Buffers on the way hold a megabyte of it. A commit behind that came when it had been asked about in vain: on an
        uplink of 1 Mbit/s a leader took every step alone that its follower took with it.
        """
        arrived = sent is not None and await handled(sent, broadcast.PUSH)
        while (found := self.partners.frame(swap.partner, swap.step)) is None or not arrived:
            if not await self._changes(swap):
                return None
        frame, decoded = found
        swap.theirs = frame if await self._ask(swap, frame) else None
        return decoded if swap.theirs is not None else None

    async def _changes(self, swap: Swap) -> bool:
        """Wait until something came from a partner; False once it is known to be away."""
        with anyio.move_on_after(LOOK_EVERY):
            await self.partners.changed()
        passed = self.partners.seen(swap.partner) > swap.step
        return self.state.machine.state.presence.present(swap.partner) and not passed

    async def _follow(self, swap: Swap, sent: Stream | None = None) -> Tensor | None:
        arrived = sent is not None and await handled(sent, broadcast.PUSH)
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

    async def _too_late(self, swap: Swap) -> Tensor | None:
        """The follower closes the step, so that a late commit is answered NO; the leader's answer decides for it."""
        if self.state.me > swap.partner:
            if swap.step not in self._outcomes:
                self._outcomes[swap.step] = (NOTHING, NO)
            return await self._follow(swap)
        return None

    async def _ask(self, swap: Swap, theirs: Frame) -> bool:
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
        self._outcomes = {s: outcome for s, outcome in self._outcomes.items() if s > step - REMEMBERED}
