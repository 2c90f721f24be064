"""The network in memory: deaths, cuts, delay and rate, and letters that are as streams in all of it."""

from __future__ import annotations

import itertools
import random

import anyio
import pytest

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.transport.memory import MemoryNetwork, Weight
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Signer
from tests.kit.relays import ECHO, echo

SLOW = "/test/slow"


async def slow(peer, body):
    await anyio.sleep(1.0)
    return body


def play(script, letters, **options):
    """What a script of two peers returns."""
    network = MemoryNetwork(latency=0.1, letters=letters, **options)
    a, b = (network.transport(Signer(bytes([number]) * 32)) for number in range(2))
    serve_requests(b, ECHO, echo, limit=1000)
    serve_requests(b, SLOW, slow, limit=1000)

    async def main():
        async with a, b:
            return await script(network, a, b)

    return run_in_virtual_time(main, 0)


async def one(network, a, b):
    answer = await request(a, b.peer, ECHO, b"x" * 100, limit=100, timeout=9)
    return answer, anyio.current_time(), a.traffic.total, b.traffic.total


async def many_at_once(network, a, b):
    ends = []

    async def ask(number):
        await request(a, b.peer, SLOW, bytes(number), limit=1000, timeout=9)
        ends.append((number, round(anyio.current_time(), 9)))

    async with anyio.create_task_group() as group:
        for number in range(0, 900, 100):
            group.start_soon(ask, number)
    return sorted(ends), a.traffic.total


async def without_an_answer(network, a, b):
    await notify(a, b.peer, ECHO, b"12345", 9.0)
    sent = anyio.current_time()
    await anyio.sleep(1.0)
    handled = []
    await notify(a, b.peer, SLOW, b"", 9.0, on_handled=lambda: handled.append(anyio.current_time()))
    return sent, handled


async def after(seconds, ends):
    await anyio.sleep(seconds)
    ends()


async def cut_on_the_way(network, a, b):
    async with anyio.create_task_group() as group:
        group.start_soon(after, 0.25, lambda: network.cut(a.peer, b.peer))
        with pytest.raises(StreamClosed):
            await request(a, b.peer, SLOW, b"?", limit=9, timeout=9)
    with pytest.raises(PeerUnreachable):
        await request(a, b.peer, SLOW, b"?", limit=9, timeout=9)
    return anyio.current_time()


async def killed_while_it_answers(network, a, b):
    async with anyio.create_task_group() as group:
        group.start_soon(after, 0.8, lambda: network.kill(b.peer))
        with pytest.raises(StreamClosed):
            await request(a, b.peer, SLOW, b"?", limit=9, timeout=9)
    return anyio.current_time()


async def too_late(network, a, b):
    with pytest.raises(PeerUnreachable, match=r"within 0\.5 s"):
        await request(a, b.peer, SLOW, b"?", limit=9, timeout=0.5)
    return anyio.current_time()


async def too_long(network, a, b):
    with pytest.raises(PayloadError, match="at most 3"):
        await request(a, b.peer, ECHO, b"1234", limit=3, timeout=9)
    with pytest.raises(StreamClosed):
        await request(a, b.peer, ECHO, bytes(1001), limit=2000, timeout=9)
    return round(anyio.current_time(), 9)


async def nobody_serves_it(network, a, b):
    with pytest.raises(PeerUnreachable, match="does not serve"):
        await request(b, a.peer, ECHO, b"?", limit=9, timeout=9)
    return anyio.current_time()


FAILING = [cut_on_the_way, killed_while_it_answers, too_late, too_long, nobody_serves_it]
SCRIPTS = [one, many_at_once, without_an_answer, *FAILING]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("options", [{}, {"bandwidth": 2000.0, "downlink": 1500.0}], ids=["free", "narrow"])
def test_a_letter_takes_as_long_as_a_stream_and_ends_as_it_does(script, options):
    assert play(script, True, **options) == play(script, False, **options)


def test_a_letter_of_few_bytes_that_stand_for_many_takes_their_time():
    weights = {ECHO: Weight(10.0, 4)}
    took = [play(one, letters, bandwidth=1000.0, weights=weights)[1] for letters in (True, False)]
    assert took[0] == pytest.approx(took[1]) == pytest.approx(0.4 + 2 * 1.004)


def test_what_is_no_piece_goes_on_a_stream():
    network = MemoryNetwork(letters=True, weights={SLOW: Weight(1000.0)}, long=(ECHO,))
    letters = network.transport(Signer(bytes(32))).letters
    assert letters.carry("/test/other", 60_000)
    assert not letters.carry("/test/other", 70_000)
    assert not letters.carry(SLOW, 70)
    assert not letters.carry(ECHO, 1)


