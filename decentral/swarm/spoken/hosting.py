"""The side that invites: it waits at its number, gives the invite to the first who knows the words, and ends.

Bounded: three wrong guesses end it, as do ten minutes; at most 4 strangers are heard at a time, each for ten seconds,
and 200 in all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import anyio

from decentral.errors import PayloadError, TransportError
from decentral.swarm.spoken.code import SpokenCode
from decentral.swarm.spoken.handshake import ELEMENT_NBYTES, PROOF_NBYTES, WordsHandshake
from decentral.transport.base import Stream, Transport
from decentral.wire.keys import PeerId

WORDS_PROTOCOL = "/decentral/words/1"
LASTS = 600.0  # s
MOST_WRONG = 3  # guesses
MOST_HEARD = 200  # strangers that began, and may have gone before they guessed
AT_ONCE = 4
PATIENCE = 10.0  # s for one of them
LENGTH_NBYTES = 2

logger = logging.getLogger("decentral.swarm")


@dataclass(slots=True)
class Hosting:
    """One code's life. ``over`` is set once the invite was given or the tries are used up."""

    code: SpokenCode
    invite: str
    me: PeerId
    given_to: PeerId | None = None
    wrong: int = 0
    over: anyio.Event = field(default_factory=anyio.Event)
    _heard: int = 0
    _now: int = 0

    def serve(self, transport: Transport) -> None:
        """Answer guests. Before the transport is entered."""
        transport.serve(WORDS_PROTOCOL, self._attend)

    @property
    def is_open(self) -> bool:
        """Whether a guess is still heard."""
        return self.given_to is None and self.wrong < MOST_WRONG

    async def _attend(self, stream: Stream) -> None:
        if not self.is_open or self._now >= AT_ONCE or self._heard >= MOST_HEARD:
            raise PayloadError("words: not now; drop who asks")
        self._heard += 1
        self._now += 1
        try:
            with anyio.move_on_after(PATIENCE):
                await self._hear(stream)
        finally:
            self._now -= 1

    async def _hear(self, stream: Stream) -> None:
        shakes = WordsHandshake(self.code.password, stream.peer, self.me, is_guest=False)
        shakes.hear(await stream.receive_exactly(ELEMENT_NBYTES))
        await stream.send(shakes.first)
        proof = await stream.receive_exactly(PROOF_NBYTES)
        if not self.is_open:  # somebody else was quicker
            raise PayloadError("words: used; drop who asks")
        if not shakes.takes(proof):
            self._guessed_wrong()
            raise PayloadError("words: a wrong guess; drop who made it")
        self.given_to = stream.peer  # from here on it is used, whatever becomes of the line
        try:
            sealed = shakes.seal(self.invite.encode("ascii"))
            await stream.send(len(sealed).to_bytes(LENGTH_NBYTES, "little") + sealed)
            await stream.receive_exactly(1)  # it has it
        except TransportError as error:
            logger.debug("words: %s", error)
        finally:
            self.over.set()

    def _guessed_wrong(self) -> None:
        self.wrong += 1
        if self.wrong >= MOST_WRONG:
            self.over.set()
