"""An invite handed over by words: host and guest find each other, and the guest who knows the words gets the invite.

They meet by multicast DNS on the local network, or at a relay that both know. Either way it is the number that is
looked for. On the network it is announced as peers of a run announce theirs; at a
relay the host takes a place under the key that follows from it. Nothing is stored at the relay, and any relay will do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import anyio

from decentral.errors import (
    DecentralError,
    InviteError,
    ListenError,
    NoPeersError,
    PayloadError,
    StreamClosed,
    TransportError,
)
from decentral.swarm.announcement import host_of, local_addresses, read_announcement, write_announcement
from decentral.swarm.invite import Invite
from decentral.swarm.words import ELEMENT_NBYTES, MAX_SEALED, PROOF_NBYTES, SpokenCode, WordsHandshake
from decentral.transport.base import Stream, Transport
from decentral.transport.interfaces import cards
from decentral.transport.native.tcp import endpoint
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.swarm")

RELAY_PORT = 4001  # where decentral relay listens unless it is told otherwise
LASTS = 600.0  # s that the words are good for
_NOWHERE = ("/ip4/127.0.0.1/tcp/0",)  # nobody is to dial a guest
_PLACE = 10.0  # s for the relays to give a place
_LOOK = 0.05  # s
_AGAIN = 1.0  # s between two looks for the host
_DIAL = 5.0  # s
_SIGHTED = 8  # addresses remembered of what is announced on the network


async def host_words(
    code: SpokenCode,
    invite: str,
    relays: Sequence[str],
    *,
    lan: bool = True,
    seconds: float = LASTS,
    listen: Sequence[str] | None = None,
    ready: Callable[[list[str]], None] = lambda places: None,
) -> PeerId:
    """Give the invite to the first who knows the words; returns who that was, by the key it used for the question.

    ``ready`` is told where guests find this side. Raises ListenError when that is nowhere, NoPeersError when nobody
    came within ``seconds``, and DecentralError after too many wrong guesses.
    """
    hosting = Hosting(code, invite, code.host)
    options = NativeOptions(relays=tuple(relays), punch=False)
    transport = NativeTransport(code.signer, listen=listen, options=options)
    hosting.serve(transport)
    async with transport, AsyncExitStack() as stack:
        places = await _places(transport, relays)
        if lan and await _on_air(stack, code, transport):
            places.append("this network")
        if not places:
            raise ListenError(
                "words: there is no local network here and no relay gave a place; name one with --relay "
                "(decentral relay runs one), or send the invite line itself: decentral invite"
            )
        ready(places)
        with anyio.move_on_after(seconds):
            await hosting.over.wait()
    if hosting.given_to is not None:
        return hosting.given_to
    if hosting.wrong:
        tries = f"{hosting.wrong} wrong guess{'es' if hosting.wrong > 1 else ''}"
        raise DecentralError(f"words: {tries}, and nobody had them right; they are void now: make new ones")
    raise NoPeersError(f"words: nobody came within {seconds / 60:g} min; they are void now: make new ones")


async def find_invite(
    code: SpokenCode, relays: Sequence[str], *, lan: bool = True, seconds: float | None = None
) -> Invite:
    """Find the invite by one handshake with whoever is at the number.

    Raises NoPeersError when nobody is found there within ``seconds``, InviteError when the words are wrong.
    """
    options = NativeOptions(punch=False, dial_timeout=_DIAL)
    async with (
        NativeTransport(Signer.generate(), listen=_NOWHERE, options=options) as transport,
        AsyncExitStack() as stack,
    ):
        sighted: dict[str, None] = {}
        if lan:
            await _listen(stack, code, sighted)
        known = [f"{relay}/p2p-circuit/p2p/{peer_name(code.host)}" for relay in relays]
        with anyio.move_on_after(seconds):
            while True:
                with suppress(TransportError):  # not there yet; no guess was made
                    await transport.connect(code.host, (*list(sighted), *known))
                    return await ask_for_invite(transport, code)
                await anyio.sleep(_AGAIN)
    where = f"at {len(relays)} relay{'s' if len(relays) > 1 else ''} or on" if relays else "on"
    raise NoPeersError(
        f"words: nobody invites at {code.number} {where} this network; have its ten minutes gone? From another network "
        "give --relay HOST, the relay that decentral invite --words has named"
    )


async def relay_at(where: str) -> str:
    """Return the relay's multiaddr, of ``HOST`` or ``HOST:PORT``: its key is what it shows. Raises TransportError."""
    if where.startswith("/"):
        return where
    host, _, port = where.rpartition(":") if where.count(":") == 1 else (where, "", "")
    number = int(port) if port.isdecimal() else RELAY_PORT
    found = await _who_is_at(host, number)
    kind = "ip6" if ":" in host else "ip4" if host.replace(".", "").isdecimal() else "dns4"
    return f"/{kind}/{host}/tcp/{number}/p2p/{peer_name(found)}"


