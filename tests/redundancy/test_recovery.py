"""Keepers that lie, and states that are never mixed: what comes back is whole and right, or nothing does."""

from __future__ import annotations

import pytest
import trio

from decentral.redundancy.keeper import KEPT
from decentral.redundancy.pieces import Seals
from decentral.transport.requests import serve_requests
from tests.redundancy.swarm import NEWER, RUN, SIGNERS, STATE, Swarm, terms

pytestmark = pytest.mark.usefixtures("virtual_time")


def lies(swarm: Swarm, number: int, kind: str) -> None:
    """From now on, this keeper does not give what it was given."""
    keeper, transport = swarm.keepers[number], swarm.transports[number]
    honest = keeper._on_kept

    async def answer(peer: bytes, data: bytes) -> bytes:
        found = await honest(peer, data)
        if kind == "garbage" and data:
            return bytes(len(found))
        if kind == "one bit" and data:
            return found[:-1] + bytes([found[-1] ^ 1])
        if kind == "another place" and data:
            return await honest(peer, data[:-4] + bytes([data[-4] ^ 1, 0, 0, 0]))
        if kind == "nothing" and data:
            return b""
        if kind == "too long" and data:
            return bytes(1 << 20)
        if kind == "label" and not data:
            return found[:8] + bytes(len(found) - 8)
        return found

    del transport.services.handlers[KEPT]
    transport.services.fixed = False
    serve_requests(transport, KEPT, answer, limit=1 << 10)
    transport.services.fixed = True


LIES = ["garbage", "one bit", "another place", "nothing", "too long", "label"]


@pytest.mark.parametrize("kind", LIES)
async def test_of_one_keeper_that_lies_nothing_is_taken_and_of_two_nothing_is_made(kind: str) -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        lies(swarm, 1, kind)
        found = await swarm.recovery().run(look_for=1.0)
        assert found is not None
        assert found.state == STATE
        assert set(found.keepers) == {swarm.peers[2], swarm.peers[3]}
        lies(swarm, 2, kind)
        recovery = swarm.recovery()
        assert await recovery.run(look_for=1.0) is None
        assert "1 of the 2 pieces that are needed are here" in recovery.why


async def test_pieces_of_an_older_and_of_a_newer_state_are_never_joined() -> None:
    """Of three keepers, one has the newer state alone, another the older one; of neither are there two."""
    async with Swarm(terms()) as swarm:
        swarm.members.discard(swarm.peers[4])
        await swarm.give()
        shelves = swarm.keepers[1]._shelves.copy(), swarm.keepers[2]._shelves.copy()
        assert shelves
        older = swarm.keepers[1]._shelves[swarm.peers[0]].pieces[:]
        await swarm.give(NEWER, 9)
        swarm.keepers[1]._shelves[swarm.peers[0]].pieces = older
        swarm.keepers[2]._shelves.clear()
        recovery = swarm.recovery()
        assert await recovery.run(look_for=1.0) is None
        assert "of the state of round 7, 1 of the 2 pieces" in recovery.why


async def test_the_older_state_comes_back_when_too_few_have_the_newer_one() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        older = [keeper._shelves[swarm.peers[0]].pieces[:] for keeper in swarm.keepers[1:3]]
        await swarm.give(NEWER, 9)
        for keeper, pieces in zip(swarm.keepers[1:3], older, strict=True):
            keeper._shelves[swarm.peers[0]].pieces = pieces
        assert await swarm.recovered() == (STATE, 7)


async def test_without_the_key_nothing_comes_back() -> None:
    """A peer with another key is served nothing; and were it served, it could read nothing."""
    async with Swarm(terms()) as swarm:
        await swarm.give()
        stranger = swarm.recovery(Seals(SIGNERS[4], RUN), swarm.transports[4])
        assert await stranger.run(look_for=1.0) is None
        assert stranger.why == "no member keeps anything of it"
        overheard = swarm.recovery(Seals(SIGNERS[4], RUN))
        assert await overheard.run(look_for=1.0) is None


async def test_a_peer_whose_keepers_are_met_late_waits_for_them() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        recovery = swarm.recovery()
        known = [swarm.peers[1]]
        recovery._live = lambda: known
        async with trio.open_nursery() as nursery:
            found = []

            async def look() -> None:
                found.append(await recovery.run())

            nursery.start_soon(look)
            await trio.sleep(3.0)
            known.extend(swarm.peers[2:])
        assert found[0] is not None
        assert found[0].state == STATE
