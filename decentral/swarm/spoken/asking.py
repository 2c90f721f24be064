"""The side that was invited: one handshake with whoever is at the number, and the invite that comes of it."""

from __future__ import annotations

import anyio

from decentral.errors import InviteError, PayloadError, StreamClosed, TransportError
from decentral.swarm.invite import Invite
from decentral.swarm.spoken.code import SpokenCode
from decentral.swarm.spoken.handshake import ELEMENT_NBYTES, MAX_SEALED, WordsHandshake
from decentral.swarm.spoken.hosting import LENGTH_NBYTES, PATIENCE, WORDS_PROTOCOL
from decentral.transport.base import Stream, Transport

_WRONG = (
    "words: they are not those of the one who invites at {}, or were used by somebody else; ask for new ones "
    "(decentral invite --words)"
)


async def ask_for_invite(transport: Transport, code: SpokenCode) -> Invite:
    """From the host, to whom there is a path by now. Raises InviteError when the words are wrong.

    Raises TransportError when there was no handshake: no guess was made then.
    """
    stream = await transport.open(code.host, WORDS_PROTOCOL)
    try:
        with anyio.fail_after(PATIENCE):
            return await _shake(stream, code, transport.peer)
    except TimeoutError:
        raise TransportError(f"words: no answer within {PATIENCE:g} s; try again") from None
    finally:
        await stream.aclose()


async def _shake(stream: Stream, code: SpokenCode, me: bytes) -> Invite:
    shakes = WordsHandshake(code.password, me, code.host, is_guest=True)
    await stream.send(shakes.first)
    shakes.hear(await stream.receive_exactly(ELEMENT_NBYTES))
    await stream.send(shakes.proof())
    try:
        nbytes = int.from_bytes(await stream.receive_exactly(LENGTH_NBYTES), "little")
        if nbytes > MAX_SEALED:
            raise PayloadError(f"words: an invite of {nbytes} bytes, at most {MAX_SEALED} are taken")
        text = shakes.open(await stream.receive_exactly(nbytes))
        await stream.send(b"!")
    except (PayloadError, StreamClosed):
        raise InviteError(_WRONG.format(code.number)) from None
    return Invite.parse(text.decode("ascii", errors="replace"))
