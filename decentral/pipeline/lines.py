"""The lines between the stages of one replica: bodies that cross, in order, each taken once.

Crosses the wire: on one stream to each other member, bodies behind their lengths, answered one after the other by a
byte each. A stream that fails is opened again, and what was not answered is sent again; who has it already takes it for
that. What comes is held against the record of the group, whatever it says: who may send what, in which step, how long
it is, whether its numbers are finite.

The training sends and waits; the swarm's loop moves bytes. It is written as coroutines: on a training thread what is
awaited blocks.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import anyio
import torch
from torch import Tensor

from decentral.errors import ConfigError, GroupBroken, PayloadError, TransportError, first_of
from decentral.flow.waiting import Changes
from decentral.pipeline.boundary import ROUNDINGS, Rounding
from decentral.pipeline.stage import Done
from decentral.pipeline.turns import Turn
from decentral.transport import Transport
from decentral.transport.base import Stream
from decentral.transport.requests import (
    Watchdog,
    ignore_count,
    open_stream,
    receive_body,
    receive_length,
    send_body,
)
from decentral.wire.groups import BODY_HEAD_NBYTES, BOUNDARY, Body, BodyKind, GroupRecord
from decentral.wire.keys import PeerId, peer_name

__all__ = ["Bell", "Boundaries", "Form", "Forms", "LoopBell", "StageInbox", "StageLines", "ThreadBell"]

_TAKEN, _UNKNOWN, _NOT_YET = (bytes([answer]) for answer in range(3))
_TIMEOUT = 10.0  # s until there is a path
_RETRY = 0.5  # s between two tries to open a stream, or to send what was not yet taken
_RESTS = 3600.0  # s that a stream may wait for its next body: a round, a pause
_LOOK_EVERY = 0.2  # s: Ctrl-C must get through on every platform
_TELLS = 1.5  # s that a stage waits for another before the others hear of it, and between two such words


# ---- values as bytes ----


class Form:
    """Tensors of one shape, as bytes: all of the same length, and finite."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, rounding: Rounding | None = None) -> None:
        """``rounding``: of hidden states and their gradients; None: as they are, whole numbers by 32 bits."""
        self._shape, self._dtype, self._rounding = shape, dtype, rounding
        self._crosses = torch.int32 if dtype == torch.int64 else dtype
        packed = self._pack(torch.zeros(shape, dtype=dtype, device="cpu"))
        self._pieces = [(tuple(one.shape), one.dtype, one.numel() * one.element_size()) for one in packed]
        self.nbytes = sum(nbytes for _, _, nbytes in self._pieces)

    def write(self, values: Tensor) -> bytes:
        """Return a tensor's bytes. ConfigError where it has another shape, or whole numbers of more than 32 bits."""
        if tuple(values.shape) != self._shape:
            raise ConfigError(
                f"share: {tuple(values.shape)} where this replica's stages exchange {self._shape}; give every step a "
                "batch of one shape"
            )
        packed = self._pack(values.detach().cpu())
        return b"".join(one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in packed)

    def read(self, data: bytes | memoryview) -> Tensor:
        """Return the tensor, in memory of its own. PayloadError for numbers that are not finite."""
        pieces, at, room = [], 0, bytearray(data)
        for shape, dtype, nbytes in self._pieces:
            pieces.append(torch.frombuffer(room, dtype=dtype, count=math.prod(shape), offset=at).view(shape))
            at += nbytes
        if self._rounding is None:
            values = pieces[0].to(self._dtype)
        else:
            values = self._rounding.unpack(tuple(pieces)).to(self._dtype)
        if values.is_floating_point() and not bool(torch.isfinite(values).all()):
            raise PayloadError("states or gradients between stages that are not finite; drop them")
        return values

    def _pack(self, values: Tensor) -> tuple[Tensor, ...]:
        if self._rounding is not None:
            return self._rounding.pack(values)
        if self._crosses is not self._dtype and values.numel() and int(values.abs().max()) >= 1 << 31:
            raise ConfigError("share: targets beyond 32 bits; give the number of a class or of a token")
        return (values.to(self._crosses),)


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of what crosses to and from one stage; None where nothing does."""

    comes: Form | None  # states from the stage before; their gradients go back alike
    goes: Form | None  # states to the next
    targets: Form | None  # of a micro-batch
    norms: Mapping[PeerId, int]  # of each member, the parameters that it trains at most

    @classmethod
    def of(
        cls,
        record: GroupRecord,
        comes: Tensor | None,
        goes: Tensor | None,
        targets: Tensor,
        norms: Mapping[PeerId, int],
    ) -> Forms:
        """Return them by an example of each."""
        rounding = ROUNDINGS[record.rounding]
        before, after = (None if one is None else Form(tuple(one.shape), one.dtype, rounding) for one in (comes, goes))
        return cls(before, after, Form(tuple(targets.shape), targets.dtype), norms)


# ---- waiting ----


class Bell(Protocol):
    """A way to wait that is cut short by news; one waits, anybody rings."""

    def ring(self) -> None:
        """End the waiting, or the next one, at once. On any thread that the bell is made for."""
        ...

    async def wait(self, seconds: float) -> float:
        """Wait until it rings, or so long; return the seconds, none where it rang."""
        ...


class ThreadBell:
    """A bell for a training thread, which blocks."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        """End the waiting."""
        self._rung.set()

    async def wait(self, seconds: float) -> float:
        """Block until it rings, or so long; return the seconds, none where it rang."""
        rang = self._rung.wait(seconds)
        self._rung.clear()
        return 0.0 if rang else seconds


class LoopBell:
    """A bell for who trains on the swarm's own loop."""

    def __init__(self) -> None:
        self._rung = anyio.Event()

    def ring(self) -> None:
        """End the waiting."""
        self._rung.set()

    async def wait(self, seconds: float) -> float:
        """Wait until it rings, or so long; return the seconds, none where it rang."""
        with anyio.move_on_after(seconds) as scope:
            await self._rung.wait()
        self._rung = anyio.Event()
        return seconds if scope.cancelled_caught else 0.0


