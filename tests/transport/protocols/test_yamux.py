"""The muxer without a network: two sessions joined by pipes in memory, under virtual time."""

from __future__ import annotations

import struct
from contextlib import suppress

import anyio
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError, StreamClosed
from decentral.transport.protocols.yamux import FIRST_WINDOW, Session, Stock, _Incoming
from tests.kit.muxers import MIB, Joined, first, ignore, two_sessions

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_a_path_that_dies_silently_ends_its_streams_within_a_minute():
    async with two_sessions() as (a, _, came, ends):
        stream = a.open()
        await stream.send(b"?", ignore)
        await first(came)
        await anyio.sleep(600)
        assert a.usable, "a quiet connection is kept"
        for end in ends:
            end.dead = True
        began = anyio.current_time()
        assert await stream.receive(1) == b""
        assert anyio.current_time() - began < 60
        assert a.ended


async def test_a_stream_that_sends_without_end_does_not_starve_another():
    async with two_sessions() as (a, _, came, _), anyio.create_task_group() as group:
        greedy, taken = [], []
        for _ in range(5):
            group.start_soon(a.open().send, bytes(64 * MIB), greedy.append)
        while len(came) < 5:
            await anyio.sleep(0.01)

        async def swallow(stream):
            while await stream.receive(MIB):
                pass

        for stream in came:
            group.start_soon(swallow, stream)
        before = sum(greedy)
        await a.open().send(bytes(200_000), taken.append)
        assert len(taken) == 4
        assert sum(greedy) - before < 32 * 65507, "six streams share: about five pieces of theirs for each of ours"
        group.cancel_scope.cancel()


async def slow(end, rate):
    """Have what ``end`` sends take its time, at ``rate`` bytes per second."""
    plain = end.send

    async def send(*parts):
        await anyio.sleep(sum(map(len, parts)) / rate)
        await plain(*parts)

    end.send, end.rate = send, rate


async def read_all(stream, taken=None):
    while data := await stream.receive(MIB):
        if taken is not None:
            taken.append(data)


async def test_a_vote_does_not_wait_behind_the_frames_of_a_slow_path():
    """Behind four pieces of 64 KiB it took 5 s at 50 kB/s."""
    async with two_sessions() as (a, _, came, ends), anyio.create_task_group() as group:
        await slow(ends[0], 50_000)
        for _ in range(3):
            group.start_soon(a.open().send, bytes(MIB), ignore)
        while len(came) < 3:
            await anyio.sleep(0.01)
        for stream in came[:3]:
            group.start_soon(read_all, stream)
        await anyio.sleep(5)
        for _ in range(3):
            began, vote = anyio.current_time(), a.open()
            await vote.send(bytes(200), ignore)
            vote.end()
            while not came[3:]:
                await anyio.sleep(0.01)
            await read_all(came.pop())
            assert anyio.current_time() - began < 0.6
        group.cancel_scope.cancel()


@pytest.mark.parametrize("rate", [50_000, 5_000_000])
async def test_what_one_stream_sends_stays_in_order_however_long_its_parts_are(rate):
    parts = [bytes([number]) * length for number, length in enumerate((10, 70_000, 10, 1_000, 200_000, 1, 5_000, 3))]
    async with two_sessions() as (a, _, came, ends), anyio.create_task_group() as group:
        await slow(ends[0], rate)
        stream, other, taken = a.open(), a.open(), []
        group.start_soon(other.send, bytes(MIB), ignore)

        async def send():
            for part in parts:
                await stream.send(part, ignore)
            stream.end()

        group.start_soon(send)
        while len(came) < 2:
            await anyio.sleep(0.01)
        mine = next(one for one in came if one.number == stream.number)
        group.start_soon(read_all, next(one for one in came if one is not mine))
        await read_all(mine, taken)
        group.cancel_scope.cancel()
    assert b"".join(taken) == b"".join(parts)


@pytest.mark.parametrize("length", [100, MIB])
async def test_who_gives_up_while_it_waits_for_its_turn_leaves_its_turn_to_others(length):
    """A hundred streams that are reset, or whose senders are called off; then all that may wait can wait again."""
    async with two_sessions() as (a, b, came, ends), anyio.create_task_group() as group:
        await slow(ends[0], 100_000)
        for number in range(100):
            stream = a.open()
            with anyio.move_on_after(0.05):
                async with anyio.create_task_group() as senders:
                    for _ in range(3):
                        senders.start_soon(try_to_send, a.open(), bytes(length))
                    await anyio.sleep(0.02)
                    if number % 2:
                        stream.reset()
        for stream in (*a.streams, *came):
            stream.reset()
        last, taken = a.open(), []
        group.start_soon(try_to_send, last, bytes(300_000))
        while (there := b.stream(last.number)) is None:
            await anyio.sleep(0.01)
        while sum(map(len, taken)) < 300_000:
            taken.append(await there.receive(MIB))
        assert a.outgoing._slots.value == 4
        assert a.outgoing._slots_of_few.value == 32
        group.cancel_scope.cancel()


async def try_to_send(stream, data):
    with suppress(StreamClosed):
        await stream.send(data, ignore)


