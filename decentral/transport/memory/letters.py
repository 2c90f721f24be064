"""Bodies that fit into one piece, put on the line as a stream would and given to the handler when they are through.

A stream costs two pipes, four watchdogs and a dozen waits; a letter two waits. What is on a line, and for how long, is
the same: the handshake, the length before each body, the queue at both lines, cuts and deaths.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from typing import Protocol

import anyio
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, PeerUnreachable, StreamClosed
from decentral.flow.schedule import SECONDS
from decentral.flow.upload import Budget
from decentral.transport.base import Traffic
from decentral.transport.letters import Letter, Respond, Watch
from decentral.transport.memory.lines import MemoryLines
from decentral.transport.memory.pipe import AS_THEY_ARE, PIECE, Link, TimedPiece, Weight
from decentral.transport.requests import PREFIX_NBYTES, unwatched
from decentral.transport.watchdog import STALL
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")

_Served = tuple[Respond, int, Watch | None]


class MemoryLetter:
    """See Letter. ``weight``: what its bytes stand for, both ways."""

    def __init__(self, sender: PeerId, receiver: PeerId, protocol: str, body: bytes, weight: Weight) -> None:
        self.sender, self.receiver, self.protocol, self.body, self.weight = sender, receiver, protocol, body, weight
        self.opened = anyio.current_time()
        self.over = False  # nothing comes back any more, or nobody wants it
        self._came: anyio.Event | None = None
        self._answer: bytes | None = None

    async def answer(self, limit: int) -> bytes:
        """See Letter."""
        if not self.over:
            self._came = anyio.Event()
            await self._came.wait()
        self.over = True
        if self._answer is None:
            raise StreamClosed(f"{peer_name(self.receiver)}: ended {self.protocol} without an answer; ask another peer")
        if len(self._answer) > limit:
            found = f"{len(self._answer)} bytes announced, at most {limit} taken; drop it"
            raise PayloadError(f"{self.protocol} from {peer_name(self.receiver)}: {found}")
        return self._answer

    async def close(self) -> None:
        """See Letter."""
        self.over = True

    def end(self, answer: bytes | None = None) -> None:
        """What comes back, or that nothing does."""
        if not self.over:
            self.over, self._answer = True, answer
        if self._came is not None:
            self._came.set()


class Station(Protocol):
    """One peer's transport, as letters need it."""

    peer: PeerId
    traffic: Traffic
    budget: Budget

    def letters_of(self, protocol: str) -> MemoryLetters:
        """Where letters of a protocol come in; PeerUnreachable when it is not served."""
        ...

    def begin(self, deliver: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do something that ends with the handlers."""
        ...


class Wires(Protocol):
    """The network between all of them."""

    lines: MemoryLines
    weights: Mapping[str, Weight]
    long: Collection[str]  # protocols whose answers come in many pieces

    def reach(self, sender: PeerId, receiver: PeerId) -> Station:
        """The other's transport. PeerUnreachable when there is no way."""
        ...

    def posted(self, letter: MemoryLetter) -> None:
        """It is on its way."""
        ...

    def done(self, letter: MemoryLetter) -> None:
        """It is there, or lost."""
        ...

    def carries(self, letter: MemoryLetter) -> bool:
        """Whether its way was not broken since it was posted."""
        ...

    def received(self, letter: MemoryLetter, nbytes: int) -> None:
        """Book the answer to a letter, which came."""
        ...


class MemoryLetters:
    """See Letters: those of one transport, out and in."""

    def __init__(self, transport: Station, network: Wires) -> None:
        self._transport, self._network = transport, network
        self._served: dict[str, _Served] = {}

    def carry(self, protocol: str, nbytes: int) -> bool:
        """See Letters: what is one piece on a stream."""
        return self._weight(protocol).of(0, PREFIX_NBYTES + nbytes) <= PIECE and protocol not in self._network.long

    def serve(self, protocol: str, respond: Respond, limit: int, watch: Watch | None) -> None:
        """See Letters."""
        self._served[protocol] = respond, limit, watch

    async def post(self, peer: PeerId, protocol: str, body: bytes) -> Letter:
        """See Letters."""
        await self.reach(peer, protocol)
        return await self.put(peer, protocol, body)

    async def reach(self, peer: PeerId, protocol: str, *, late: float = 0.0) -> None:
        """The handshake, ``late`` by so many seconds. Raises PeerUnreachable."""
        await anyio.sleep(late + 2 * self._network.lines.link(self._transport.peer, peer).latency)
        self._network.reach(self._transport.peer, peer).letters_of(protocol)

    async def put(self, peer: PeerId, protocol: str, body: bytes, *, lost: bool = False) -> MemoryLetter:
        """The body on the line, or nowhere where it is ``lost``; returns when a stream would have taken it."""
        own = self._transport
        letter = MemoryLetter(own.peer, peer, protocol, body, self._weight(protocol))
        if lost:
            await anyio.lowlevel.checkpoint()
            return letter
        link = self._network.lines.link(own.peer, peer)
        nbytes = letter.weight.of(0, PREFIX_NBYTES + len(body))
        piece = self._network.lines.put(link, peer, nbytes)
        own.traffic.add(peer, sent=round(nbytes), kind=protocol)
        other = self._network.reach(own.peer, peer)
        self._network.posted(letter)
        other.begin(other.letters_of(protocol).deliver, letter, piece, nbytes)
        if letter.weight.each != 1.0:
            await self._share_the_line(link)
        return letter

    async def _share_the_line(self, link: Link) -> None:
        """See Pipe."""
        await anyio.sleep(max(0.0, link.free_at - anyio.current_time() - SECONDS))

    async def deliver(self, letter: MemoryLetter, piece: TimedPiece, nbytes: float) -> None:
        """At its receiver: wait for it, have it handled, send what comes back."""
        try:
            with self._transport.budget.inbound(letter.sender):
                if await self._through(piece, self._transport.peer, letter):
                    await self._handle(letter, nbytes)
        except DecentralError as error:
            logger.debug("%s from %s: %s", letter.protocol, peer_name(letter.sender), error)
        except Exception:  # see `attend` of streams
            logger.exception("handler of %s failed on a letter from %s", letter.protocol, peer_name(letter.sender))
        finally:
            letter.end()
            self._network.done(letter)

    async def _handle(self, letter: MemoryLetter, nbytes: float) -> None:
        transport, sender, body = self._transport, letter.sender, letter.body
        transport.traffic.add(sender, received=round(nbytes), kind=letter.protocol)
        respond, limit, watch = self._served[letter.protocol]
        if len(body) > limit:
            raise PayloadError(f"{letter.protocol} from {peer_name(sender)}: {len(body)} bytes, at most {limit} taken")
        async with transport.budget.bytes_of(sender, len(body)):
            with nullcontext(unwatched) if watch is None else watch(sender) as on_bytes:
                on_bytes(len(body))
                answer = await respond(sender, body)
        if not letter.over:
            await self._send_back(letter, answer)

    async def _send_back(self, letter: MemoryLetter, answer: bytes) -> None:
        back = letter.weight.of(0, PREFIX_NBYTES + len(answer))
        link = self._network.lines.link(self._transport.peer, letter.sender)
        piece = self._network.lines.put(link, letter.sender, back)
        self._transport.traffic.add(letter.sender, sent=round(back), kind=letter.protocol)
        if await self._through(piece, letter.sender, letter) and not letter.over:
            self._network.received(letter, round(back))
            letter.end(answer)

    async def _through(self, piece: TimedPiece, receiver: PeerId, letter: MemoryLetter) -> bool:
        """Wait until a piece is through the receiver's line; whether it is, and not cut off by a watchdog before."""
        began = anyio.current_time()
        while not letter.over or receiver == letter.receiver:
            now = anyio.current_time()
            self._network.lines.settle(receiver, now)
            due = piece.due
            if due <= now:
                return self._network.carries(letter)
            if due - began > STALL and letter.weight.each == 1.0:
                await anyio.sleep(max(0.0, began + STALL - now))
                return False
            await anyio.sleep(due - now)
        return False

    def _weight(self, protocol: str) -> Weight:
        return self._network.weights.get(protocol, AS_THEY_ARE)

    def answers(self, protocol: str) -> bool:
        """Whether anything is served here under that name."""
        return protocol in self._served


def refuse(peer: PeerId, protocol: str) -> PeerUnreachable:
    """Nobody answers that there."""
    return PeerUnreachable(f"{peer_name(peer)}: it does not serve {protocol}; compare the versions")
