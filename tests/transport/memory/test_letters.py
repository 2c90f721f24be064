"""Letters beside streams: the same times, answers and ends on the same network."""

from __future__ import annotations

import anyio
import pytest

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed
from decentral.simulate.backend import run_in_virtual_time
from decentral.transport.memory import MemoryNetwork, Weight
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Signer

ECHO = "/test/echo"
SLOW = "/test/slow"


async def echo(peer, body):
    return body


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


async def cut_on_the_way(network, a, b):
    async def cut():
        await anyio.sleep(0.25)
        network.cut(a.peer, b.peer)

    async with anyio.create_task_group() as group:
        group.start_soon(cut)
        with pytest.raises(StreamClosed):
            await request(a, b.peer, SLOW, b"?", limit=9, timeout=9)
    with pytest.raises(PeerUnreachable):
        await request(a, b.peer, SLOW, b"?", limit=9, timeout=9)
    return anyio.current_time()


async def killed_while_it_answers(network, a, b):
    async def kill():
        await anyio.sleep(0.8)
        network.kill(b.peer)

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
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


SCRIPTS = [
    one,
    many_at_once,
    without_an_answer,
    cut_on_the_way,
    killed_while_it_answers,
    too_late,
    too_long,
    nobody_serves_it,
]


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