async def test_pieces_are_short_on_a_slow_path_and_long_on_a_fast_one_or_where_nothing_is_known():
    async with two_sessions() as (a, _, came, ends), anyio.create_task_group() as group:
        sizes, plain = [], ends[0].send

        async def send(*parts):
            sizes.extend(len(part) for part in parts if len(part) > 1000)
            await anyio.sleep(1.0)  # as on a busy machine
            await plain(*parts)

        ends[0].send = send
        group.start_soon(a.open().send, bytes(32 * MIB), ignore)
        group.start_soon(read_all, await first(came))
        for rate, piece in ((None, 65_507), (100_000, 25_000), (1_000, 4_096), (10_000_000, 65_507)):
            ends[0].rate = rate
            await anyio.sleep(10)
            assert max(sizes[-4:]) == piece + 12
        group.cancel_scope.cancel()


async def test_a_window_grows_for_a_reader_that_keeps_pace_as_far_as_the_stock_reaches():
    async with two_sessions(lambda: Stock(MIB)) as (a, b, came, _), anyio.create_task_group() as group:
        quick = a.open()
        group.start_soon(quick.send, bytes(8 * MIB), ignore)
        stream, got = await first(came), 0
        while got < 8 * MIB:
            got += len(await stream.receive(MIB))
        assert stream._window == 4 * FIRST_WINDOW  # 256 KiB, doubled twice: 768 KiB of the stock
        assert b.stock.left == MIB - 3 * FIRST_WINDOW
        quick.close()
        stream.close()
        await anyio.sleep(0.1)
        assert b.stock.left == MIB


async def test_a_reader_that_does_not_read_holds_one_first_window():
    async with two_sessions() as (a, _, came, _), anyio.create_task_group() as group:
        taken = []
        group.start_soon(a.open().send, bytes(8 * MIB), taken.append)
        stream = await first(came)
        await anyio.sleep(30)
        assert sum(taken) == stream.num_unread == FIRST_WINDOW
        group.cancel_scope.cancel()


async def test_streams_that_are_done_leave_nothing_behind():
    async with two_sessions() as (a, b, came, _):
        for number in range(300):
            stream = a.open()
            await stream.send(b"?", ignore)
            stream.close()
            while len(came) <= number:
                await anyio.sleep(0.001)
            assert await came[number].receive(9) == b"?"
            assert await came[number].receive(9) == b""
            came[number].close()
        await anyio.sleep(1)
        assert a.idle
        assert b.idle
        assert b._inbound == 0


async def test_streams_closed_here_that_the_other_side_keeps_open_are_given_up():
    async with two_sessions() as (a, b, came, _):
        for _ in range(100):
            stream = a.open()
            await stream.send(b"?", ignore)
            stream.close()
        while len(came) < 100:
            await anyio.sleep(0.001)
        await anyio.sleep(1)
        assert a.num_streams == 64
        assert b.num_streams == 64


async def test_a_last_word_to_a_closed_stream_is_no_reason_to_reset_it():
    async with two_sessions() as (a, _, came, _):
        stream = a.open()
        await stream.send(b"?", ignore)
        stream.close()
        there = await first(came)
        await there.send(bytes(100_000), ignore)
        there.close()
        assert await there.receive(9) == b""  # closed here; nothing was raised on the way
        await anyio.sleep(1)
        assert a.idle


frames = st.builds(
    lambda *fields: struct.pack("!BBHII", *fields),
    st.sampled_from([0, 0, 0, 0, 0, 0, 0, 1]),
    st.integers(0, 4),
    st.integers(0, 15),
    st.integers(0, 5),
    st.one_of(st.integers(0, 40), st.sampled_from([FIRST_WINDOW, FIRST_WINDOW + 1, 1 << 31, (1 << 32) - 1])),
)


@given(st.lists(st.one_of(frames, st.binary(max_size=60)), max_size=40), st.integers(1, 50))
def test_whatever_bytes_come_they_are_taken_or_break_a_rule_and_are_bounded(pieces, cut):
    data = b"".join(pieces)

    async def script():
        streams = []
        session = Session(Joined(None, None), dialled=False, stock=Stock(MIB), on_stream=streams.append)
        incoming = _Incoming(session)
        with suppress(PayloadError):
            for at in range(0, len(data), cut):
                incoming._feed(data[at : at + cut])
        assert session.num_streams <= 128
        assert sum(stream.num_unread for stream in streams) <= len(data)
        assert len(session.outgoing._answers) <= 4096

    trio.run(script)


async def test_a_stream_of_which_little_is_due_is_reset_by_more_and_what_came_before_can_be_read():
    async with two_sessions() as (a, _, came, _):
        stream = a.open()
        await stream.send(bytes(100), ignore)
        there = await first(came)
        there.most_unread = 1000
        await stream.send(bytes(900), ignore)
        await anyio.sleep(1)
        assert not there.ended
        await stream.send(bytes(1), ignore)
        await anyio.sleep(1)
        assert there.ended
        assert stream.ended
        assert await there.receive(MIB) == bytes(1000)
        assert await there.receive(MIB) == b""
        again = a.open()
        await again.send(b"?", ignore)
        assert not a.ended


async def test_an_end_leaves_the_other_direction_open_until_it_ends_too():
    async with two_sessions() as (a, b, came, _):
        stream = a.open()
        await stream.send(b"question", ignore)
        stream.end()
        stream.end()
        there = await first(came)
        assert [await there.receive(MIB), await there.receive(MIB)] == [b"question", b""]
        with pytest.raises(StreamClosed):
            await stream.send(b"more", ignore)
        await there.send(bytes(1 << 17), ignore)
        there.end()
        await there.until_ended()
        assert b.idle
        assert sum([len(piece) async for piece in pieces(stream)]) == 1 << 17
        assert a.idle


async def pieces(stream):
    while piece := await stream.receive(MIB):
        yield piece
