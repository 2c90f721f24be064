"""Members that keep a peer's pieces: what they take, bound, drop, and give back to whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from decentral.errors import ConfigError, TransportError
from decentral.manifest import preset_manifest
from decentral.redundancy.giver import choose_keepers
from decentral.redundancy.keeper import FULL, KEEP, KEPT, KEPT_FOR, REFUSED, STRIPE, TAKEN
from decentral.redundancy.pieces import LABEL_NBYTES, SEAL_NBYTES, Label, Seals
from tests.redundancy.swarm import NEWER, RUN, SIGNERS, STATE, Swarm, terms

pytestmark = pytest.mark.usefixtures("virtual_time")


def keep_body(swarm: Swarm, state: bytes = b"12345678", stripe: int = 0, **changed: int) -> bytes:
    """The first thing that a keeper is sent."""
    plan = replace(Label(7, bytes(16), 0, swarm.terms.keepers, swarm.terms.needed, len(state)), **changed)
    return swarm.seals.label(plan, 0).to_bytes() + STRIPE.pack(stripe) + bytes(plan.chunk_nbytes + SEAL_NBYTES)


async def test_a_state_is_given_and_comes_back_to_the_bit() -> None:
    async with Swarm(terms()) as swarm:
        given = await swarm.give()
        assert given.why == ""
        assert set(given.keepers) == set(swarm.peers[1:4])
        assert sum(swarm.kept()) < given.nbytes < sum(swarm.kept()) + 3 * 4 * (LABEL_NBYTES + STRIPE.size)
        assert 1.0 < given.nbytes / (len(STATE) * 3 / 2) < 1.002, "the state times pieces over needed"
        assert given.nbytes <= swarm.owner.traffic.total.sent < given.nbytes + 1000, "what a day's upload counts"
        assert await swarm.recovered() == (STATE, 7)


async def test_one_of_three_keepers_may_be_gone_and_two_may_not() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        swarm.network.kill(swarm.peers[1])
        assert await swarm.recovered() == (STATE, 7)
        swarm.network.kill(swarm.peers[2])
        recovery = swarm.recovery()
        assert await recovery.run(look_for=1.0) is None
        assert recovery.why == "of the state of round 7, 1 of the 2 pieces that are needed are here"


async def test_a_newer_state_takes_the_place_of_the_older_one_once_all_have_it() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        before = swarm.kept()
        await swarm.give(NEWER, 9)
        assert swarm.kept() == before
        assert await swarm.recovered() == (NEWER, 9)


async def test_a_peer_that_dies_while_it_gives_has_its_older_state_still() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        before = swarm.kept()
        with trio.move_on_after(0.2):
            await swarm.give(NEWER, 9)
        assert swarm.kept() == [2 * nbytes for nbytes in before]
        assert await swarm.recovered() == (STATE, 7)


async def test_two_newer_states_that_too_few_were_given_leave_the_older_one() -> None:
    """The first was kept in its place, and the second beside that: none of the three could be had."""
    async with Swarm(terms()) as swarm:
        await swarm.give()
        for round_ in (8, 9):  # whole at this keeper, and nobody says that the others have them
            label = Seals(SIGNERS[0], RUN).label(Label(round_, bytes(16), 0, 3, 2, 3000), 0)
            body = label.to_bytes() + STRIPE.pack(0) + bytes(label.chunk_nbytes + SEAL_NBYTES)
            for keeper in (1, 2, 3):
                assert await swarm.ask(keeper, KEEP, body) == TAKEN
        swarm.network.kill(swarm.peers[3])
        kept = await swarm.ask(1, KEPT, b"")
        rounds = [Label.read(kept[at : at + LABEL_NBYTES]).round for at in range(0, len(kept), LABEL_NBYTES)]
        assert rounds == [7, 9]


async def test_pieces_are_given_to_the_owner_alone() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        (label,) = [await swarm.ask(1, KEPT, b"")]
        assert len(label) == LABEL_NBYTES
        assert await swarm.ask(1, KEPT, label + STRIPE.pack(0))
        assert await swarm.ask(1, KEPT, b"", asker=4) == b""
        assert await swarm.ask(1, KEPT, label + STRIPE.pack(0), asker=4) == b""


async def test_a_stranger_and_other_terms_are_refused() -> None:
    async with Swarm(terms()) as swarm:
        swarm.members.discard(swarm.peers[4])
        assert await swarm.ask(1, KEEP, keep_body(swarm), asker=4) == REFUSED
        assert await swarm.ask(1, KEEP, keep_body(swarm, pieces=4)) == REFUSED
        assert swarm.kept() == [0, 0, 0, 0]
        assert await swarm.ask(1, KEEP, keep_body(swarm)) == TAKEN


async def test_a_keeper_holds_no_more_than_it_promised_whatever_it_is_sent() -> None:
    """10 MB in all: a third of it for one owner, for both of its pieces together."""
    async with Swarm(terms()) as swarm:
        for asker in range(5):
            seals, whole = Seals(SIGNERS[asker], RUN), Label(1, bytes(16), 0, 3, 2, 6_600_000)
            for round_ in range(1, 9):
                label = seals.label(replace(whole, round=round_), 0)
                body = label.to_bytes() + STRIPE.pack(0) + bytes(whole.chunk_nbytes + SEAL_NBYTES)
                if asker != 1:
                    await swarm.ask(1, KEEP, body, asker=asker)
                    assert swarm.keepers[1].nbytes <= 10_000_000
        assert 9_900_000 < swarm.keepers[1].nbytes <= 10_000_000
        assert await swarm.ask(1, KEEP, keep_body(swarm, STATE * 6), asker=0) == FULL


async def test_a_keeper_that_is_full_is_passed_over_and_named_when_too_few_are_left() -> None:
    async with Swarm(terms()) as swarm:
        given = await swarm.giver().give(bytes(8_000_000), 7)
        assert given is not None
        assert "has no room for it" in given.why
        assert given.keepers == ()
        assert swarm.kept() == [0, 0, 0, 0]


async def test_what_is_not_renewed_for_a_day_is_forgotten_and_who_is_no_member_makes_room_before() -> None:
    async with Swarm(terms()) as swarm:
        await swarm.give()
        await trio.sleep(KEPT_FOR - 10)
        swarm.keepers[1].forget_old()
        assert swarm.keepers[1].owners == [swarm.peers[0]]
        await trio.sleep(20)
        swarm.keepers[1].forget_old()
        assert swarm.keepers[1].owners == []
        await swarm.give()
        swarm.members.discard(swarm.peers[0])
        for asker, name in ((1, "x"), (3, "y"), (4, "z")):
            seals, whole = Seals(SIGNERS[asker], RUN), Label(1, bytes(16), 0, 3, 2, 6_600_000)
            body = seals.label(whole, 0).to_bytes() + STRIPE.pack(0) + bytes(whole.chunk_nbytes + SEAL_NBYTES)
            assert await swarm.ask(2, KEEP, body, asker=asker) == TAKEN, name
        assert swarm.peers[0] not in swarm.keepers[2].owners


@pytest.mark.parametrize(
    "hostile",
    [
        b"\0",
        bytes(LABEL_NBYTES),
        b"\xff" * LABEL_NBYTES,
        b"\xff" * 100_000,
        pytest.param("short", id="a chunk too short"),
        pytest.param("long", id="a chunk too long"),
        pytest.param("beyond", id="a stripe that there is not"),
        pytest.param("endless", id="a state of 2**64-1 bytes"),
    ],
)
async def test_a_planted_hostile_message_is_dropped_and_nothing_is_kept_of_it(hostile: bytes | str) -> None:
    async with Swarm(terms()) as swarm:
        good = keep_body(swarm)
        planted = {
            "short": good[:-1],
            "long": good + b"\0",
            "beyond": keep_body(swarm, stripe=1),
            "endless": Label(7, bytes(16), 0, 3, 2, 2**64 - 1).to_bytes() + bytes(4 + 8 + SEAL_NBYTES),
        }
        body = planted[hostile] if isinstance(hostile, str) else hostile
        with pytest.raises(TransportError):
            await swarm.ask(1, KEEP, body)
        if len(body) < LABEL_NBYTES:
            with pytest.raises(TransportError):
                await swarm.ask(1, KEPT, body)
        assert swarm.keepers[1].nbytes == 0
        assert await swarm.ask(1, KEEP, good) == TAKEN


async def test_frames_go_first_and_half_of_the_line_is_left() -> None:
    async with Swarm(terms()) as swarm:
        began = trio.current_time()
        swarm.is_quiet = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.giver().give, STATE, 7)
            await trio.sleep(2.0)
            assert swarm.kept() == [0, 0, 0, 0]
            swarm.is_quiet = True
        assert trio.current_time() - began < 4.0


async def test_nothing_is_given_once_the_days_upload_is_used_up() -> None:
    async with Swarm(terms()) as swarm:
        swarm.may_send = False
        given = await swarm.give()
        assert (given.why, given.keepers, given.nbytes) == ("the day's upload is used up", (), 0)


async def test_too_few_members_are_told_and_sent_nothing() -> None:
    async with Swarm(terms(), count=2) as swarm:
        given = await swarm.give()
        assert given.why == "members that are here beside this one: 1, needed: 2"
        assert swarm.kept() == [0]


async def test_with_as_many_members_as_are_needed_there_is_no_spare_piece_and_it_works() -> None:
    async with Swarm(terms(), count=3) as swarm:
        assert (await swarm.give()).why == ""
        assert await swarm.recovered() == (STATE, 7)


def test_keepers_are_the_next_in_the_ring_and_of_other_machines_where_that_is_known() -> None:
    me, *others = (bytes([n]) * 32 for n in (5, 1, 3, 7, 9))
    far = {peer: (f"/ip4/192.0.2.{number}/tcp/1",) for number, peer in enumerate(others)}
    own = ("/ip4/192.0.2.99/tcp/1", "/ip4/127.0.0.1/tcp/1")
    assert choose_keepers(me, own, far, 3) == [others[2], others[3], others[0]]
    assert choose_keepers(me, own, dict(reversed(far.items())), 3) == [others[2], others[3], others[0]]
    here = {**far, others[2]: ("/ip4/192.0.2.99/tcp/2",)}
    assert choose_keepers(me, own, here, 3) == [others[3], others[0], others[1]]
    assert choose_keepers(me, own, here, 4)[-1] == others[2], "better than nobody"
    unknown = {peer: ("/ip4/127.0.0.1/tcp/1", "/dns4/example/tcp/1", "nonsense") for peer in others}
    assert choose_keepers(me, own, unknown, 2) == [others[2], others[3]]


def test_every_peer_of_a_ring_keeps_for_as_many_as_keep_for_it() -> None:
    peers = sorted(bytes([n]) * 32 for n in (1, 20, 30, 44, 90, 200))
    chosen = [choose_keepers(me, (), {peer: () for peer in peers if peer != me}, 3) for me in peers]
    assert [sum(peer in one for one in chosen) for peer in peers] == [3] * 6


def test_more_pieces_needed_than_there_are_is_a_mistake_in_the_terms() -> None:
    swarm = {"redundancy": {"keepers": 2, "needed": 3}}
    with pytest.raises(ConfigError, match=r"swarm.redundancy: needed = 3 is above keepers = 2"):
        preset_manifest("sparseloco", swarm=swarm)
