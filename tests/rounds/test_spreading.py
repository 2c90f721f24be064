"""What is learnt of the own uplink by sending a frame, how fast pieces go, and what is not asked for twice."""

from __future__ import annotations

import functools
import inspect
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest
import trio
import trio.testing

from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import HASTE, PIECE, ChunkedBroadcast
from decentral.dissemination.reassembly import Arrivals, RangeSet
from decentral.dissemination.spread import UNKNOWN_RATE, Line, all_equal
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


class Receivers(list[bytes]):
    """The others, and what they have taken."""

    def __init__(self, peers):
        super().__init__(peers)
        self.came: list[tuple[bytes, bytes]] = []
        self.asked = 0

    async def take(self, me: bytes, data: bytes) -> None:
        """Replaced where some are slow, or refuse."""

    async def receive(self, peer: bytes, data: bytes, *, me: bytes) -> bytes:
        self.asked += 1
        await self.take(me, data)
        self.came.append((me, data))
        return b""

    def nbytes(self, *peers: bytes) -> int:
        """Different bytes of the frame that ``peers`` have, together: all of them, unless told otherwise."""
        found = RangeSet()
        for me, data in self.came:
            piece = read_piece(data)
            if me in (peers or self):
                found.add(piece.start, piece.start + len(piece.data))
        return found.nbytes


def in_virtual_time(script):
    """A test of ``script(spreading, others)``, whose uplink has RATE."""
    asked = inspect.signature(script)

    @functools.wraps(script)
    def test(**given):
        trio.run(functools.partial(main, script, given), clock=trio.testing.MockClock(autojump_threshold=0))

    test.__signature__ = asked.replace(parameters=list(asked.parameters.values())[2:])
    return test


async def main(script, given):
    network = MemoryNetwork(latency=0.02)

    async def nod(peer, data):
        return b""

    sender, *others = (network.transport(signer) for signer in SIGNERS)
    network.set_uplink(sender.peer, RATE)
    throttled = ThrottledTransport(sender, urgent=(VOTE,))
    spreading = ChunkedBroadcast(throttled, sender.peer, Arrivals(), all_equal, Nobody())
    receivers = Receivers([other.peer for other in others])
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(throttled)
        for other in others:
            receive = partial(receivers.receive, me=other.peer)
            serve_requests(other, broadcast.PUSH, receive, limit=1 << 20)
            serve_requests(other, VOTE, nod, limit=0)
            serve_sequences(other, PIECE, receive, limit=1 << 20, watch=Arrivals().push)
            await stack.enter_async_context(other)
            await throttled.connect(other.peer, other.addresses())
        await script(spreading, receivers, **given)


def lines_where(spreading, own, others: float):
    """Of its own line a peer thinks what ``own`` says, whenever it is asked."""
    spreading.lines_of = lambda peers: [
        Line(own() if peer == spreading.me else others, passes_on=True) for peer in peers
    ]


@in_virtual_time
async def test_one_frame_that_all_have_tells_the_uplink(spreading, others):
    await spreading.give(frame(), others, fail)
    assert spreading.transport.uplink == pytest.approx(RATE, rel=0.05)


@in_virtual_time
async def test_a_receiver_that_takes_long_does_not_make_the_uplink_a_thin_one(spreading, others):
    async def dawdle(me, data):
        if others.asked == 1:
            await anyio.sleep(30.0)

    others.take = dawdle
    await spreading.give(frame(), others, fail)
    assert spreading.transport.uplink == pytest.approx(RATE, rel=0.05)


@in_virtual_time
async def test_a_frame_that_nobody_takes_tells_nothing_and_fails_nobody(spreading, others):
    async def refuse(me, data):
        raise PayloadError("as the test wants it")

    others.take = refuse
    await spreading.give(frame(), others, fail)
    assert spreading.transport.uplink is None


@pytest.mark.parametrize("known", [True, False])
@in_virtual_time
async def test_a_frame_that_is_called_off_leaves_the_uplink_free_and_has_told_what_it_carries(spreading, others, known):
    """Round after round, what was called off would be before the next offer and the next frame."""
    spreading.lines_of = lambda peers: [Line(RATE if known else UNKNOWN_RATE, passes_on=False)] * len(peers)
    with anyio.move_on_after(3.0) as scope:
        await spreading.give(frame(), others, fail)
    assert scope.cancelled_caught
    began = anyio.current_time()
    await request(spreading.transport, others[0], VOTE, b"", limit=0, timeout=60.0)
    assert anyio.current_time() - began < SECONDS + 0.5
    assert spreading.transport.uplink == pytest.approx(RATE, rel=0.1)


@in_virtual_time
async def test_a_peer_that_learns_that_its_uplink_is_thin_goes_on_by_way_of_others(spreading, others):
    """Seven copies would take N - 1 times as long; nobody is done before one copy."""
    lines_where(spreading, lambda: spreading.transport.uplink or UNKNOWN_RATE, 10 * RATE)
    began = anyio.current_time()
    await spreading.give(frame(bytes(4 * NBYTES)), others, fail)
    sent = sum(len(read_piece(data).data) for _, data in others.came)
    assert 4 * NBYTES <= sent < 6 * NBYTES
    assert 8.0 < anyio.current_time() - began < 13.0


@pytest.mark.parametrize("told", [True, False])
@in_virtual_time
async def test_a_frame_tells_of_its_way_only_where_it_went_that_way_from_the_start(spreading, others, told):
    """It took long, which leaves that way in doubt; its first seconds, in which nothing was known of the line, do
    not."""

    known = told

    def lines(peers):
        own = RATE if known else spreading.transport.uplink or UNKNOWN_RATE
        return [Line(own if peer == spreading.me else 10 * RATE, passes_on=True) for peer in peers]

    spreading.lines_of = lines
    first, second = frame(bytes(4 * NBYTES)), frame(bytes(3 * NBYTES))
    await spreading.give(first, others, fail)
    spreading.note_seconds_to_commit(first.hash, 30.0, 0.0)
    known, others.came = True, []
    await spreading.give(second, others, fail)
    went_to_everybody = sum(len(read_piece(data).data) for _, data in others.came) == len(others) * len(second.data)
    assert went_to_everybody == told


