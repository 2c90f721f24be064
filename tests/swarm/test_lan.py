"""A peer's place on its networks, on air that the tests make themselves, in virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import pairwise

import anyio
import pytest

from decentral.swarm.announcement import Sighting, read_announcement, write_announcement
from decentral.swarm.lan import AT_ONCE, FIRST_PAUSE, FORGOTTEN, LONGEST_PAUSE, MOST, Lan, Neighbours
from decentral.wire.keys import Signer, peer_name
from tests.kit.scenes import without_waiting

RUN = b"r" * 32
ME, OTHER = Signer(bytes(32)).peer, Signer(bytes([1]) * 32).peer
HOME, AWAY = (f"/ip4/{host}/tcp/4001/p2p/{peer_name(ME)}" for host in ("192.168.1.20", "10.0.0.7"))
THERE = f"/ip4/192.168.1.21/tcp/4001/p2p/{peer_name(OTHER)}"


class Somebody:
    """As much of a directory and of its transport as a Lan asks."""

    def __init__(self, *addresses: str) -> None:
        self.peer, self.run_digest, self.transport = ME, RUN, self
        self.now_at = addresses
        self.here: set[bytes] = set()
        self.looked: list[tuple[bytes, tuple[str, ...]]] = []

    def addresses(self):
        return self.now_at

    def live(self):
        return self.here

    def look_for(self, peer, addresses):
        self.looked.append((peer, addresses))


class Air:
    """Takes the place of multicast DNS; ``trouble`` is raised by whoever goes on air."""

    def __init__(self) -> None:
        self.trouble: list[BaseException] = []
        self.went: list[tuple[list[str], bytes | None, int]] = []
        self.ended = 0
        self.hear = None

    @asynccontextmanager
    async def __call__(self, hosts, text, port, hear):
        self.went.append((list(hosts), text, port))
        if self.trouble:
            raise self.trouble.pop(0)
        self.hear = hear
        try:
            yield
        finally:
            self.ended += 1


@pytest.fixture
def play():
    def run(script, somebody, **given):
        air, events = Air(), []

        async def main():
            lan = Lan(lambda event, fields: events.append((event, fields)), on_air=air, **given)
            async with anyio.create_task_group() as group:
                group.start_soon(lan.run, somebody)
                await script(air)
                group.cancel_scope.cancel()

        without_waiting(main)
        return air, events

    return run


def test_a_peer_announces_its_private_addresses_and_looks_where_others_say_that_they_are(play):
    somebody = Somebody(HOME, "/ip4/45.67.0.1/tcp/1/p2p/x")

    async def script(air):
        await anyio.sleep(1)
        air.hear(write_announcement(RUN, OTHER, [THERE]))
        await anyio.sleep(0.6)  # the second look would be 1 s after the first
        somebody.here.add(OTHER)
        await anyio.sleep(100)

    air, events = play(script, somebody)
    ((hosts, text, port),) = air.went
    assert (hosts, port) == (["192.168.1.20"], 4001)
    assert read_announcement(text, RUN) == Sighting(ME, (HOME,))
    assert somebody.looked == [(OTHER, (THERE,))]
    assert events == [("lan", {"on": ["192.168.1.20"]}), ("lan_met", {"peer": peer_name(OTHER)})]
    assert air.ended == 1


def test_a_first_call_asks_and_announces_nothing(play):
    async def script(air):
        await anyio.sleep(1)

    air, _ = play(script, Somebody(HOME), announce=False)
    assert [text for _, text, _ in air.went] == [None]


def test_a_peer_that_listens_on_no_private_network_stays_off_the_air(play):
    async def script(air):
        await anyio.sleep(1000)

    air, events = play(script, Somebody(f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(ME)}"))
    assert air.went == []
    assert events == [("lan", {"off": "this peer listens on no private network"})]


def test_whatever_the_library_raises_is_one_event_and_is_tried_again(play):
    async def script(air):
        air.trouble += [OSError("no buffer"), OSError("no buffer"), ZeroDivisionError(), AssertionError("a bug")]
        await anyio.sleep(1000)

    air, events = play(script, Somebody(HOME))
    words = ["no buffer", "ZeroDivisionError", "a bug"]
    assert events == [*(("lan", {"off": word}) for word in words), ("lan", {"on": ["192.168.1.20"]})]
    assert len(air.went) == 5


def test_a_machine_that_moves_to_another_network_is_announced_there(play):
    somebody = Somebody(HOME)

    async def script(air):
        await anyio.sleep(20)
        somebody.now_at = (AWAY,)
        await anyio.sleep(20)

    air, events = play(script, somebody)
    assert [hosts for hosts, _, _ in air.went] == [["192.168.1.20"], ["10.0.0.7"]]
    assert events[-1] == ("lan", {"on": ["10.0.0.7"]})


def test_hostile_records_are_passed_over_and_a_flood_of_them_is_bounded(play):
    somebody = Somebody(HOME)

    async def script(air):
        await anyio.sleep(1)
        for text in (
            b"",
            b"\xff",
            bytes(5000),
            write_announcement(RUN, ME, [HOME]),
            write_announcement(bytes(32), OTHER, [THERE]),
        ):
            air.hear(text)
        await anyio.sleep(1)
        assert somebody.looked == []
        for number in range(1000):
            peer = Signer(number.to_bytes(32, "big")).peer
            air.hear(write_announcement(RUN, peer, [f"/ip4/10.0.0.1/tcp/1/p2p/{peer_name(peer)}"]))
        await anyio.sleep(0.9)  # four looks at most

    play(script, somebody)
    assert 0 < len(somebody.looked) <= 32


# ---- test neighbours ----
#
# When a neighbour is worth a look, by the clock.

ADDRESSES = ("/ip4/10.0.0.1/tcp/1/p2p/x",)


def peer(number):
    return number.to_bytes(32, "big")


def sighting(number=1, addresses=ADDRESSES):
    return Sighting(peer(number), addresses)


def looks(neighbours, seconds, here=()):
    """The times of all looks, looking ten times a second."""
    return [n / 10 for n in range(10 * seconds) for _ in neighbours.due(n / 10, here)]


def test_a_neighbour_is_looked_for_at_once_and_then_less_and_less_often():
    neighbours = Neighbours(ME)
    neighbours.heard(sighting(), 0.0)
    times = looks(neighbours, 600)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert [round(gap) for gap in gaps[:7]] == [1, 2, 4, 8, 16, 32, 60]
    assert max(gaps) < LONGEST_PAUSE + 0.2


def test_who_is_here_is_not_looked_for_and_soon_again_when_it_is_gone():
    neighbours = Neighbours(ME)
    neighbours.heard(sighting(), 0.0)
    assert len(neighbours.due(0.0, ())) == 1
    assert neighbours.due(100.0, {peer(1)}) == []
    assert neighbours.met({peer(1)}) == [peer(1)]
    assert neighbours.met({peer(1)}) == [], "named once"
    assert len(neighbours.due(100.0, ())) == 1


def test_new_addresses_are_tried_soon_and_old_ones_no_more():
    neighbours = Neighbours(ME)
    neighbours.heard(sighting(), 0.0)
    looks(neighbours, 60)
    neighbours.heard(sighting(addresses=("new",)), 60.0)
    assert neighbours.due(60.0 + FIRST_PAUSE, ()) == [(peer(1), ("new",))]


def test_addresses_that_change_all_the_time_cause_a_look_a_second_at_most():
    neighbours, count = Neighbours(ME), 0
    for n in range(1000):  # ten seconds
        neighbours.heard(sighting(addresses=(str(n),)), n / 100)
        count += len(neighbours.due(n / 100, ()))
    assert count <= 11


def test_a_flood_of_names_is_bounded_in_memory_and_in_looks_and_the_newest_stay():
    neighbours = Neighbours(ME)
    for number in range(10_000):
        neighbours.heard(sighting(number), 0.0)
    assert len(neighbours) == MOST
    looked = [neighbours.due(0.0, ()) for _ in range(MOST)]
    assert [len(some) for some in looked[:5]] == [AT_ONCE] * 4 + [0]
    assert {peer for some in looked for peer, _ in some} == {peer(n) for n in range(10_000 - MOST, 10_000)}


def test_who_is_not_heard_of_is_forgotten():
    neighbours = Neighbours(ME)
    neighbours.heard(sighting(1), 0.0)
    neighbours.heard(sighting(2), FORGOTTEN)
    assert [found for found, _ in neighbours.due(FORGOTTEN + 1.0, ())] == [peer(2)]
    assert len(neighbours) == 1