# ---- what came ----

GoesOn = Callable[[], None]
Wanted = tuple[BodyKind, PeerId, int]  # what, of whom, for which micro-batch
_Key = tuple[BodyKind, PeerId, int, int]  # the same, and in which step before the micro-batch


class StageInbox:
    """The bodies that came for one stage of a group and were not used yet. The swarm's loop puts, the trainer takes."""

    def __init__(self, record: GroupRecord, me: PeerId, forms: Forms, bell: Bell) -> None:
        self.record, self._me, self._bell = record, me, bell
        self._place = record.members.index(me)
        self._forms, self._step = forms, 0
        self._held: dict[_Key, memoryview | bytes] = {}
        self._lock = threading.Lock()
        self.why = ""  # the group is no more; empty: it is
        self.blamed: PeerId | None = None  # who did not do its part, where it is known
        self.waits: tuple[PeerId | None, int] = (None, 0)  # whose body is waited for now, and the number of the wait
        self.waiting: dict[PeerId, PeerId] = {}  # whom each member waits for, as it says; itself: nobody

    @property
    def most_nbytes(self) -> int:
        """Bytes of the longest body that may come."""
        forms = (self._forms.comes, self._forms.goes, self._forms.targets)
        norms = 8 + 4 * max(self._forms.norms.values())
        return BODY_HEAD_NBYTES + max(norms, *(0 if form is None else form.nbytes for form in forms))

    def begin(self, step: int) -> None:
        """Take what belongs to this step and the next from now on."""
        with self._lock:
            self._step = step
            self._held = {key: values for key, values in self._held.items() if key[2] >= step}

    def put(self, peer: PeerId, body: Body) -> None:
        """Hold what came; twice is once. PayloadError for what nobody may send."""
        if body.kind is BodyKind.OVER:
            self.end(f"{peer_name(peer)} has left the group")
            return
        self._check(peer, body)
        if body.kind is BodyKind.WAITS:
            self.waiting[peer] = self.record.members[body.values[0]]
            return
        key = (body.kind, peer, body.step, body.micro)
        with self._lock:
            is_news = body.step >= self._step and key not in self._held
            if is_news:
                self._held[key] = body.values
        if is_news:
            self._bell.ring()

    def end(self, why: str, blamed: PeerId | None = None) -> None:
        """Have who waits know that the group is no more, and for want of whom."""
        if not self.why:
            self.blamed, self.why = blamed, why
        self._bell.ring()

    async def take(self, kind: BodyKind, peer: PeerId, micro: int, goes_on: GoesOn, patience: float) -> memoryview:
        """Wait for a body of this step, as ``first_here`` does."""
        await self.first_here([(kind, peer, micro)], goes_on, patience)
        with self._lock:
            return memoryview(self._held.pop((kind, peer, self._step, micro)))

    async def first_here(self, wanted: Sequence[Wanted], goes_on: GoesOn, patience: float) -> int:
        """Wait for one of some bodies of this step, and return the place of the first that is here.

        GroupBroken when the group is no more, or nothing came for ``patience`` s. ``goes_on`` is asked again and again,
        and may raise.
        """
        keys, waited, peer = [(kind, peer, self._step, micro) for kind, peer, micro in wanted], 0.0, wanted[0][1]
        while True:
            with self._lock:
                place = next((place for place, key in enumerate(keys) if key in self._held), None)
            if place is not None:
                self.waits = (None, self.waits[1] + 1)
                return place
            if not self.why and waited >= patience:
                waits_itself = len(wanted) > 1 or self.waiting.get(peer, peer) != peer
                self.end(f"{peer_name(peer)} sent nothing for {patience:.0f} s", None if waits_itself else peer)
            if self.why:
                raise GroupBroken(self.why)
            goes_on()
            self.waits = (peer, self.waits[1])
            waited += await self._bell.wait(_LOOK_EVERY)

    def _check(self, peer: PeerId, body: Body) -> None:
        members, last = self.record.members, len(self.record.members) - 1
        from_ = members.index(peer)
        goes = {
            BodyKind.STATES: from_ == self._place - 1,
            BodyKind.GRADIENT: from_ == self._place + 1,
            BodyKind.TARGETS: from_ == 0 and self._place == last,
        }
        if not goes.get(body.kind, True):
            raise PayloadError(
                f"{peer_name(peer)} sent {body.kind.name.lower()}, which is not its to send here; drop it"
            )
        if body.step > self._step + 1 or body.micro >= self.record.micro_batches:
            raise PayloadError(f"{peer_name(peer)}: step {body.step}, micro-batch {body.micro}, none of ours; drop it")
        nbytes, want = len(body.values), self._nbytes_of(peer, body.kind)
        if not (nbytes in want and (body.kind is not BodyKind.DONE or nbytes % 4 == 0)):
            raise PayloadError(
                f"{peer_name(peer)}: {nbytes} bytes of {body.kind.name.lower()}, want {want[-1]}; drop it"
            )
        if body.kind is BodyKind.WAITS and body.values[0] > last:
            raise PayloadError(f"{peer_name(peer)} waits for stage {body.values[0]}, counted from 0 to {last}; drop it")

    def _nbytes_of(self, peer: PeerId, kind: BodyKind) -> range:
        if kind is BodyKind.READY:
            return range(1)
        if kind is BodyKind.WAITS:
            return range(1, 2)
        if kind is BodyKind.DONE:
            return range(8, 8 + 4 * self._forms.norms[peer] + 1)
        form = {
            BodyKind.STATES: self._forms.comes,
            BodyKind.GRADIENT: self._forms.goes,
            BodyKind.TARGETS: self._forms.targets,
        }[kind]
        nbytes = 0 if form is None else form.nbytes
        return range(nbytes, nbytes + 1)