@pytest.mark.parametrize("thin", [True, False])
@in_virtual_time
async def test_a_thin_peer_sends_little_faster_than_it_thinks_that_its_uplink_carries(spreading, others, thin):
    """The estimate is a tenth of what the uplink carries: who is not thin beside the others finds out."""
    own = RATE / 10
    paced = NBYTES / (HASTE * own)
    lines_where(spreading, lambda: own, own * (10 if thin else 1))
    began = anyio.current_time()
    await spreading.give(frame(), others, fail)
    took = anyio.current_time() - began
    assert (0.9 * paced < took < 1.3 * paced) if thin else took < 5 * paced / 1.5


@in_virtual_time
async def test_a_peer_that_takes_nothing_keeps_nobody_waiting_when_the_uplink_becomes_known(spreading, others):
    done: list[float] = []

    async def hang_once(me, data):
        if others.asked == 1:
            await anyio.sleep_forever()
        done.append(anyio.current_time())

    def lines(peers):
        return [Line(spreading.transport.uplink or UNKNOWN_RATE, passes_on=False)] * len(peers)

    others.take, spreading.lines_of, began = hang_once, lines, anyio.current_time()
    with anyio.move_on_after(14.0):
        await spreading.give(frame(), others, fail)
    assert others.nbytes() >= NBYTES
    assert max(done) - began < 12.0


@in_virtual_time
async def test_who_is_refused_a_frame_is_not_told_of_as_out_of_reach_and_the_others_get_theirs(spreading, others):
    """One of them, that is: the one that refuses the first piece refuses all."""
    refusing: list[bytes] = []

    async def only_one(me, data):
        refusing.append(me)
        if me == refusing[0]:
            raise PayloadError("as the test wants it")

    others.take = only_one
    await spreading.give(frame(), others, fail)
    assert [others.nbytes(peer) for peer in others if peer != refusing[0]] == [WHOLE] * 4


@in_virtual_time
async def test_a_relay_that_ends_every_connection_with_all_that_is_under_way_stops_no_frame(
    spreading, others, monkeypatch
):
    """After 128 KiB: with four seconds of the uplink under way no answer ever came back, and the frame was fetched."""
    carried, send = {}, ThrottledStream.send

    async def send_through_relay(stream, data):
        """What leaves is with the relay at once; the answers have a way to go."""
        carried[stream] = carried.get(stream, 0) + len(data)
        if carried[stream] > 1 << 17:
            await stream.aclose()
            raise StreamClosed("as the test wants it")
        await send(stream, data)

    monkeypatch.setattr(ThrottledStream, "send", send_through_relay)
    spreading.transport.inner.network.set_uplink(spreading.me, None)
    spreading.lines_of = lambda peers: [Line(10 * RATE, passes_on=False)] * len(peers)
    await spreading.give(frame(), others[:1], fail)
    assert others.nbytes() == WHOLE


@in_virtual_time
async def test_a_stream_that_ends_after_some_pieces_is_followed_by_another(spreading, others):
    """A relay that grants 128 KiB a connection ended every frame, which had to be fetched after five seconds."""

    async def end_often(me, data):
        if others.asked % 5 == 0:
            raise PayloadError("as the test wants it")

    others.take = end_often
    await spreading.give(frame(), others[:1], fail)
    assert others.nbytes() == WHOLE


@in_virtual_time
async def test_a_small_frame_goes_in_one(spreading, others):
    small = frame(bytes(1000))
    await spreading.give(small, others, fail)
    assert [data for _, data in others.came] == [small.data] * 5


@in_virtual_time
async def test_who_is_not_reached_is_told_of_at_once_and_not_when_the_others_have_it(spreading, others):
    told: list[float] = []

    async def dawdle(me, data):
        await anyio.sleep(30.0)

    async def note(peer):
        assert peer == bytes(32)
        told.append(anyio.current_time() - began)

    others.take, began = dawdle, anyio.current_time()
    await spreading.give(frame(), [*others, bytes(32)], note)
    assert told
    assert told[0] < 1.0
    assert anyio.current_time() - began > 30.0


@in_virtual_time
async def test_frames_that_are_sent_at_the_same_time_measure_the_uplink_together(spreading, others):
    """Slices of a reduce go to one peer each: alone, each tells its share of the uplink only."""
    async with anyio.create_task_group() as group:
        for other in others:
            group.start_soon(spreading.give, frame(), [other], fail)
    assert spreading.transport.uplink == pytest.approx(RATE, rel=0.1)


@pytest.mark.parametrize("helped", [True, False])
@in_virtual_time
async def test_the_estimate_follows_a_line_that_falls_to_a_tenth_in_one_long_frame_and_comes_back(
    spreading, others, helped
):
    """The greatest of sixteen frames stayed for fifteen; who is helped sends no faster than it thinks that it can."""

    def own():
        return spreading.transport.uplink or UNKNOWN_RATE

    lines_where(spreading, own, RATE if helped else RATE / 100)
    for rate, frames in ((RATE, 3), (RATE / 10, 1), (RATE, 11)):
        spreading.transport.inner.network.set_uplink(spreading.me, rate)
        for _ in range(frames):
            await spreading.give(frame(), others, fail)
        assert own() == pytest.approx(rate, rel=0.1)
