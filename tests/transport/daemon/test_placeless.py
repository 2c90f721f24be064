"""When a daemon that lost its place at a relay is started again."""

from __future__ import annotations

from decentral.transport.daemon.supervisor import Placeless

PLACE = ("/ip4/10.0.0.1/tcp/1", "/ip4/45.67.0.1/tcp/4001/p2p/12D3KooWX/p2p-circuit")
NONE = PLACE[:1]


def test_without_a_place_it_is_worth_it_after_a_while_and_later_each_time():
    placeless, restarts = Placeless(0.0), []
    for now in range(0, 3000):
        if placeless.look(NONE, now):
            restarts.append(now)
            placeless.note_restart(now)
    gaps = [b - a for a, b in zip([0, *restarts], restarts, strict=False)]
    assert gaps == [20, 40, 80, 160, 320, 640, 640, 640]


def test_a_place_ends_the_count_and_the_doubling():
    placeless = Placeless(0.0)
    assert placeless.look(NONE, 25.0)
    placeless.note_restart(25.0)
    assert not placeless.look(PLACE, 64.0)
    assert not placeless.look(NONE, 83.9)
    assert placeless.look(NONE, 84.0)
