"""Carries out what the round machine decides: sends, stores, applies. One per peer, on the swarm's event loop.

All machine calls happen under one lock, and their effects are carried out in order before the next call, so what
a peer says never runs ahead of what it has made durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
from torch import Tensor

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.exchange import gather
from decentral.exchange.offload import Offload, in_thread
from decentral.exchange.reduce import Reduction, owned_part
from decentral.exchange.store import FrameStore
from decentral.rounds.acceptor import Acceptor
from decentral.rounds.chain import Digest, Head, moves_anchor
from decentral.rounds.contribution import Contribution, header_after, range_of
from decentral.rounds.effects import CatchUp, Decide, Effect, Fetch, Persist, Send, SendSlices
from decentral.rounds.inbox import Inbox
from decentral.rounds.machine import TICK, RoundMachine, Terms
from decentral.rounds.replica import Replica
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.transport.requests import notify, serve_requests
from decentral.wire.frames import HEADER_NBYTES, Frame, Kind, seal
from decentral.wire.keys import PeerId, Signer, peer_name
from decentral.wire.messages import (
    Commit,
    Goodbye,
    JoinRequest,
    Message,
    Missing,
    Plan,
    Record,
    decode,
    encode,
)

CONTROL = "/decentral/control/1"
CONTROL_LIMIT = 1 << 20  # bytes; a record of 1,024 members with certificate is about 250 KB
SEND_TIMEOUT = 10.0  # s for a control message
JOIN_EVERY = 1.0  # s between requests to be let in
KEEP_ROUNDS = 64  # rounds of frames kept for those who missed them


@dataclass(frozen=True, slots=True)
class Advance:
    """One commit as the training side sees it."""

    record: Record | None  # None: adopted from a snapshot
    head: Digest  # hash of the chain's head after it
    fragment: int
    before_N: Tensor | None  # None: only the membership changed
    after_N: Tensor | None
    contribution: Contribution | None  # this peer's, when the record names it


@dataclass(slots=True)
class Ledger:
    """Where commits and acceptor state become durable. In tests it may keep them in memory."""

    append: Callable[[Commit, Sequence[bytes]], None]
    save_acceptor: Callable[[bytes], None]


class Driver:
    """One peer's rounds. ``run`` it in a task; ``contribute`` from the training side."""

    def __init__(
        self,
        *,
        signer: Signer,
        head: Head,
        terms: Terms,
        replica: Replica,
        inbox: Inbox,
        transport: Transport,
        directory: Directory,
        ledger: Ledger,
        on_advance: Callable[[Advance], None],
        on_event: Callable[[str, dict[str, object]], None],
        lease: float,
        shrink_after: float,
        acceptor: Acceptor | None = None,
        reserve: int = 1 << 28,
        offload: Offload = in_thread,
    ) -> None:
        self.offload = offload
        self.signer, self.me = signer, signer.peer
        self.terms, self.replica, self.inbox = terms, replica, inbox
        self.transport, self.directory, self.ledger = transport, directory, ledger
        self.on_advance, self.on_event = on_advance, on_event
        self.lease, self.shrink_after = lease, shrink_after
        self.store = FrameStore(reserve)
        self.pending: Contribution | None = None
        self.catch_up: Callable[[PeerId], None] = lambda peer: None
        self.on_swap: Callable[[Frame, Tensor], None] = lambda frame, decoded: None
        self.contributed = 0
        self.stopping = False
        self._heard: dict[PeerId, float] = {}
        self._rivals: dict[PeerId, float] = {}
        self._fatal: DecentralError | None = None
        self._slices: dict[tuple[int, int], dict[PeerId, Tensor]] = {}
        self._slice_came = anyio.Event()
        self._lock = anyio.Lock()
        self._start = (head, acceptor)
        self._group: anyio.abc.TaskGroup | None = None
        limit = HEADER_NBYTES + inbox.limit()
        serve_requests(transport, CONTROL, self._on_control, limit=CONTROL_LIMIT)
        serve_requests(transport, gather.PUSH, self._on_push, limit=limit)
        serve_requests(transport, gather.FETCH, self._on_fetch, limit=64)
        self.frame_limit = limit

    @property
    def head(self) -> Head:
        """Where this peer's chain stands."""
        return self.machine.head if self._group is not None else self._start[0]

    @property
    def running(self) -> bool:
        """Whether this peer is in step with a chain; before that, its head is only a placeholder."""
        return self._group is not None

    @property
    def is_member(self) -> bool:
        """Whether this peer votes in the round in progress."""
        return self.me in self.head.members

    def begin_at(self, head: Head, acceptor: Acceptor | None = None) -> None:
        """Stand at ``head`` when ``run`` starts: learnt from a verified snapshot, or replayed from the journal."""
        self._start = (head, acceptor)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled."""
        head, acceptor = self._start
        self.machine = RoundMachine(self.signer, head, self.terms, anyio.current_time(), acceptor)
        async with anyio.create_task_group() as group:
            self._group = group
            task_status.started()
            await self._tick_forever()

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
            async with anyio.create_task_group() as group:
                for peer in self.head.members:
                    if peer != self.me:
                        group.start_soon(self._send, peer, Goodbye())

    async def come_back(self) -> None:
        """Ask to be let in again."""
        self.stopping = False

    async def adopt(self, head: Head, tensors: Mapping[str, Tensor]) -> None:
        """Take over a verified snapshot: another branch, or too far ahead to replay."""
        async with self._lock:
            before = list(self.replica.anchors)
            if tensors:
                self.replica.load({**tensors, **self.replica.own_tensors()})
            self.pending = None
            self.machine.restart(head, anyio.current_time())
            self.on_event("resynced", {"round": head.round, "epoch": head.epoch})
            for f, old_N in enumerate(before):
                self.on_advance(Advance(None, head.hash, f, old_N, self.replica.anchors[f], None))

    async def feed(self, peer: PeerId, message: Message) -> None:
        """Hand the machine a message as if ``peer`` had just sent it."""
        await self._step(lambda now: self.machine.receive(peer, message, now))

    async def unreachable(self, peer: PeerId) -> None:
        """A send to ``peer`` failed."""
        await self._step(lambda now: self.machine.unreachable(peer, now))

    async def hold(self, frame: Frame) -> None:
        """Hold a checked frame."""
        self.store.add(frame)
        await self._step(lambda now: self.machine.hold(frame.hash, frame.header, now))

    # ---- the machine and its effects ----

    async def _step(self, call: Callable[[float], list[Effect]]) -> None:
        async with self._lock:
            effects = call(anyio.current_time())
            with anyio.CancelScope(shield=True):  # a caller that goes away must not leave a commit half done
                try:
                    await self._carry_out(effects)
                except DecentralError as error:
                    self._fatal = error  # a full disk, say: the machine has moved on and the disk has not
                    raise

    async def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._spawn(self._send, effect.to, effect.message)
            elif isinstance(effect, Persist):
                await self.offload(self.ledger.save_acceptor, effect.acceptor.to_bytes())
            elif isinstance(effect, Fetch):
                self._spawn(self._fetch, effect.frame, effect.holders)
            elif isinstance(effect, SendSlices):
                self.inbox.expect(effect.plan)
                self._spawn(self._reduce, effect.plan, self.head)
            elif isinstance(effect, Decide):
                await self._decide(effect.commit)
            elif isinstance(effect, CatchUp):
                self.catch_up(effect.peer)

    async def _decide(self, commit: Commit) -> None:
        """Durable first, then applied, then announced."""
        record = commit.record
        frames = {ref.frame: self._stored(ref.frame) for ref in record.frames}
        data = [frames[ref.frame].to_bytes() for ref in record.frames]
        await self.offload(self.ledger.append, commit, data)
        before_N = after_N = None
        if moves_anchor(record):
            step = await self.offload(self.replica.outer_step, record, frames)
            before_N, after_N = step.before_N, step.after_N
            self.replica.install(step)
        named = self._settle(record)
        self._tidy(record.round)
        self.on_advance(Advance(record, record.hash, record.fragment, before_N, after_N, named))
        anchor = self.replica.digest if moves_anchor(record) else record.base
        await self._carry_out(self.machine.applied(anchor, anyio.current_time()))
        if self.pending is not None and self._takes_again(record):
            await self._offer()

    def _stored(self, frame: bytes) -> Frame:
        found = self.store.get(frame)
        assert found is not None, "the machine decides only on frames that are held"
        return found

    def _settle(self, record: Record) -> Contribution | None:
        """Book the debt if the record names our contribution; else it stays whole in the local parameters."""
        pending = self.pending
        if pending is None or not moves_anchor(record):
            return None
        self.pending = None
        if self.me not in {ref.peer for ref in (record.contributors or record.frames)}:
            return None
        self.contributed += 1
        debt_N = pending.debt_after(record)
        if debt_N is not None:
            self.replica.debts[record.fragment] = debt_N
        return pending

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
            nbytes = self.replica.codec.body_nbytes(((self.replica.numel(pending.fragment),),))
            offer = pending.offer(head, pending.commitment(), nbytes)
            await self._carry_out(self.machine.offer(offer, now))
            return
        assert pending.encoded is not None
        frame = pending.frame(head, self.signer)
        self.store.add(frame)
        effects = self.machine.hold(frame.hash, frame.header, now)
        effects += self.machine.offer(pending.offer(head, frame.hash, len(pending.encoded.body)), now)
        self._spawn(self._push, frame, head.members)
        await self._carry_out(effects)

    def _tidy(self, round_: int) -> None:
        self.store.forget_before(round_ - KEEP_ROUNDS)
        self.inbox.forget_before(round_ + 1)
        self._slices = {}

    # ---- sending ----

    def _spawn(self, work: Callable[..., object], *args: object) -> None:
        if self._group is not None:
            self._group.start_soon(self._guarded, work, *args)

    async def _guarded(self, work: Callable[..., object], *args: object) -> None:
        """A failed send or a bad answer must not end the peer; it is counted and the timers above go on."""
        try:
            await work(*args)  # type: ignore[misc]
        except DecentralError as error:
            self.on_event("dropped", {"what": getattr(work, "__name__", "task"), "why": str(error)})

    async def _send(self, to: PeerId, message: Message) -> None:
        try:
            await notify(self.transport, to, CONTROL, encode(message), timeout=SEND_TIMEOUT)
        except TransportError:
            await self.unreachable(to)

    async def _push(self, frame: Frame, members: Sequence[PeerId]) -> None:
        others = [peer for peer in members if peer != self.me]
        for peer in await gather.push(self.transport, others, frame.to_bytes(), self.terms.ceiling):
            await self.unreachable(peer)

    async def _fetch(self, frame: bytes, holders: Sequence[PeerId]) -> None:
        if frame in self.store:
            return
        data = await gather.fetch(self.transport, holders, frame, self.frame_limit, self.terms.ceiling)
        if data is not None:
            await self.take(data, frame)

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it. Raises PayloadError."""
        frame, decoded = await self.inbox.take(data, lambda: self.head, self.terms.patience)
        if wanted is not None and frame.hash != wanted:
            raise PayloadError("a holder answered with another frame than the one asked for; drop it")
        if frame.header.kind == Kind.SLICE:
            self._take_slice(frame, decoded)
        elif frame.header.kind == Kind.SWAP:
            self.on_swap(frame, decoded)
        elif frame.hash not in self.store:
            await self.hold(frame)

    # ---- reduce ----

    def _take_slice(self, frame: Frame, decoded: Tensor) -> None:
        key = (frame.header.plan, frame.header.part)
        self._slices.setdefault(key, {})[frame.header.sender] = decoded
        self._slice_came.set()
        self._slice_came = anyio.Event()

    async def _reduce(self, plan: Plan, head: Head) -> None:
        """Send our slices; if a partition is ours, sum it and give everybody the result."""
        if self.pending is not None and self.me in {ref.peer for ref in plan.contributors}:
            made = await self.offload(self.pending.slice_frames, plan, head, self.replica, self.signer)
            for (owner, _, _), frame in zip(plan.partition, made, strict=True):
                if owner == self.me:
                    decoded = self.replica.codec.decode(frame.body, range_of(plan, frame.header.part))
                    self._take_slice(frame, decoded)
                else:
                    self._spawn(self._push, frame, (owner,))
        part = owned_part(plan, self.me)
        if part is not None:
            await self._own(Reduction(plan, part), head)

    async def _own(self, reduction: Reduction, head: Head) -> None:
        key = (reduction.plan.number, reduction.part)
        with anyio.move_on_after(self.terms.patience):
            while True:
                reduction.slices = dict(self._slices.get(key, {}))
                if not reduction.missing():
                    break
                await self._slice_came.wait()
        if missing := reduction.missing():
            await self._blame(reduction.plan, missing, head)
            return
        body = await self.offload(reduction.result, self.replica.codec)
        fragment, parts = head.fragment(self.terms.num_fragments), len(reduction.plan.partition)
        header = header_after(head, Kind.RESULT, fragment, self.me, reduction.part, parts, reduction.plan.number)
        frame = seal(header, body, self.signer)
        if self.head.hash == head.hash:
            await self.hold(frame)
            await self._push(frame, head.members)

    async def _blame(self, plan: Plan, missing: tuple[PeerId, ...], head: Head) -> None:
        message = Missing(head.epoch, head.round + 1, plan.number, tuple(sorted(missing)))
        leader = self.machine.leader_of(plan.ballot)
        if leader == self.me:
            await self.feed(self.me, message)
        else:
            await self._send(leader, message)

    # ---- receiving ----

    async def _on_control(self, peer: PeerId, data: bytes) -> bytes:
        if self._group is None:
            return b""  # not in step yet: nothing that is said now concerns this peer
        message = decode(data)
        self._heard[peer] = anyio.current_time()
        await self.feed(peer, message)
        return b""

    async def _on_push(self, peer: PeerId, data: bytes) -> bytes:
        if self._group is None:
            return b""
        self._heard[peer] = anyio.current_time()
        await self.take(data)
        return b""

    async def _on_fetch(self, peer: PeerId, data: bytes) -> bytes:
        frame = self.store.get(data)
        return b"" if frame is None else frame.to_bytes()

    # ---- time ----

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
            self._look_for_other_chains(now)
            await anyio.sleep(TICK)

    def _absent(self, now: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Members not heard of for a lease, and for so long that they are given up."""
        live = self.directory.live()
        for peer in self.head.members:
            if peer in live or peer not in self._heard:
                self._heard[peer] = now
        silent = {peer: now - self._heard[peer] for peer in self.head.members if peer != self.me}
        expired = frozenset(peer for peer, s in silent.items() if s > self.lease / 2)
        return expired, frozenset(peer for peer in expired if silent[peer] > self.shrink_after)

    def _look_for_other_chains(self, now: float) -> None:
        """A peer two rounds ahead: we missed a commit. A peer that stays on another branch: one of us must adopt.

        Branches come from a partition, or from a chain that was given up and came back; comparing them is the
        catch-up's work, and both sides start it, so it does not matter which is the longer.
        """
        head, rivals = self.head, {}
        for peer, lease in self.directory.live().items():
            if lease.round > head.round + 1:
                self.catch_up(peer)
            elif lease.digest != head.hash and peer not in head.members and peer not in self.machine.joiners:
                rivals[peer] = self._rivals.get(peer, now)
        for peer, since in rivals.items():
            if now - since > self.lease:
                rivals[peer] = now
                self.catch_up(peer)
        self._rivals = rivals

    def describe(self) -> dict[str, object]:
        """Where this peer stands, for status and health."""
        head = self.head
        return {
            "round": head.round,
            "epoch": head.epoch,
            "outer_step": head.outer_step,
            "members": [peer_name(peer) for peer in head.members],
            "offered": [peer_name(peer) for peer in self.machine.round.offers],
            "contributed": self.contributed,
        }
