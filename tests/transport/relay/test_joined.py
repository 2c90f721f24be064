"""Two streams joined, without a network and under virtual time: ends, tails, back-pressure, terms, turns."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager

import anyio
import pytest

from decentral.errors import StreamClosed
from decentral.transport.native.relay import SpliceTerms, join
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.throttle import Gate
from tests.kit.muxers import MIB, first, ignore, two_sessions

pytestmark = pytest.mark.usefixtures("virtual_time")

FREE = SpliceTerms(seconds=None, nbytes=None, gate=None, on_bytes=ignore)


@asynccontextmanager
async def joined_pair(terms=FREE, names=(b"a" * 32, b"b" * 32), over=None):
    """The far ends of two streams that are joined; ``over`` is set when they are not any more."""
    over = over or anyio.Event()
    async with two_sessions() as (a, _, at_relay, _), two_sessions() as (relay, _, at_b, _):
        one, target = a.open(), relay.open()
        for stream in (one, target):
            await stream.send(b"?", ignore)
        source, other = await first(at_relay), await first(at_b)
        assert await source.receive(1) == await other.receive(1) == b"?"

        async def carry():
            await join(NativeStream(names[0], source), NativeStream(names[1], target), terms)
            over.set()

        async with anyio.create_task_group() as group:
            group.start_soon(carry)
            yield one, other, over
            group.cancel_scope.cancel()


async def all_of(stream, into=None):
    data = b""
    while piece := await stream.receive(MIB):
        data += piece
    if into is not None:
        into.append(data)
    return data


async def test_one_direction_may_end_long_before_the_other():
    async with joined_pair() as (a, b, over):
        await a.send(b"question", ignore)
        a.end()
        assert await all_of(b) == b"question"
        await anyio.sleep(100)
        assert not over.is_set()
        await b.send(b"answer", ignore)
        b.end()
        assert await all_of(a) == b"answer"
        await over.wait()


@pytest.mark.parametrize("ends", ["end", "close", "reset"])
async def test_what_was_sent_before_the_end_arrives_however_it_ends(ends):
    body = os.urandom(MIB)
    async with joined_pair() as (a, b, over), anyio.create_task_group() as group:
        found = []
        group.start_soon(all_of, b, found)
        await a.send(body, ignore)
        await anyio.sleep(1)  # a reset overtakes what its own sender has not sent yet
        getattr(a, ends)()
        while not found:
            await anyio.sleep(0.1)
        assert found == [body]
        b.end()
        await over.wait()


async def test_a_reader_that_is_slow_still_gets_the_tail_of_one_who_was_reset():
    body = os.urandom(MIB // 2)
    async with joined_pair() as (a, b, _):
        await a.send(body, ignore)
        await anyio.sleep(1)
        a.reset()
        data = b""
        while piece := await b.receive(1000):
            data += piece
            await anyio.sleep(0.1)
        assert data == body


async def test_one_who_ignores_the_end_of_the_other_does_not_keep_the_pair():
    async with joined_pair() as (a, b, over):
        await b.send(b"!", ignore)
        a.reset()
        with anyio.fail_after(10):
            await over.wait()


async def test_a_half_open_pair_ends_when_the_half_that_ended_is_gone():
    async with joined_pair() as (a, _, over):
        a.end()
        await anyio.sleep(100)
        assert not over.is_set()
        a.reset()
        with anyio.fail_after(10):
            await over.wait()


async def test_a_connection_lasts_no_longer_than_its_terms():
    async with joined_pair(SpliceTerms(60, None, None, ignore)) as (a, b, over):
        began = anyio.current_time()
        await over.wait()
        assert anyio.current_time() - began == pytest.approx(60, abs=0.1)
        assert await all_of(a) == await all_of(b) == b""


async def test_a_connection_carries_no_more_than_its_terms():
    passed = []
    async with joined_pair(SpliceTerms(None, MIB, None, passed.append)) as (a, b, over):
        async with anyio.create_task_group() as group:
            group.start_soon(all_of, b)
            await a.send(bytes(MIB), ignore)
            with pytest.raises(StreamClosed):
                await a.send(bytes(8 * MIB), ignore)
        await over.wait()
        assert MIB - 65507 <= sum(passed) <= MIB


async def test_all_pairs_keep_to_one_rate_and_senders_share_it_equally_however_many_connections_they_have():
    rate, seconds = 1e6, 10
    gate = Gate(rate)
    counts = {}

    def terms(name):
        counts.setdefault(name, 0)

        def count(nbytes):
            counts[name] += nbytes

        return SpliceTerms(None, None, gate, count)

    async def flood(name):
        names = (name.encode().ljust(32), b"z" * 32)
        async with joined_pair(terms(name), names) as (a, b, _), anyio.create_task_group() as group:
            group.start_soon(all_of, b)
            await a.send(bytes(64 * MIB), ignore)

    async with anyio.create_task_group() as group:
        for name, pairs in (("one", 1), ("many", 4)):
            for _ in range(pairs):
                group.start_soon(flood, name)
        await anyio.sleep(seconds)
        group.cancel_scope.cancel()
    assert sum(counts.values()) == pytest.approx(rate * seconds, rel=0.05)
    assert counts["one"] == pytest.approx(counts["many"], rel=0.05)
