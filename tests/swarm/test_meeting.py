"""Host and guests over real transports and a real relay, and those who come without the words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from decentral.errors import DecentralError, InviteError, ListenError, NoPeersError, TransportError
from decentral.swarm import meeting
from decentral.swarm.invite import Invite
from decentral.swarm.meeting import WORDS_PROTOCOL, ask_for_invite, find_invite, host_words, relay_at, short_address
from decentral.swarm.words import ELEMENT_NBYTES, PROOF_NBYTES, SpokenCode, WordsHandshake
from decentral.transport.native.transport import NativeOptions, NativeTransport
from decentral.wire.keys import Signer, peer_name
from tests.kit.relays import LOOPBACK, relay
from tests.kit.scenes import played

CODE = SpokenCode(("acid", "cargo", "mural", "tulip"), 4711)
WRONG = SpokenCode(("acid", "cargo", "mural", "zoom"), 4711)
INVITE = str(Invite(bytes(32), ("/ip4/127.0.0.1/tcp/1/p2p/" + peer_name(Signer(bytes(32)).peer),), "a-secret-token"))
LIMIT = 60.0  # s; each takes 1 to 3


class Scene:
    """A relay, a host there, and what came of it."""

    def __init__(self, at: tuple[str, ...]) -> None:
        self.relays = at
        self.ended: DecentralError | None = None
        self.guest: bytes | None = None
        self.over = anyio.Event()

    def host_address(self) -> str:
        return f"{self.relays[0]}/p2p-circuit/p2p/{peer_name(CODE.host)}"

    async def find(self, code: SpokenCode, seconds: float = 20.0) -> Invite:
        return await find_invite(code, self.relays, lan=False, seconds=seconds)

    async def host(self, seconds: float, *, task_status: Any) -> None:
        try:
            self.guest = await host_words(
                CODE,
                INVITE,
                self.relays,
                lan=False,
                seconds=seconds,
                listen=LOOPBACK,
                ready=lambda places: task_status.started(places),
            )
        except DecentralError as error:
            self.ended = error
        self.over.set()

    @asynccontextmanager
    async def stranger(self) -> AsyncIterator[NativeTransport]:
        async with NativeTransport(Signer.generate(), listen=LOOPBACK, options=NativeOptions(punch=False)) as transport:
            await transport.connect(CODE.host, (self.host_address(),))
            yield transport


def host(script: Callable[[Scene], Awaitable[None]], seconds: float = 30.0) -> None:
    """The host waits at the relay while the script runs; then it is taken away."""

    async def run() -> None:
        with anyio.fail_after(LIMIT):
            async with relay() as at, anyio.create_task_group() as group:
                scene = Scene(at.addresses()[:1])
                await group.start(partial(scene.host, seconds))
                await script(scene)
                group.cancel_scope.cancel()

    anyio.run(run)


@played(host)
async def test_the_words_bring_the_invite_with_its_token_through_a_relay_to_one_guest(scene: Scene) -> None:
    """A wrong guess learns nothing, and a right one after it is still taken."""
    with pytest.raises(InviteError, match="not those of the one who invites at 4711"):
        await scene.find(WRONG)
    assert not scene.over.is_set()
    assert str(await scene.find(CODE)) == INVITE
    await scene.over.wait()
    assert scene.ended is None
    assert scene.guest is not None
    with pytest.raises(NoPeersError, match="nobody invites at 4711"):
        await scene.find(CODE, seconds=1.5)


@played(host)
async def test_the_third_wrong_guess_ends_it(scene: Scene) -> None:
    for _ in range(3):
        assert not scene.over.is_set()
        with pytest.raises(InviteError):
            await scene.find(WRONG)
    await scene.over.wait()
    assert "3 wrong guesses" in str(scene.ended)
    with pytest.raises(NoPeersError):
        await scene.find(CODE, seconds=1.5)


@played(partial(host, seconds=0.5))
async def test_they_expire(scene: Scene) -> None:
    await scene.over.wait()
    assert isinstance(scene.ended, NoPeersError)
    assert scene.ended.exit_code == 20
    with pytest.raises(NoPeersError, match="have its ten minutes gone"):
        await scene.find(CODE, seconds=1.5)


@played(host)
async def test_hostile_bytes_are_no_guess_and_the_next_guest_is_served(scene: Scene) -> None:
    async with scene.stranger() as transport:
        for first in [b"A", b"A" + bytes(32), b"\xff" * ELEMENT_NBYTES, b"x" * 5000] * 2:
            stream = await transport.open(CODE.host, WORDS_PROTOCOL)
            await stream.send(first)
            await stream.aclose()
    assert str(await scene.find(CODE)) == INVITE
    assert scene.ended is None


@played(host)
async def test_a_first_message_sent_back_is_refused_before_anything_is_proven(scene: Scene) -> None:
    async with scene.stranger() as transport:
        stream = await transport.open(CODE.host, WORDS_PROTOCOL)
        asks = WordsHandshake(WRONG.password, transport.peer, CODE.host, is_guest=True)
        await stream.send(asks.first)
        answer = await stream.receive_exactly(ELEMENT_NBYTES)
        again = await transport.open(CODE.host, WORDS_PROTOCOL)
        await again.send(answer)  # the host's own
        with pytest.raises(TransportError):
            await again.receive_exactly(ELEMENT_NBYTES)
        await stream.send(answer[:PROOF_NBYTES])  # and as a proof: a wrong guess
        with pytest.raises(TransportError):
            await stream.receive_exactly(2)
    assert str(await scene.find(CODE)) == INVITE


@played(host)
async def test_strangers_that_say_nothing_do_not_keep_the_guest_out(scene: Scene, monkeypatch) -> None:
    monkeypatch.setattr(meeting, "PATIENCE", 0.5)
    async with scene.stranger() as transport:
        silent = [await transport.open(CODE.host, WORDS_PROTOCOL) for _ in range(meeting.AT_ONCE)]
        for stream in silent:
            await stream.send(b"A")
        assert str(await scene.find(CODE)) == INVITE


def test_who_takes_the_hosts_place_without_the_words_is_found_out() -> None:
    """Anybody can have the key that follows from the number."""

    async def pretend(stream: Any) -> None:
        shakes = WordsHandshake(WRONG.password, stream.peer, CODE.host, is_guest=False)
        shakes.hear(await stream.receive_exactly(ELEMENT_NBYTES))
        await stream.send(shakes.first)
        await stream.receive_exactly(PROOF_NBYTES)
        sealed = shakes.seal(b"decentral1:evil")
        await stream.send(len(sealed).to_bytes(2, "little") + sealed)
        await stream.receive_exactly(1)

    async def script() -> None:
        pretender = NativeTransport(CODE.signer, listen=LOOPBACK)
        pretender.serve(WORDS_PROTOCOL, pretend)
        guest = NativeTransport(Signer.generate(), listen=LOOPBACK)
        async with pretender, guest:
            await guest.connect(CODE.host, pretender.addresses())
            with pytest.raises(InviteError):
                await ask_for_invite(guest, CODE)

    anyio.run(script)


def test_without_network_and_relay_it_says_what_to_do() -> None:
    async def script() -> None:
        with pytest.raises(ListenError, match="name one with --relay"):
            await host_words(CODE, INVITE, (), lan=False, listen=LOOPBACK)

    anyio.run(script)


def test_a_relay_is_named_as_it_can_be_said_and_tells_its_own_key() -> None:
    async def script() -> None:
        async with relay() as at:
            (whole,) = at.addresses()[:1]
            port = whole.split("/")[4]
            assert short_address(whole) == f"127.0.0.1:{port}"
            assert await relay_at(f"127.0.0.1:{port}") == whole
            assert await relay_at(whole) == whole
        with pytest.raises(TransportError, match="is it up"):
            await relay_at(f"127.0.0.1:{port}")

    assert short_address("/dns4/relay.example.org/tcp/4001/p2p/x") == "relay.example.org"
    anyio.run(script)