BULK = "/test/bulk"


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("letters", [True, False])
def test_what_is_urgent_does_not_wait_for_the_first_pieces_of_bulk_on_a_thin_line(letters, seed):
    """Three pieces of 64 KiB before the plan of a reduce kept every other peer of it from beginning, for 1.6 s."""
    network = MemoryNetwork(latency=0.1, letters=letters, bandwidth=125_000.0, weights={BULK: Weight(100.0)})
    a, b = (network.transport(Signer(bytes([number]) * 32)) for number in range(2))
    asked = []

    async def take(stream):
        await stream.receive_exactly(10_000)

    async def send():
        stream = await a.open(b.peer, BULK)
        await stream.send(bytes(10_000))  # that stand for a megabyte

    async def ask():
        await request(a, b.peer, ECHO, b"plan", limit=100, timeout=9)
        asked.append(anyio.current_time())

    async def main():
        serve_requests(b, ECHO, echo, limit=1000)
        b.serve(BULK, take)
        async with a, b:
            with anyio.move_on_after(5.0):
                async with anyio.create_task_group() as group:
                    for work in (send, send, send, ask):
                        group.start_soon(work)

    run_in_virtual_time(main, seed)  # by which it comes before the others or behind them
    assert asked[0] < 0.4 + 0.4


# ---- deaths, cuts, delay and rate ----


def signers(count):
    return [Signer(bytes([number]) * 32) for number in range(count)]


def pair(network):
    a, b = (network.transport(signer) for signer in signers(2))
    serve_requests(b, ECHO, echo, limit=1 << 24)
    return a, b


async def push(sender, receiver, nbytes):
    await request(sender, receiver.peer, ECHO, bytes(nbytes), limit=9, timeout=99)


def sinks(network, count):
    """Peers that take what others send and answer with nothing."""

    async def swallow(peer, body):
        return b""

    made = [network.transport(signer) for signer in signers(count)]
    for one in made:
        serve_requests(one, ECHO, swallow, limit=1 << 24)
    return made


@pytest.mark.parametrize(("latency", "of_the_link", "seconds"), [(0.1, 0.1, 0.4), (0.01, 1.0, 2.0 + 1.0 + 0.01)])
async def test_a_request_takes_the_handshake_and_one_round_trip(latency, of_the_link, seconds, virtual_time):
    network = MemoryNetwork(latency=latency)
    a, b = pair(network)
    network.set_link(a.peer, b.peer, latency=of_the_link)
    async with a, b:
        began = anyio.current_time()
        await request(a, b.peer, ECHO, b"?", limit=10, timeout=9)
        assert anyio.current_time() - began == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("network", "pushes", "done"),
    [
        pytest.param({"bandwidth": 1e6}, [(0, 1), (0, 2)], 4.0, id="an uplink is shared by the streams of its peer"),
        pytest.param({"downlink": 1e6}, [(1, 0), (2, 0)], 4.0, id="a downlink is shared by all who send to its peer"),
        pytest.param({"bandwidth": 1e6, "downlink": 4e6}, [(1, 0)], 2.0, id="a body goes at the rate of the uplink"),
        pytest.param({"bandwidth": 4e6, "downlink": 1e6}, [(1, 0)], 2.0, id="or of the downlink if that is slower"),
    ],
)
async def test_bodies_of_two_megabytes_take_as_long_as_their_lines_say(network, pushes, done, virtual_time):
    peers = sinks(MemoryNetwork(**network), 3)
    async with peers[0], peers[1], peers[2], anyio.create_task_group() as group:
        for sender, receiver in pushes:
            group.start_soon(push, peers[sender], peers[receiver], 2 * 10**6)
    assert anyio.current_time() == pytest.approx(done, rel=0.05)


async def test_bytes_that_have_not_reached_a_downlink_do_not_hold_up_those_that_have(virtual_time):
    network = MemoryNetwork(latency=0.01)
    a, far, near = sinks(network, 3)
    network.set_downlink(a.peer, 1e6)
    network.set_link(far.peer, a.peer, latency=5.0)
    arrived = {}

    async def one(sender, name):
        await push(sender, a, 500_000)
        arrived[name] = anyio.current_time()

    async with a, far, near, anyio.create_task_group() as group:
        group.start_soon(one, far, "far")
        await anyio.sleep(10.5)  # far's body is on its way
        group.start_soon(one, near, "near")
    assert arrived["near"] == pytest.approx(10.5 + 0.04 + 0.5, abs=0.01)
    assert arrived["far"] == pytest.approx(10.0 + 5.0 + 0.5 + 0.01, abs=0.02)