# ---- on the swarm's loop ----


@dataclass(slots=True)
class _Outbox:
    """The bodies for one member, first to last: those sent that it has not answered yet, and those to be sent."""

    unanswered: deque[bytes] = field(default_factory=deque)
    unsent: deque[bytes] = field(default_factory=deque)
    news: Changes = field(default_factory=Changes)
    lost_at: float | None = None  # since when nothing is taken; None: the last body was


class Boundaries:
    """The lines of one peer. Made before its transport is entered, as it serves.

    ``gives_up``: seconds for which a member may be out of reach.
    """

    def __init__(self, transport: Transport, gives_up: float) -> None:
        self._transport, self._gives_up = transport, gives_up
        self._pledged: GroupRecord | None = None
        self._inbox: StageInbox | None = None
        self._outboxes: dict[PeerId, _Outbox] = {}
        transport.serve(BOUNDARY, self._attend)

    def expect(self, record: GroupRecord | None) -> None:
        """Know of a group that is about to be: its members are answered to wait."""
        self._pledged = record

    async def run(self, inbox: StageInbox) -> None:
        """Move bytes for this group until it is no more, and then tell the others so."""
        me, self._inbox = self._transport.peer, inbox
        self._outboxes = {peer: _Outbox() for peer in inbox.record.members if peer != me}
        try:
            async with anyio.create_task_group() as group:
                for peer, outbox in self._outboxes.items():
                    group.start_soon(self._send_all, inbox, peer, outbox)
                await self._tell_waiting(inbox)
                group.cancel_scope.cancel()
        finally:
            self._inbox, self._outboxes, self._pledged = None, {}, None
            with anyio.CancelScope(shield=True), anyio.move_on_after(_RETRY):
                await self._say_over(inbox)

    async def _tell_waiting(self, inbox: StageInbox) -> None:
        """Tell all for whom this stage waits, once it has for long, and when it does no more, until the group's end."""
        members, me = inbox.record.members, self._transport.peer
        seen, since, told_at = inbox.waits, anyio.current_time(), -math.inf
        while not inbox.why:
            await anyio.sleep(_LOOK_EVERY)
            now = anyio.current_time()
            if inbox.waits != seen:
                seen, since = inbox.waits, now
            whom = (seen[0] if now - since >= _TELLS else None) or me
            if whom != inbox.waiting.get(me, me) and now - told_at >= _TELLS:
                inbox.waiting[me], told_at = whom, now
                body = Body(BodyKind.WAITS, inbox.record.number, 0, 0, bytes([members.index(whom)])).to_bytes()
                for peer in self._outboxes:
                    await self.post(peer, body)

    async def post(self, peer: PeerId, body: bytes) -> None:
        """Send a body to a member, in its turn; nothing where the group is no more."""
        if (outbox := self._outboxes.get(peer)) is not None:
            outbox.unsent.append(body)
            outbox.news.tell()

    # ---- sending ----

    async def _send_all(self, inbox: StageInbox, peer: PeerId, outbox: _Outbox) -> None:
        while not inbox.why:
            try:
                await self._send_on_one_stream(inbox, peer, outbox)
            except* (TransportError, PayloadError) as errors:  # anything else is a mistake of ours, and no stream's
                now = anyio.current_time()
                outbox.lost_at = now if outbox.lost_at is None else outbox.lost_at
                if now - outbox.lost_at > self._gives_up:
                    inbox.end(f"{peer_name(peer)} is out of reach ({first_of(errors)})", peer)
            outbox.unsent.extendleft(reversed(outbox.unanswered))
            outbox.unanswered.clear()
            await anyio.sleep(_RETRY)

    async def _send_on_one_stream(self, inbox: StageInbox, peer: PeerId, outbox: _Outbox) -> None:
        while not outbox.unsent:
            await outbox.news.next()
        stream = await open_stream(self._transport, peer, BOUNDARY, _TIMEOUT)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._hear_answers, inbox, stream, outbox)
                while True:
                    news = outbox.news.coming()
                    while outbox.unsent:
                        outbox.unanswered.append(outbox.unsent.popleft())
                        await send_body(stream, BOUNDARY, outbox.unanswered[-1])
                    await news.wait()
        finally:
            await stream.aclose()

    async def _hear_answers(self, inbox: StageInbox, stream: Stream, outbox: _Outbox) -> None:
        while True:
            answer = await stream.receive_exactly(1)
            if answer == _UNKNOWN:
                inbox.end(f"{peer_name(stream.peer)} is in this group no more")
            if answer != _TAKEN:
                raise TransportError(f"{peer_name(stream.peer)} does not take what crosses yet")
            outbox.lost_at = None
            if outbox.unanswered:
                outbox.unanswered.popleft()

    async def _say_over(self, inbox: StageInbox) -> None:
        body = Body(BodyKind.OVER, inbox.record.number, 0, 0, b"").to_bytes()
        async with anyio.create_task_group() as group:
            for peer in inbox.record.members:
                if peer != self._transport.peer:
                    group.start_soon(self._say, peer, body)

    async def _say(self, peer: PeerId, body: bytes) -> None:
        try:
            stream = await open_stream(self._transport, peer, BOUNDARY, _RETRY)
            await send_body(stream, BOUNDARY, body)
            await stream.aclose()
        except TransportError:
            return  # it finds out

    # ---- receiving ----

    async def _attend(self, stream: Stream) -> None:
        while (nbytes := await self._next_length(stream)) is not None:
            async with self._transport.budget.bytes_of(stream.peer, nbytes):
                data = await receive_body(stream, BOUNDARY, nbytes, ignore_count)
                answer = self._take(stream.peer, Body.read(data))
            with Watchdog(stream, BOUNDARY):
                await stream.send(answer)

    async def _next_length(self, stream: Stream) -> int | None:
        most = BODY_HEAD_NBYTES
        if self._inbox is not None and stream.peer in self._inbox.record.members:
            most = self._inbox.most_nbytes
        elif not self._transport.budget.comes_first(stream.peer) and not self._is_pledged(stream.peer):
            return None
        with self._transport.budget.resting(stream.peer, _RESTS):
            try:
                return await receive_length(stream, BOUNDARY, most)
            except PayloadError:
                if self._inbox is None:  # it was in a group with this peer, which was started anew
                    await stream.send(_UNKNOWN)
                raise
        return None

    def _is_pledged(self, peer: PeerId) -> bool:
        return self._pledged is not None and peer in self._pledged.members

    def _take(self, peer: PeerId, body: Body) -> bytes:
        inbox = self._inbox
        if inbox is not None and inbox.record.number == body.group and peer in inbox.record.members:
            inbox.put(peer, body)
            return _TAKEN
        is_coming = self._pledged is not None and self._pledged.number == body.group and self._is_pledged(peer)
        return _NOT_YET if is_coming else _UNKNOWN


