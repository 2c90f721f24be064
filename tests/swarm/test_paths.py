"""What went through a relay, from looks at the connections now and then."""

from __future__ import annotations

from types import SimpleNamespace

from decentral.swarm.paths import Paths
from decentral.transport.base import Traffic

ALICE, BOB = b"a" * 32, b"b" * 32
RELAYED, DIRECT = "/ip4/45.67.0.1/tcp/1/p2p/X/p2p-circuit", "/ip4/45.67.0.2/tcp/1"


def watched():
    traffic = Traffic()
    return traffic, Paths(SimpleNamespace(traffic=traffic))


def test_what_is_exchanged_is_booked_on_the_way_there_is():
    traffic, paths = watched()
    traffic.add(ALICE, sent=300)
    paths.look({ALICE: (RELAYED,)})
    traffic.add(ALICE, received=100)
    paths.look({ALICE: (RELAYED, DIRECT)})
    path = paths.get(ALICE)
    assert (path.direct, path.relayed_share) == (True, 0.75)
    traffic.add(ALICE, sent=200)
    paths.look({ALICE: (RELAYED,)})
    assert not path.direct
    assert path.relayed_share == 500 / 600


def test_peers_with_whom_nothing_was_exchanged_are_not_remembered():
    _, paths = watched()
    paths.look({BOB: (DIRECT,)})
    assert paths.get(BOB) is None