async def test_an_uplink_that_changes_changes_for_streams_that_are_open(virtual_time):
    network = MemoryNetwork(bandwidth=1e6)
    a, b = sinks(network, 2)
    async with a, b, anyio.create_task_group() as group:
        group.start_soon(push, b, a, 4 * 10**6)
        await anyio.sleep(1.0)
        network.set_uplink(b.peer, 3e6)
    assert anyio.current_time() == pytest.approx(2.4, abs=0.3), "1 MB at first, a window of it already on the way"


async def test_a_line_lets_a_burst_through_at_once_and_again_when_it_has_rested(virtual_time):
    network = MemoryNetwork()
    a, b = sinks(network, 2)
    network.set_uplink(b.peer, 100_000.0, burst=200_000.0)
    took = []
    async with a, b:
        for rest in (10.0, 0.0, 1.0):
            await anyio.sleep(rest)
            began = anyio.current_time()
            await push(b, a, 300_000)
            took.append(anyio.current_time() - began)
    assert took == pytest.approx([1.0, 3.0, 2.0], abs=0.05)


async def test_killing_a_peer_breaks_its_streams_at_once_and_loses_what_was_in_flight(virtual_time):
    network = MemoryNetwork(latency=5.0)
    a, b = (network.transport(signer) for signer in signers(2))
    ended = []

    async def hold(stream):
        try:
            await stream.receive_exactly(100)
        finally:
            ended.append(anyio.current_time())

    b.serve(ECHO, hold)
    async with a, b:
        stream = await a.open(b.peer, ECHO)
        await stream.send(b"x" * 100)
        await anyio.sleep(1.0)
        now = anyio.current_time()
        network.kill(b.peer)
        with pytest.raises(StreamClosed):
            await stream.receive_exactly(1)
        with pytest.raises(StreamClosed):
            await stream.send(b"x")
        await anyio.wait_all_tasks_blocked()
        assert anyio.current_time() == now
        assert ended == [now]
        for one, other in ((a, b), (b, a)):
            with pytest.raises(PeerUnreachable):
                await one.open(other.peer, ECHO)
        await anyio.sleep(1)  # still here: whoever entered the transport is not cancelled


async def test_a_killed_peer_comes_back_with_a_new_transport_and_the_same_identity(virtual_time):
    network = MemoryNetwork()
    a, b = pair(network)
    async with a, b:
        network.kill(b.peer)
        again = network.transport(signers(2)[1])
        serve_requests(again, ECHO, echo, limit=10)
        async with again:
            assert await request(a, b.peer, ECHO, b"?", limit=10, timeout=9) == b"?"
            with pytest.raises(TransportError, match="running already"):
                await network.transport(signers(2)[1]).__aenter__()


async def test_a_cut_link_breaks_streams_and_dials_until_it_is_healed(virtual_time):
    network = MemoryNetwork()
    a, b = pair(network)
    async with a, b:
        stream = await a.open(b.peer, ECHO)
        network.cut(b.peer, a.peer)
        with pytest.raises(StreamClosed):
            await stream.receive_exactly(1)
        with pytest.raises(PeerUnreachable, match="cut"):
            await a.connect(b.peer, b.addresses())
        network.heal(a.peer, b.peer)
        assert await request(a, b.peer, ECHO, b"?", limit=10, timeout=9) == b"?"


def test_the_same_seed_gives_the_same_times():
    def times(seed):
        network = MemoryNetwork(latency=0.05, jitter=0.1, generator=random.Random(seed))
        a, b = pair(network)
        seen = []

        async def main():
            async with a, b:
                for _ in range(20):
                    await request(a, b.peer, ECHO, bytes(200_000), limit=1 << 20, timeout=99)
                    seen.append(anyio.current_time())

        run_in_virtual_time(main, seed=0)
        return seen

    def steps(seen):
        return [later - earlier for earlier, later in itertools.pairwise(seen)]

    assert steps(times(1)) == pytest.approx(steps(times(1)), abs=1e-9)
    assert steps(times(1)) != pytest.approx(steps(times(2)), abs=1e-9)


def test_bytes_that_stand_for_many_take_as_long_as_those_and_the_first_ones_stand_for_themselves():
    weight = Weight(each=1000.0, plain=10)
    assert weight.of(0, 4) == 4
    assert weight.of(4, 10) == 6 + 4 * 1000
    assert weight.of(14, 2) == 2000
    assert Weight().of(3, 7) == 7
