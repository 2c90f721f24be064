"""A run that admits by token: who has none is told nothing, given nothing and not believed."""

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from decentral.errors import PeerUnreachable, TransportError, UsageError
from decentral.swarm.admission import MIN_TOKEN, Admission, AdmittingTransport, check_token
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request, serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.keys import PeerId, Signer
from tests.kit.scenes import played, without_waiting

RUN, TOKEN = bytes(range(32)), "correct-horse-battery"
CLOSED, OPEN = "/test/closed/1", "/test/open/1"


def signer(number: int) -> Signer:
    return Signer(hashlib.blake2b(bytes([number]), digest_size=32).digest())


A, B, C = (signer(number).peer for number in range(3))


def admission(me: PeerId, token: str = TOKEN, run: bytes = RUN) -> Admission:
    return Admission(token, run, me)


def test_a_proof_holds_for_one_pair_of_peers_in_one_direction_of_one_run() -> None:
    here = admission(A)
    assert here.take(B, admission(B).proof(A))
    assert here.admits(B)
    for peer, proof in [
        (C, admission(B).proof(A)),  # passed on
        (C, admission(C).proof(B)),  # meant for another
        (B, here.proof(B)),  # our own, sent back
        (C, admission(C, token="another-horse-battery").proof(A)),
        (C, admission(C, run=bytes(32)).proof(A)),
        (C, b""),
    ]:
        assert not admission(A).take(peer, proof)
    assert not here.admits(C)


def test_the_token_is_not_in_its_proof() -> None:
    assert TOKEN.encode() not in admission(A).proof(B)


@pytest.mark.parametrize(
    "token", ["", "short", "x" * (MIN_TOKEN - 1), "x" * 129, "with a space in it", "ümläute-ümläute"]
)
def test_a_token_that_is_easily_guessed_or_fits_no_invite_is_refused(token: str) -> None:
    with pytest.raises(UsageError, match="want 12 to 128 visible ASCII ones"):
        check_token(token)


class Pair:
    """A member, and another peer that has a token, another one or none."""

    def __init__(self, token: str | None) -> None:
        network = MemoryNetwork(latency=0.01)
        self.member = self.make(network, 0, TOKEN)
        self.other = self.make(network, 1, token)

    def make(self, network: MemoryNetwork, number: int, token: str | None) -> ThrottledTransport:
        inner, me = network.transport(signer(number)), signer(number).peer
        made = ThrottledTransport(inner, urgent=())
        if token is not None:
            given = {"admission": admission(me, token), "open_to_all": frozenset({OPEN}), "urgent": ()}
            made = AdmittingTransport(inner, Caps(), **given)

        async def answer(peer: PeerId, body: bytes) -> bytes:
            return b"served"

        for protocol in (CLOSED, OPEN):
            serve_requests(made, protocol, answer, limit=9)
        return made

    async def ask(self, asker: ThrottledTransport, of: ThrottledTransport, protocol: str) -> bytes:
        await asker.connect(of.peer, of.addresses())
        return await request(asker, of.peer, protocol, b"please", limit=9, timeout=5.0)


def pair_with(token: str | None) -> Any:
    """The test gets a member and one that has this token."""

    def scene(script: Callable[[Pair], Awaitable[None]]) -> None:
        async def main() -> None:
            pair = Pair(token)
            async with pair.member, pair.other:
                await script(pair)

        without_waiting(main)

    return played(scene)


async def is_served_what_is_open_and_asked_for_nothing(pair: Pair, unreachable: type[Exception]) -> None:
    assert await pair.ask(pair.other, pair.member, OPEN) == b"served"
    with pytest.raises(TransportError):
        await pair.ask(pair.other, pair.member, CLOSED)
    with pytest.raises(unreachable):
        await pair.ask(pair.member, pair.other, CLOSED)


@pair_with(None)
async def test_a_stranger_is_served_what_is_open_to_all_and_no_more_and_asked_for_nothing(pair: Pair) -> None:
    await is_served_what_is_open_and_asked_for_nothing(pair, TransportError)


@pair_with("another-horse-battery")
async def test_so_is_who_has_the_token_of_others(pair: Pair) -> None:
    await is_served_what_is_open_and_asked_for_nothing(pair, PeerUnreachable)


@pair_with(TOKEN)
async def test_who_has_the_token_is_served_and_asked_and_met_again_within_ten_seconds_of_a_restart(pair: Pair) -> None:
    assert await pair.ask(pair.other, pair.member, CLOSED) == b"served"
    assert await pair.ask(pair.member, pair.other, CLOSED) == b"served"
    pair.member.admission = admission(A)  # a new process knows nobody
    with pytest.raises(TransportError):
        await pair.ask(pair.other, pair.member, CLOSED)
    await anyio.sleep(10)
    assert await pair.ask(pair.other, pair.member, CLOSED) == b"served"