# ---- where the training is ----

Post = Callable[[PeerId, bytes], Awaitable[object]]


class StageLines:
    """The neighbours of one stage, as `decentral.pipeline.stage.Stage` asks for them: one object for each group."""

    def __init__(
        self,
        inbox: StageInbox,
        me: PeerId,
        forms: Forms,
        post: Post,
        goes_on: GoesOn,
        patience: float,
    ) -> None:
        """``post`` has a body sent, and does not wait for it; ``goes_on`` is asked while this waits, and may raise."""
        self._inbox, self._forms, self._post, self._goes_on, self._patience = inbox, forms, post, goes_on, patience
        self._members, self._me, self.step = inbox.record.members, me, 0
        self._place = self._members.index(me)
        self._others = [peer for peer in self._members if peer != me]

    async def meet(self) -> None:
        """Tell all others that this member is ready, and wait until all are. GroupBroken."""
        for peer in self._others:
            await self._send(BodyKind.READY, peer, 0, b"")
        for peer in self._others:
            await self._take(BodyKind.READY, peer, 0)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Go through one step inside."""
        self._inbox.begin(self.step)
        yield
        self.step += 1

    async def send_on(self, micro: int, states: Tensor) -> None:
        """Send what the next stage goes on with."""
        assert self._forms.goes is not None, "not of the last stage"
        await self._send(BodyKind.STATES, self._members[self._place + 1], micro, self._forms.goes.write(states))

    async def send_back(self, micro: int, gradient: Tensor) -> None:
        """Send the gradient of what came from the stage before."""
        assert self._forms.comes is not None, "not of the first stage"
        await self._send(BodyKind.GRADIENT, self._members[self._place - 1], micro, self._forms.comes.write(gradient))

    async def send_targets(self, micro: int, targets: Tensor) -> None:
        """Send what the last stage measures the loss by."""
        assert self._forms.targets is not None, "of every group"
        await self._send(BodyKind.TARGETS, self._members[-1], micro, self._forms.targets.write(targets))

    async def first_here(self, turns: Sequence[Turn]) -> Turn:
        """Wait until what one of these turns takes is here; return the first that it is here for. GroupBroken."""
        if turns[0].forward and not self._place:
            return turns[0]  # with inputs of its own
        wanted = [self._taken_by(turn) for turn in turns]
        return turns[await self._inbox.first_here(wanted, self._goes_on, self._patience)]

    def _taken_by(self, turn: Turn) -> Wanted:
        if turn.forward:
            return BodyKind.STATES, self._members[self._place - 1], turn.micro
        if self._place == len(self._members) - 1:
            return BodyKind.TARGETS, self._members[0], turn.micro
        return BodyKind.GRADIENT, self._members[self._place + 1], turn.micro

    async def receive_states(self, micro: int) -> Tensor:
        """Wait for what the stage before sent on. GroupBroken."""
        return await self._read(self._forms.comes, BodyKind.STATES, self._members[self._place - 1], micro)

    async def receive_gradient(self, micro: int) -> Tensor:
        """Wait for what the next stage sent back. GroupBroken."""
        return await self._read(self._forms.goes, BodyKind.GRADIENT, self._members[self._place + 1], micro)

    async def receive_targets(self, micro: int) -> Tensor:
        """Wait for what the first stage sent. GroupBroken."""
        return await self._read(self._forms.targets, BodyKind.TARGETS, self._members[0], micro)

    async def exchange(self, done: Done) -> list[Done]:
        """Tell all others, and return what every stage told, first to last. GroupBroken."""
        for peer in self._others:
            await self._send(BodyKind.DONE, peer, 0, done.to_bytes())
        told = {peer: Done.read(await self._take(BodyKind.DONE, peer, 0)) for peer in self._others}
        for peer, one in (*told.items(), (self._me, done)):
            if not (math.isfinite(one.loss) and bool(torch.isfinite(one.norms_P).all())):
                self._break(f"the gradients or the loss of {peer_name(peer)} are not finite", peer)
        return [done if peer == self._me else told[peer] for peer in self._members]

    async def _send(self, kind: BodyKind, peer: PeerId, micro: int, values: bytes) -> None:
        await self._post(peer, Body(kind, self._inbox.record.number, self.step, micro, values).to_bytes())

    async def _take(self, kind: BodyKind, peer: PeerId, micro: int) -> memoryview:
        return await self._inbox.take(kind, peer, micro, self._goes_on, self._patience)

    async def _read(self, form: Form | None, kind: BodyKind, peer: PeerId, micro: int) -> Tensor:
        assert form is not None, "it comes from a neighbour"
        try:
            return form.read(await self._take(kind, peer, micro))
        except PayloadError as error:
            self._break(f"{peer_name(peer)}: {error}", peer)

    def _break(self, why: str, blamed: PeerId) -> NoReturn:
        self._inbox.end(why, blamed)
        raise GroupBroken(why)
