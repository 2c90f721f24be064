"""What is learnt of the own uplink by sending a frame, how fast pieces go, and what is not asked for twice."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from inspect import signature

import anyio
import pytest
import trio
import trio.testing

from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import HASTE, PIECE, UNKNOWN_RATE, ChunkedBroadcast, Line, all_equal
from decentral.dissemination.reassembly import Arrivals, RangeSet
from decentral.errors import PayloadError, StreamClosed
from decentral.flow.pacing import SECONDS
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request, serve_requests, serve_sequences
from decentral.transport.throttle import ThrottledStream, ThrottledTransport
from decentral.wire.frames import HEADER_NBYTES, FrameKind, Header, seal
from decentral.wire.keys import Signer
from decentral.wire.pieces import read_piece

RATE, NBYTES = 250_000.0, 500_000
WHOLE = NBYTES + HEADER_NBYTES
VOTE = "/test/vote/1"
SIGNERS = [Signer(bytes([number] * 32)) for number in range(1, 7)]


def frame(body=bytes(NBYTES)):
    header = Header(FrameKind.CONTRIBUTION, bytes(32), 0, 1, 0, 0, 1, 0, bytes(32), SIGNERS[0].peer, 1, 1)
    return seal(header, body, SIGNERS[0])


def fail(*_):
    raise AssertionError("nothing comes here")


class Nobody:
    """A peer that only sends."""

    max_nbytes = take = spawn = staticmethod(fail)

    def chain_head(self):
        return None


def play(script, take):
    """``script(spreading, others)`` in virtual time; the uplink has RATE, and ``take`` gets what the others get."""
    network = MemoryNetwork(latency=0.02)

    async def answer(peer, data):
        await take(peer, data)
        return b""

    async def nod(peer, data):
        return b""

    async def main():
        sender, *others = (network.transport(signer) for signer in SIGNERS)
        network.set_uplink(sender.peer, RATE)
        throttled = ThrottledTransport(sender, urgent=(VOTE,))
        spreading = ChunkedBroadcast(throttled, sender.peer, Arrivals(), all_equal, Nobody())
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(throttled)
            for other in others:
                serve_requests(other, broadcast.PUSH, answer, limit=1 << 20)
                serve_requests(other, VOTE, nod, limit=0)
                takes = partial(take, me=other.peer) if "me" in signature(take).parameters else take
                serve_sequences(other, PIECE, takes, limit=1 << 20, watch=Arrivals().push)
                await stack.enter_async_context(other)
                await throttled.connect(other.peer, other.addresses())
            await script(spreading, [other.peer for other in others])

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def keep(peer, data):
    """Take it."""


async def refuse(peer, data):
    raise PayloadError("as the test wants it")


def test_one_frame_that_all_have_tells_the_uplink():
    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink == pytest.approx(RATE, rel=0.05)

    play(script, keep)


def test_a_receiver_that_takes_long_does_not_make_the_uplink_a_thin_one():
    slow: list[bytes] = []

    async def dawdle(peer, data):
        if not slow:
            slow.append(data)
            await anyio.sleep(30.0)

    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink == pytest.approx(RATE, rel=0.05)

    play(script, dawdle)


def test_a_frame_that_nobody_takes_tells_nothing_and_fails_nobody():
    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert spreading.transport.uplink is None

    play(script, refuse)


@pytest.mark.parametrize("known", [True, False])
def test_a_frame_that_is_called_off_leaves_the_uplink_free_and_has_told_what_it_carries(known):
    """Round after round, what was called off would be before the next offer and the next frame."""

    async def script(spreading, others):
        spreading.lines_of = lambda peers: [Line(RATE if known else UNKNOWN_RATE, passes_on=False)] * len(peers)
        with anyio.move_on_after(3.0) as scope:
            await spreading.give(frame(bytes(NBYTES)), others, fail)
        assert scope.cancelled_caught
        began = anyio.current_time()
        await request(spreading.transport, others[0], VOTE, b"", limit=0, timeout=60.0)
        assert anyio.current_time() - began < SECONDS + 0.5
        assert spreading.transport.uplink == pytest.approx(RATE, rel=0.1)

    play(script, keep)


def test_a_peer_that_learns_that_its_uplink_is_thin_goes_on_by_way_of_others():
    """Seven copies would take N - 1 times as long; nobody is done before one copy."""
    sent: dict[int, int] = {}

    async def note(peer, data):
        piece = read_piece(data)
        sent[piece.start] = sent.get(piece.start, 0) + len(piece.data)

    async def script(spreading, others):
        def lines(peers):
            own = spreading.transport.uplink
            return [
                Line((own or UNKNOWN_RATE) if peer == spreading.me else 10 * RATE, passes_on=True) for peer in peers
            ]

        spreading.lines_of, began = lines, anyio.current_time()
        await spreading.give(frame(bytes(4 * NBYTES)), others, fail)
        assert 4 * NBYTES <= sum(sent.values()) < 6 * NBYTES
        assert 8.0 < anyio.current_time() - began < 13.0

    play(script, note)


@pytest.mark.parametrize("thin", [True, False])
def test_a_thin_peer_sends_little_faster_than_it_thinks_that_its_uplink_carries(thin):
    """The estimate is a tenth of what the uplink carries: who is not thin beside the others finds out."""
    own, took = RATE / 10, []

    async def script(spreading, others):
        def lines(peers):
            return [Line(own if peer == spreading.me else own * (10 if thin else 1), passes_on=True) for peer in peers]

        spreading.lines_of, began = lines, anyio.current_time()
        await spreading.give(frame(), others, fail)
        took.append(anyio.current_time() - began)

    play(script, keep)
    paced = NBYTES / (HASTE * own)
    assert (0.9 * paced < took[0] < 1.3 * paced) if thin else took[0] < 5 * paced / 1.5


def test_a_peer_that_takes_nothing_keeps_nobody_waiting_when_the_uplink_becomes_known():
    done: dict[bytes, float] = {}
    first: list[bytes] = []

    async def note(peer, data):
        first.append(data)
        if len(first) == 1:
            await anyio.sleep_forever()
        done[data] = anyio.current_time()

    async def script(spreading, others):
        def lines(peers):
            return [Line(spreading.transport.uplink or UNKNOWN_RATE, passes_on=False)] * len(peers)

        spreading.lines_of, began = lines, anyio.current_time()
        with anyio.move_on_after(14.0):
            await spreading.give(frame(), others, fail)
        assert sum(len(read_piece(data).data) for data in done) >= NBYTES
        assert max(done.values()) - began < 12.0

    play(script, note)


def test_who_is_refused_a_frame_is_not_told_of_as_out_of_reach_and_the_others_get_theirs():
    """One of them, that is: the one that refuses the first piece refuses all."""
    came: dict[bytes, list[bytes]] = {}

    async def script(spreading, others):
        await spreading.give(frame(), others, fail)
        assert sorted(sum(len(read_piece(data).data) for data in came[peer]) for peer in others)[1:] == [WHOLE] * 4

    async def only_one(peer, data, *, me):
        came.setdefault(me, []).append(data)
        if me == next(iter(came)):
            raise PayloadError("as the test wants it")

    play(script, only_one)


def test_a_relay_that_ends_every_connection_with_all_that_is_under_way_stops_no_frame(monkeypatch):
    """After 128 KiB: with four seconds of the uplink under way no answer ever came back, and the frame was fetched."""
    came, carried = RangeSet(), {}
    send = ThrottledStream.send

    async def send_through_relay(stream, data):
        """What leaves is with the relay at once; the answers have a way to go."""
        carried[stream] = carried.get(stream, 0) + len(data)
        if carried[stream] > 1 << 17:
            await stream.aclose()
            raise StreamClosed("as the test wants it")
        await send(stream, data)

    async def take(peer, data):
        piece = read_piece(data)
        came.add(piece.start, piece.start + len(piece.data))

    async def script(spreading, others):
        spreading.transport.inner.network.set_uplink(spreading.me, None)
        spreading.lines_of = lambda peers: [Line(10 * RATE, passes_on=False)] * len(peers)
        await spreading.give(frame(), others[:1], fail)
        assert came.nbytes == WHOLE

    monkeypatch.setattr(ThrottledStream, "send", send_through_relay)
    play(script, take)


def test_a_stream_that_ends_after_some_pieces_is_followed_by_another():
    """A relay that grants 128 KiB a connection ended every frame, which had to be fetched after five seconds."""
    came: dict[int, int] = {}
    taken: list[bytes] = []

    async def end_often(peer, data):
        taken.append(data)
        if len(taken) % 5 == 0:
            raise PayloadError("as the test wants it")
        piece = read_piece(data)
        came[piece.start] = len(piece.data)

    async def script(spreading, others):
        await spreading.give(frame(), others[:1], fail)
        assert sum(came.values()) == NBYTES + HEADER_NBYTES

    play(script, end_often)


def test_a_small_frame_goes_in_one():
    came: list[bytes] = []

    async def note(peer, data):
        came.append(data)

    async def script(spreading, others):
        small = frame(bytes(1000))
        await spreading.give(small, others, fail)
        assert came == [small.data] * 5

    play(script, note)


def test_who_is_not_reached_is_told_of_at_once_and_not_when_the_others_have_it():
    told: list[float] = []

    async def dawdle(peer, data):
        await anyio.sleep(30.0)

    async def script(spreading, others):
        async def note(peer):
            assert peer == bytes(32)
            told.append(anyio.current_time() - began)

        began = anyio.current_time()
        await spreading.give(frame(), [*others, bytes(32)], note)
        assert told
        assert told[0] < 1.0
        assert anyio.current_time() - began > 30.0

    play(script, dawdle)


def test_frames_that_are_sent_at_the_same_time_measure_the_uplink_together():
    """Slices of a reduce go to one peer each: alone, each tells its share of the uplink only."""

    async def take(peer, data):
        pass

    found = []

    async def script(spreading, others):
        async with anyio.create_task_group() as group:
            for other in others:
                group.start_soon(spreading.give, frame(), [other], fail)
        found.append(spreading.transport.uplink)

    play(script, take)
    assert found == [pytest.approx(RATE, rel=0.1)]
