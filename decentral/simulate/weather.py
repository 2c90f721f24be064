"""A transport on which streams get lost, come late, come twice, or come with a flipped bit.

Wraps any transport; draws from a seeded source, so a run replays. TCP would repair most of this: what stays are broken
connections, relays that give up, and peers whose memory is bad, and the protocol above must bear all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import anyio

from decentral.errors import TransportError
from decentral.flow.budget import Budget
from decentral.simulate.scenario import Profile
from decentral.transport.base import (
    Handler,
    KeptStreams,
    Letter,
    Letters,
    Respond,
    Stream,
    Traffic,
    Transport,
    Uncapped,
    Watch,
)
from decentral.transport.memory import MemoryLetter, MemoryLetters, MemoryTransport
from decentral.wire.keys import PeerId


@dataclass(slots=True)
class Weather:
    """How bad the network is just now; shares between 0 and 1. Changed while a run goes on."""

    generator: random.Random
    loss: float = 0.0
    duplication: float = 0.0
    corruption: float = 0.0
    delay: float = 0.0  # s, the largest

    def clear_up(self) -> None:
        """From now on nothing goes wrong."""
        self.loss = self.duplication = self.corruption = self.delay = 0.0

    def break_out(self, profile: Profile) -> None:
        """From now on it is as bad as ``profile`` says."""
        self.loss, self.duplication = profile.loss, profile.duplication
        self.corruption, self.delay = profile.corruption, profile.delay

    def strikes(self, share: float) -> bool:
        """Draw whether something of this share happens now."""
        return share > 0 and self.generator.random() < share


class WeatheredTransport(Uncapped):
    """A transport under a weather. See Transport."""

    def __init__(self, inner: MemoryTransport, weather: Weather) -> None:
        self._inner, self._weather = inner, weather
        self._letters = inner.letters
        self.peer: PeerId = inner.peer

    @property
    def traffic(self) -> Traffic:
        """Return ``Transport.traffic``."""
        return self._inner.traffic

    @property
    def budget(self) -> Budget:
        """Return ``Transport.budget``."""
        return self._inner.budget

    @property
    def kept(self) -> KeptStreams:
        """Return ``Transport.kept``."""
        return self._inner.kept

    def serve(self, protocol: str, handler: Handler) -> None:
        """Do what ``Transport.serve`` says."""
        self._inner.serve(protocol, handler)

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Do what ``Transport.paths`` says."""
        return await self._inner.paths()

    def addresses(self) -> tuple[str, ...]:
        """Do what ``Transport.addresses`` says."""
        return self._inner.addresses()

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Do what ``Transport.connect`` says."""
        await self._inner.connect(peer, addresses)

    @property
    def letters(self) -> Letters | None:
        """Return ``Transport.letters``; they have the weather of streams."""
        return None if self._letters is None else WeatheredLetters(self._letters, self._weather)

    async def open(self, peer: PeerId, protocol: str) -> Stream:
        """Do what ``Transport.open`` says; the stream may be one of those below."""
        weather = self._weather
        if weather.delay:
            await anyio.sleep(weather.generator.uniform(0.0, weather.delay))
        stream = await self._inner.open(peer, protocol)
        if weather.strikes(weather.loss):
            return _Lost(stream)
        if weather.strikes(weather.corruption):
            return _Flipped(stream, weather.generator)
        if weather.strikes(weather.duplication):
            return _Twice(stream, self._inner, protocol)
        return stream

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class WeatheredLetters:
    """Letters under a weather: lost, flipped or said twice as often as streams. See Letters."""

    inner: MemoryLetters
    weather: Weather

    def carry(self, protocol: str, nbytes: int) -> bool:
        """Do what ``Letters.carry`` says."""
        return self.inner.carry(protocol, nbytes)

    def serve(self, protocol: str, respond: Respond, limit: int, watch: Watch | None) -> None:
        """Do what ``Letters.serve`` says."""
        self.inner.serve(protocol, respond, limit, watch)

    async def post(self, peer: PeerId, protocol: str, body: bytes) -> Letter:
        """Do what ``Letters.post`` says."""
        weather = self.weather
        late = weather.generator.uniform(0.0, weather.delay) if weather.delay else 0.0
        await self.inner.reach(peer, protocol, late=late)
        if weather.strikes(weather.loss):
            return await self.inner.put(peer, protocol, body, lost=True)
        if weather.strikes(weather.corruption):
            return await self.inner.put(peer, protocol, _flip_bit(body, weather.generator))
        twice = weather.strikes(weather.duplication)
        letter = await self.inner.put(peer, protocol, body)
        return _SaidTwice(letter, self.inner) if twice else letter


@dataclass(frozen=True, slots=True)
class _SaidTwice:
    """Comes once more when the first is over; its second answer is dropped."""

    first: MemoryLetter
    letters: MemoryLetters

    async def answer(self, limit: int) -> bytes:
        """Do what ``Letter.answer`` says."""
        return await self.first.answer(limit)

    async def close(self) -> None:
        """Do what ``Letter.close`` says."""
        await self.first.close()
        with suppress(TransportError):
            await (await self.letters.post(self.first.receiver, self.first.protocol, self.first.body)).close()


def _flip_bit(body: bytes, generator: random.Random) -> bytes:
    """Flip one bit of it."""
    if not body:
        return body
    at, flipped = generator.randrange(8 * len(body)), bytearray(body)
    flipped[at // 8] ^= 1 << at % 8
    return bytes(flipped)


@dataclass(eq=False, slots=True)
class _Lost:
    """Takes everything and delivers nothing, as a connection does whose other end went dark."""

    inner: Stream

    @property
    def peer(self) -> PeerId:
        """Return ``Stream.peer``."""
        return self.inner.peer

    async def send(self, data: bytes | memoryview) -> None:
        """Do what ``Stream.send`` says."""
        await anyio.lowlevel.checkpoint()

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Do what ``Stream.receive_exactly`` says; nothing ever comes."""
        await anyio.sleep_forever()
        raise AssertionError("sleeping for ever ends by cancellation only")

    async def aclose(self) -> None:
        """Do what ``Stream.aclose`` says."""
        await self.inner.aclose()


