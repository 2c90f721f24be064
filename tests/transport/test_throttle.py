"""Caps under virtual time: kept for long, over all streams together, shared fairly, and never in a vote's way."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import anyio
import pytest

from decentral.errors import ConfigError, StreamClosed, TransportError
from decentral.transport.base import Stream
from decentral.transport.memory import WINDOW, MemoryNetwork
from decentral.transport.requests import GRACE, SENDING_STALL, notify, request, serve_requests
from decentral.transport.throttle import LEAST_CAP, Caps, ThrottledTransport
from decentral.wire.keys import Signer

BULK, VOTE, STATES = "/test/bulk", "/test/vote", "/test/states"
CAP = 625_000.0  # bytes/s: 5 Mbit/s
LONG = 20.0  # s

pytestmark = pytest.mark.usefixtures("virtual_time")


class World:
    """Peers of which the first may be capped, and what came at each."""

    def __init__(self, caps: Caps | None, others: int, **network: float) -> None:
        self.network = MemoryNetwork(latency=0.02, **network)
        self.a = ThrottledTransport(self.network.transport(Signer.generate()), caps, urgent=(VOTE,), timely=(STATES,))
        self.others = [self.network.transport(Signer.generate()) for _ in range(others)]
        self.came: list[tuple[float, str, int]] = []
        for transport in (self.a, *self.others):
            for protocol in (BULK, VOTE, STATES):
                serve_requests(transport, protocol, self._keeper(protocol), limit=1 << 30)

    def _keeper(self, protocol: str):
        async def keep(peer: bytes, body: bytes) -> bytes:
            self.came.append((anyio.current_time(), protocol, len(body)))
            return b""

        return keep

    async def __aenter__(self) -> World:
        self.exits = AsyncExitStack()
        for transport in (self.a, *self.others):
            await self.exits.enter_async_context(transport)
        self.group = await self.exits.enter_async_context(anyio.create_task_group())
        self.exits.callback(self.group.cancel_scope.cancel)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.exits.aclose()

    def push_for_ever(self, sender, receiver, nbytes: int, protocol: str = BULK) -> None:
        async def push() -> None:
            while True:
                await request(sender, receiver.peer, protocol, bytes(nbytes), limit=10, timeout=100.0)

        self.group.start_soon(push)


async def test_a_micro_batch_does_not_wait_behind_frames_and_frames_go_on():
    """200 kB each second beside frames for five others, on a line of 5 Mbit/s, which takes 0.32 s for it."""
    world, took = World(Caps(up=CAP), 6, bandwidth=4e6), list[float]()
    async with world:
        for other in world.others[1:]:
            world.push_for_ever(world.a, other, 50_000_000)
        await anyio.sleep(5)
        for _ in range(10):
            began = anyio.current_time()
            await request(world.a, world.others[0].peer, STATES, bytes(200_000), limit=10, timeout=100.0)
            took.append(anyio.current_time() - began)
            await anyio.sleep_until(began + 1.0)
        sent = [world.a.traffic.of(other.peer).sent for other in world.others[1:]]
    assert max(took[1:]) < 1.0
    assert sorted(took)[5] < 0.75, "where six share the line it is 1.9"
    assert sum(sent) >= 0.5 * CAP * 15


@pytest.mark.parametrize(
    ("caps", "others"), [(Caps(up=CAP), 1), (Caps(up=CAP), 5), (Caps(down=CAP), 5), (Caps(up=CAP, down=2 * CAP), 2)]
)
async def test_caps_hold_for_long_each_by_itself_and_over_all_streams_together(caps, others):
    world = World(caps, others, bandwidth=4e6)
    async with world:
        for other in world.others:
            for sender, receiver, cap in ((world.a, other, caps.up), (other, world.a, caps.down)):
                if cap is not None:
                    world.push_for_ever(sender, receiver, 3_000_000)
                    world.push_for_ever(sender, receiver, 40_000)
        await anyio.sleep(5)
        before, sent = world.a.traffic.total, sum(other.traffic.total.sent for other in world.others)
        sent_before, received_before = before.sent, before.received
        await anyio.sleep(LONG)
        if caps.up is not None:
            assert world.a.traffic.total.sent - sent_before == pytest.approx(caps.up * LONG, rel=0.05)
        if caps.down is not None:
            assert world.a.traffic.total.received - received_before == pytest.approx(caps.down * LONG, rel=0.05)
            sent = sum(other.traffic.total.sent for other in world.others) - sent
            assert sent <= caps.down * LONG + 2 * others * WINDOW, "they were made to wait: nothing piles up here"


@pytest.mark.parametrize(("before", "after"), [(CAP, 4 * CAP), (4 * CAP, CAP), (None, CAP), (CAP, None)])
async def test_a_cap_that_is_changed_holds_from_then_on_for_those_who_wait_already(before, after):
    world = World(Caps(up=before), 2, bandwidth=4e6)
    async with world:
        for other in world.others:
            world.push_for_ever(world.a, other, 3_000_000)
        await anyio.sleep(5)
        await world.a.cap(Caps(up=after))
        await anyio.sleep(2)
        sent = world.a.traffic.total.sent
        await anyio.sleep(LONG)
        rate = (world.a.traffic.total.sent - sent) / LONG
        if after is None:
            assert rate > 2 * CAP, "nobody waits at a cap that was lifted"
        else:
            assert rate == pytest.approx(after, rel=0.05)


async def vote_takes(caps: Caps | None, *, reads: bool = False) -> float:
    """Seconds that a vote needs beside pushes of the first peer over a link of 6 Mbit/s, or of those that it reads."""
    world, took = World(caps, 3) if reads else World(caps, 3, bandwidth=750_000), []
    async with world:
        ways = [(other, world.a) if reads else (world.a, other) for other in world.others]
        for sender, receiver in ways:
            world.push_for_ever(sender, receiver, 3_000_000)
        await anyio.sleep(8)
        for sender, receiver in ways:
            began = anyio.current_time()
            await notify(sender, receiver.peer, VOTE, bytes(1000), timeout=10.0)
            while not any(protocol == VOTE and at >= began for at, protocol, _ in world.came):
                await anyio.sleep(0.001)
            took.append(anyio.current_time() - began)
    return max(took)


async def test_a_vote_passes_a_saturated_link_within_a_fraction_of_a_second_whichever_way():
    assert await vote_takes(Caps(up=CAP)) < 0.2
    assert await vote_takes(Caps(down=CAP), reads=True) < 0.2
    assert await vote_takes(None) > 1.0, "without a cap below the link's rate it waits behind what the network holds"


async def test_peers_share_a_cap_fairly_while_their_load_changes():
    world = World(Caps(up=CAP), 3)
    async with world:
        for loaded, other in enumerate(world.others, start=1):
            for _ in range(8 if loaded == 1 else 1):
                world.push_for_ever(world.a, other, 3_000_000)
            await anyio.sleep(5)
            before = [world.a.traffic.of(one.peer).sent for one in world.others]
            await anyio.sleep(12)
            shares = [
                (world.a.traffic.of(one.peer).sent - was) / (CAP * 12)
                for one, was in zip(world.others, before, strict=True)
            ]
            assert shares == pytest.approx([1 / loaded] * loaded + [0] * (3 - loaded), abs=0.05)


@pytest.mark.parametrize(
    ("directions", "others", "nbytes", "first_after"),
    [
        pytest.param(("up", "down"), 1, 3_000_000, 2 * GRACE, id="a slow body each way is cut by nobody"),
        # 2.7 kB/s each, less than the least rate; what they send fits into the network's buffers
        pytest.param(("down",), 12, 200_000, 2 * GRACE, id="bodies that creep are all read to their end"),
        pytest.param(("up",), 12, 200_000, 0.0, id="pushes wait before the other side counts their time"),
    ],
)
async def test_what_our_own_cap_makes_slow_arrives_and_takes_no_longer(directions, others, nbytes, first_after):
    world = World(Caps(**dict.fromkeys(directions, float(LEAST_CAP))), others)
    async with world:
        for other in world.others:
            if "up" in directions:
                world.group.start_soon(notify, world.a, other.peer, BULK, bytes(nbytes), 10.0)
            if "down" in directions:
                world.group.start_soon(notify, other, world.a.peer, BULK, bytes(nbytes), 10.0)
        await anyio.sleep(1.05 * others * nbytes / LEAST_CAP)
    assert [length for _, _, length in world.came] == [nbytes] * (len(directions) * others)
    assert world.came[0][0] > first_after
    assert world.came[-1][0] > 0.95 * others * nbytes / LEAST_CAP


async def test_pushes_to_peers_that_read_slowly_do_not_keep_others_from_an_unused_cap():
    world = World(Caps(up=float(LEAST_CAP)), 2)
    slow, quick = world.others
    world.network.set_link(world.a.peer, slow.peer, latency=0.02, bandwidth=5000)
    async with world:
        world.group.start_soon(notify, world.a, slow.peer, BULK, bytes(3_000_000), 10.0)
        await anyio.sleep(100)  # a window is full, and the rest goes at 5 kB/s
        began = anyio.current_time()
        await notify(world.a, quick.peer, BULK, bytes(100_000), timeout=10.0)
        assert anyio.current_time() - began < 20


async def test_a_path_that_is_dead_is_still_cut_under_a_cap():
    world = World(Caps(up=CAP, down=CAP), 1)
    deaf = world.network.transport(Signer.generate())

    async def sleep(stream: Stream) -> None:
        await anyio.sleep_forever()

    deaf.serve(BULK, sleep)
    async with world, deaf:
        began = anyio.current_time()
        with pytest.raises(StreamClosed, match="stood still"):
            await notify(world.a, deaf.peer, BULK, bytes(4_000_000), timeout=10.0)
        assert anyio.current_time() - began < 1_200_000 / CAP + SENDING_STALL + 1


async def test_a_cancelled_push_gives_its_turn_back():
    world = World(Caps(up=CAP), 2)
    one, two = world.others
    async with world:
        for _ in range(20):
            with anyio.move_on_after(0.33):
                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(notify, world.a, one.peer, BULK, bytes(1_000_000), 10.0)
        began = anyio.current_time()
        await notify(world.a, two.peer, BULK, bytes(625_000), timeout=10.0)
        assert anyio.current_time() - began == pytest.approx(1.0, abs=0.2)
        assert not world.a.up._waiting


async def test_bulk_that_may_not_be_uploaded_is_refused_and_votes_and_questions_are_not():
    world = World(None, 1)
    world.a.may_upload = lambda: False
    other = world.others[0]
    async with world:
        with pytest.raises(TransportError, match="used up"):
            await notify(world.a, other.peer, BULK, bytes(100_000), timeout=10.0)
        await notify(world.a, other.peer, VOTE, bytes(100_000), timeout=10.0)
        await request(world.a, other.peer, BULK, bytes(100), limit=10, timeout=10.0)
    assert Counter(protocol for _, protocol, _ in world.came) == {VOTE: 1, BULK: 1}


@pytest.mark.parametrize("caps", [None, Caps(up=400_000.0)], ids=["the link's", "the cap"])
async def test_the_uplink_is_measured_from_the_pushes_that_are_made(caps):
    world = World(caps, 3, bandwidth=800_000)
    world.network.set_downlink(world.others[0].peer, 100_000)  # a slow receiver is no slow uplink
    async with world:
        assert world.a.uplink is None
        async with anyio.create_task_group() as group:
            for other in world.others:
                group.start_soon(notify, world.a, other.peer, BULK, bytes(12_000_000), 10.0)
        assert world.a.uplink == pytest.approx(800_000 if caps is None else 400_000, rel=0.05)


async def test_the_same_calls_give_the_same_times_again():
    async def times() -> list[float]:
        world = World(Caps(up=CAP, down=CAP), 3)
        async with world:
            for other in world.others:
                world.push_for_ever(world.a, other, 700_000)
                world.push_for_ever(other, world.a, 300_000)
            await anyio.sleep(8)
        return sorted(at for at, _, _ in world.came)

    first, again = await times(), await times()
    assert len(first) > 10
    assert [at - first[0] for at in first] == pytest.approx([at - again[0] for at in again], abs=1e-6)


@pytest.mark.parametrize("rate", [0.0, -1.0, 100.0, float("nan")])
def test_a_cap_that_would_make_this_peer_look_dead_is_refused(rate):
    with pytest.raises(ConfigError, match="take this one for dead"):
        Caps(up=rate)
    with pytest.raises(ConfigError, match="leave it out for no cap"):
        Caps(down=rate)


async def test_a_transport_without_caps_keeps_one_meter_and_lets_all_push_at_once():
    plain = MemoryNetwork().transport(Signer.generate())
    capped = ThrottledTransport(plain, Caps(up=LEAST_CAP), urgent=(VOTE,))
    assert plain.meter is plain.meter
    assert capped.meter is not plain.meter
    began = anyio.current_time()
    async with plain.pushing(BULK), plain.pushing(BULK):
        assert anyio.current_time() == began


@pytest.mark.parametrize("caps", [None, Caps(up=CAP, down=CAP)])
async def test_bytes_are_counted_by_kind_of_message_as_the_transport_counts_them(caps: Caps | None) -> None:
    async with World(caps, others=1) as world:
        await request(world.a, world.others[0].peer, BULK, bytes(100_000), limit=10, timeout=100.0)
        await request(world.others[0], world.a.peer, VOTE, bytes(300), limit=10, timeout=100.0)
        bulk, vote = (world.a.traffic.kinds[protocol] for protocol in (BULK, VOTE))
        total = world.a.traffic.total
        assert bulk.sent >= 100_000 > bulk.received
        assert vote.received >= 300 > vote.sent
        assert (bulk.sent + vote.sent, bulk.received + vote.received) == (total.sent, total.received)
