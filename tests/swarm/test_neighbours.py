"""When a neighbour is worth a look, by the clock."""

from __future__ import annotations

from itertools import pairwise

from decentral.swarm.announcement import Sighting
from decentral.swarm.lan import AT_ONCE, FIRST_PAUSE, FORGOTTEN, LONGEST_PAUSE, MOST, Neighbours

ME = b"m" * 32
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


def test_this_peer_itself_is_no_neighbour():
    neighbours = Neighbours(ME)
    neighbours.heard(Sighting(ME, ADDRESSES), 0.0)
    assert len(neighbours) == 0


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
