"""What went through a relay, from looks at the connections now and then."""

from __future__ import annotations

from types import SimpleNamespace

import anyio

from decentral.transport.base import Traffic
from decentral.transport.paths import LOOK_EVERY, Paths

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


class Connected:
    """A transport that has exchanged something with one peer, and counts how often its connections are asked for."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self.traffic.add(ALICE, sent=1)
        self.looks = 0

    async def paths(self):
        self.looks += 1
        return {ALICE: (DIRECT,)} if self.looks > 1 else {}  # nobody is there yet at the first look


def test_a_way_that_is_wanted_is_looked_at_before_it_is_time_again():
    async def ask() -> tuple[float, bool]:
        paths, began = Paths(Connected()), anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(paths.watch)
            await anyio.wait_all_tasks_blocked()
            assert paths.get(ALICE) is None
            paths.look_soon()
            await anyio.wait_all_tasks_blocked()
            found = paths.get(ALICE)
            group.cancel_scope.cancel()
        return anyio.current_time() - began, found is not None

    seconds, found = anyio.run(ask)
    assert found
    assert seconds < LOOK_EVERY