@dataclass(eq=False, slots=True)
class _Flipped:
    """Flips one bit of the longest run of bytes it is given first."""

    inner: Stream
    generator: random.Random
    done: bool = False

    @property
    def peer(self) -> PeerId:
        """Return ``Stream.peer``."""
        return self.inner.peer

    async def send(self, data: bytes | memoryview) -> None:
        """Do what ``Stream.send`` says."""
        body = bytearray(data)
        if len(body) > 4 and not self.done:
            at = self.generator.randrange(32, 8 * len(body))  # the length before it would only make the stream fail
            body[at // 8] ^= 1 << at % 8
            self.done = True
        await self.inner.send(bytes(body))

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Do what ``Stream.receive_exactly`` says."""
        return await self.inner.receive_exactly(nbytes, on_bytes)

    async def aclose(self) -> None:
        """Do what ``Stream.aclose`` says."""
        await self.inner.aclose()


@dataclass(eq=False, slots=True)
class _Twice:
    """Says everything again on a second stream when the first one ends; its answer is dropped."""

    inner: Stream
    transport: Transport
    protocol: str
    said: list[bytes] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        """Return ``Stream.peer``."""
        return self.inner.peer

    async def send(self, data: bytes | memoryview) -> None:
        """Do what ``Stream.send`` says."""
        self.said.append(bytes(data))
        await self.inner.send(data)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Do what ``Stream.receive_exactly`` says."""
        return await self.inner.receive_exactly(nbytes, on_bytes)

    async def aclose(self) -> None:
        """Do what ``Stream.aclose`` says."""
        await self.inner.aclose()
        said, self.said = self.said, []
        try:
            again = await self.transport.open(self.peer, self.protocol) if said else None
            for piece in said:
                assert again is not None
                await again.send(piece)
            if again is not None:
                await again.aclose()
        except TransportError:
            return  # the second one got lost, which is no worse