def short_address(relay: str) -> str:
    """Return a relay's address as it can be said: host, and port where it is another than the usual one."""
    end = endpoint(relay.partition("/p2p/")[0])
    if end is None:
        return relay
    return end[0] if end[1] == RELAY_PORT else f"{end[0]}:{end[1]}"


async def _who_is_at(host: str, port: int) -> PeerId:
    from decentral.transport.protocols.noise import close_now, secure_outbound

    try:
        with anyio.fail_after(_DIAL):
            socket = await anyio.connect_tcp(host, port)
            try:
                return (await secure_outbound(socket, Signer.generate(), None)).peer
            finally:
                await close_now(socket)
    except (OSError, TimeoutError, DecentralError) as error:
        reason = str(error) or "no answer"
        raise TransportError(f"relay {host}:{port}: {reason}; is it up, and the name right?") from None


async def _places(transport: NativeTransport, relays: Sequence[str]) -> list[str]:
    """Return the relays that gave a place, as they are said."""
    with anyio.move_on_after(_PLACE if relays else 0):
        while len(_relays_with_place(transport)) < len(relays):
            await anyio.sleep(_LOOK)
    held = set(_relays_with_place(transport))
    return [short_address(relay) for relay in relays if relay in held]


def _relays_with_place(transport: NativeTransport) -> list[str]:
    return [address.partition("/p2p-circuit")[0] for address in transport.addresses() if "/p2p-circuit" in address]


async def _on_air(stack: AsyncExitStack, code: SpokenCode, transport: NativeTransport) -> bool:
    """Announce the number on a local network; tell whether there is one."""
    addresses = local_addresses(transport.addresses())
    if not addresses:
        return False
    text = write_announcement(code.topic, code.host, addresses)
    port = (endpoint(addresses[0]) or ("", 0))[1]
    return await _air(stack, list(dict.fromkeys(map(host_of, addresses))), text, port, lambda text: None)


async def _listen(stack: AsyncExitStack, code: SpokenCode, sighted: dict[str, None]) -> None:
    def hear(text: bytes) -> None:
        with suppress(PayloadError):
            sighting = read_announcement(text, code.topic)
            if sighting is not None and sighting.peer == code.host and len(sighted) < _SIGHTED:
                sighted.update(dict.fromkeys(sighting.addresses))

    hosts = [host_of(address) for address in local_addresses(_possible())]
    if hosts:
        await _air(stack, hosts, None, 0, hear)


def _possible() -> Iterator[str]:
    """Yield the addresses of this machine's cards, with a port that stands for any."""
    for hosts in cards().values():
        for host in hosts:
            yield f"/ip{6 if ':' in host else 4}/{host}/tcp/1"


async def _air(
    stack: AsyncExitStack, hosts: list[str], text: bytes | None, port: int, hear: Callable[[bytes], None]
) -> bool:
    from decentral.swarm.mdns import on_air  # here: the library is loaded where it is wanted

    try:
        await stack.enter_async_context(on_air(hosts, text, port, hear))
    except Exception as error:  # noqa: BLE001  whatever the library meets out there, a relay may do
        logger.debug("words: local network: %s", error)
        return False
    return True


# ---- the side that invites ----
#
# It waits at its number, gives the invite to the first who knows the words, and ends. Bounded: three wrong guesses end
# it, as do ten minutes; at most 4 strangers are heard at a time, each for ten seconds, and 200 in all.

WORDS_PROTOCOL = "/decentral/words/1"
MOST_WRONG = 3  # guesses
MOST_HEARD = 200  # strangers that began, and may have gone before they guessed
AT_ONCE = 4
PATIENCE = 10.0  # s for one of them
LENGTH_NBYTES = 2


@dataclass(slots=True)
class Hosting:
    """The life of one code. ``over`` is set once the invite was given or the tries are used up."""

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
        """Tell whether a guess is still heard."""
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
            self._count_wrong_guess()
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

    def _count_wrong_guess(self) -> None:
        self.wrong += 1
        if self.wrong >= MOST_WRONG:
            self.over.set()


# ---- the side that was invited ----

_WRONG = (
    "words: they are not those of the one who invites at {}, or were used by somebody else; ask for new ones "
    "(decentral invite --words)"
)


async def ask_for_invite(transport: Transport, code: SpokenCode) -> Invite:
    """Ask the host for the invite; there is a path to it by now. Raises InviteError when the words are wrong.

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
