"""Whether this machine can be dialled, as others say: the verdict by cases, the dial-back between real transports."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest

from decentral.errors import TransportError
from decentral.transport.base import Traffic
from decentral.transport.memory import MemoryNetwork
from decentral.transport.paths import (
    ANSWERED,
    DIALBACK,
    LOOK_EVERY,
    NOT_TRIED,
    SILENT,
    SPEED,
    SPEED_NBYTES,
    Paths,
    SpeedTest,
    ask_dialback,
    measure_speed,
    serve_dialback,
    serve_speed,
)
from decentral.transport.reachability import Reachability, View, probe, relays_among, verdict
from decentral.transport.requests import request
from decentral.wire.keys import Signer, peer_name
from tests.kit.relays import LOOPBACK, connected, native, until, visible

PEER = Signer(bytes(32)).peer
OWN, OUTSIDE = "10.0.0.7", "/ip4/45.67.0.9/tcp/4001"


def view(seen=OUTSIDE, local_port=4001, answered=False):
    return View(PEER, seen, local_port, answered, 0.0)


@pytest.mark.parametrize(
    ("views", "own", "kind"),
    [
        pytest.param([view(answered=True)], {OWN}, "public", id="somebody outside got through"),
        pytest.param([view(), view(answered=True)], {OWN}, "public", id="one of two got through"),
        pytest.param([view()], {OWN}, "nat", id="the port that it left from is seen"),
        pytest.param([view(), view(local_port=7)], {OWN}, "symmetric nat", id="another port is seen"),
        pytest.param([view()], {OWN, "45.67.0.9"}, "firewall", id="its own address is seen, and nobody gets in"),
        pytest.param([view(seen="/ip4/10.0.0.7/tcp/9", answered=True)], {OWN}, "local", id="its own network gets in"),
        pytest.param([view(answered=None)], {OWN}, "unknown", id="nobody tried"),
        pytest.param([], {OWN}, "unknown", id="nobody was asked"),
        pytest.param([], {OWN, "45.67.0.9"}, "public", id="nobody was asked, and an interface is public"),
        pytest.param([], {OWN, "2a00::1"}, "public", id="or one of IPv6"),
        pytest.param([view(seen="")], {OWN}, "unknown", id="the connection is relayed"),
        pytest.param([view(seen="nonsense")], {OWN}, "unknown", id="an answer makes no sense"),
    ],
)
def test_the_verdict_follows_from_what_others_see(views, own, kind):
    assert verdict(views, own) == kind


def test_only_what_is_known_for_sure_makes_a_role():
    kinds = ("public", "nat", "symmetric nat", "firewall", "local", "unknown")
    roles = [Reachability(kind, ()).role for kind in kinds]
    assert roles == ["public", "private", "private", "private", None, None]


def test_relays_come_before_public_peers_and_each_is_named_once():
    a, b, c = (peer_name(Signer(bytes([n]) * 32).peer) for n in range(3))
    through = f"/ip4/45.67.0.1/tcp/4001/p2p/{a}"
    direct = f"/ip4/45.67.0.2/tcp/4001/p2p/{b}"
    given = [direct, f"/ip6/2a00::1/tcp/1/p2p/{b}", f"{through}/p2p-circuit/p2p/{c}", f"{through}/p2p-circuit"]
    assert relays_among(given) == (through, direct)


@pytest.fixture(params=["native", "daemon"])
def other(request, daemons):
    """A transport that dials back, of each kind."""
    transport = visible(request.param, daemons)
    serve_dialback(transport, clock=lambda: 1000.5)
    return transport


async def test_who_listens_is_dialled_back_and_told_where_it_was_seen(other):
    async with other:
        found = await probe(LOOPBACK, other.addresses(), clock=lambda: 1000.0)
    (seen,) = found.views
    assert found.kind == "local"
    assert found.listen[0] != LOOPBACK[0]
    assert (seen.answered, seen.skew) == (True, 0.5)
    assert seen.seen == f"/ip4/127.0.0.1/tcp/{seen.local_port}"


async def test_a_port_where_nobody_or_another_one_listens_is_told_as_silent(other):
    me, stranger = (native() for _ in range(2))
    async with connected(me, other), stranger:
        taken = int(stranger.links.bound[0].rpartition("/")[2])
        assert (await ask_dialback(me, other.peer, taken)).outcome == SILENT
        assert (await ask_dialback(me, other.peer, 0)).outcome == NOT_TRIED
        mine = int(me.links.bound[0].rpartition("/")[2])
        assert (await ask_dialback(me, other.peer, mine)).outcome == ANSWERED


async def test_one_peer_is_dialled_once_at_a_time(other):
    me = native()
    outcomes = []

    async def ask(port):
        outcomes.append((await ask_dialback(me, other.peer, port)).outcome)

    async with connected(me, other), await anyio.create_tcp_listener(local_host="127.0.0.1") as deaf:
        port = deaf.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask, port)
    assert sorted(outcomes) == [SILENT, NOT_TRIED, NOT_TRIED]


async def test_a_question_that_is_none_gets_no_answer():
    network = MemoryNetwork()
    a, b = network.transport(Signer.generate()), network.transport(Signer.generate())
    serve_dialback(b)
    async with a, b:
        for body in (b"", b"\0", b"\0\0\0"):
            with pytest.raises(TransportError):
                await request(a, b.peer, DIALBACK, body, limit=128, timeout=5)
        assert (await ask_dialback(a, b.peer, 9)).outcome == NOT_TRIED, "it knows no address of ours"


async def test_nobody_to_ask_takes_no_time():
    found = await probe(LOOPBACK, [f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(PEER)}"], clock=lambda: 0.0)
    assert found.kind == "unknown"
    assert found.views == ()


async def test_the_speed_of_a_path_is_measured_for_one_peer_at_a_time(other):
    serve_speed(other)
    first, second = (native() for _ in range(2))
    async with other, first, second:
        for transport in (first, second):
            await transport.connect(other.peer, other.addresses())
        slow = await second.open(other.peer, SPEED)
        await slow.receive_exactly(1)
        with pytest.raises(TransportError):
            await measure_speed(first, other.peer)
        await slow.aclose()
        while True:
            try:
                found = await measure_speed(first, other.peer)
                break
            except TransportError:
                await anyio.sleep(0.05)
        assert min(found.up, found.down) > 1e6


async def test_a_measurement_is_over_when_the_peer_is_free_for_the_next_one():
    network = MemoryNetwork()
    answering, asking = network.transport(Signer.generate()), network.transport(Signer.generate())
    test, free = SpeedTest(), []

    async def slow_to_end(stream):
        await test.echo(stream)
        await anyio.sleep(0.1)
        free.append(True)

    answering.serve(SPEED, slow_to_end)
    async with answering, asking:
        await measure_speed(asking, answering.peer)
        assert free


async def test_what_a_speed_test_costs_is_counted_apart_and_is_bounded(other, monkeypatch):
    monkeypatch.setattr("decentral.transport.paths.SPEEDS_A_DAY", 2)
    test = serve_speed(other)
    asking = native()
    async with connected(asking, other):
        for asked in (1, 2):
            await measure_speed(asking, other.peer)
            assert test.count.sent == asked * (SPEED_NBYTES + 2)
        await until(lambda: test.count.received >= 2 * (SPEED_NBYTES + 2))  # its last byte may still be on its way
        assert other.traffic.total.sent >= test.count.sent
        with pytest.raises(TransportError):
            await measure_speed(asking, other.peer)
        assert test.count.sent == 2 * (SPEED_NBYTES + 2)


# ---- paths: what went through a relay, from looks at the connections now and then ----


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
