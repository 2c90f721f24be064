"""What is dropped when frames do not fit: the past first, then a flooder's own, never what the open round needs. And
what is asked for: no frame of a round that is over.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

from decentral.consensus.round_state import Fetch
from decentral.dissemination.broadcast import FETCH, ChunkedBroadcast
from decentral.dissemination.pull import PER_SENDER, FrameFetcher, FrameStore
from decentral.dissemination.reassembly import PAUSE, Arrivals
from decentral.dissemination.spread import all_equal
from decentral.errors import PayloadError
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import serve_requests
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header, seal
from decentral.wire.keys import Signer

BODY = 1000
SIZE = BODY + HEADER_NBYTES
SIGNERS = [Signer(bytes([n]) * 32) for n in range(1, 5)]


def frame(signer: Signer, round_: int, number: int = 0) -> Frame:
    header = Header(FrameKind.RESULT, bytes(32), 0, round_, 0, 0, 1, number, bytes(32), signer.peer, 1, 1)
    return seal(header, bytes(BODY), signer)


def test_frames_of_the_open_round_stay_though_they_are_more_than_the_capacity():
    store = FrameStore(2 * SIZE)
    past = [frame(signer, 4) for signer in SIGNERS[:2]]
    for one in past:
        store.add(one)
    store.open(5, 8 * SIZE)
    needed = [frame(signer, 5) for signer in SIGNERS]
    assert [store.add(one) for one in needed] == [[], [], [], []]
    assert all(one.hash in store for one in needed)
    assert not any(one.hash in store for one in past)


def test_a_flooder_pushes_out_its_own_frames_only_and_memory_stays_bounded():
    store = FrameStore(2 * SIZE)
    store.open(5, 8 * SIZE)
    honest = [frame(signer, 5) for signer in SIGNERS[1:]]
    for one in honest:
        store.add(one)
    flood = [frame(SIGNERS[0], 5, number) for number in range(PER_SENDER)]
    dropped = [key for one in flood for key in store.add(one)]
    assert store.nbytes <= 8 * SIZE
    assert all(one.hash in store for one in honest)
    assert set(dropped) <= {one.hash for one in flood}


def test_one_sender_may_have_so_many_frames_in_a_round():
    store = FrameStore(1 << 30)
    for number in range(PER_SENDER):
        store.add(frame(SIGNERS[0], 5, number))
    with pytest.raises(PayloadError, match="more than 64 frames of one sender"):
        store.add(frame(SIGNERS[0], 5, PER_SENDER))


class Rounds:
    """A ``Receiver`` whose chain is at ``round``."""

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.taken: list[bytes] = []

    def chain_head(self):
        return SimpleNamespace(round=self.round)

    def spawn(self, work, *args):
        raise AssertionError("nothing is passed on here")

    async def take(self, data, wanted=None):
        self.taken.append(wanted)


@asynccontextmanager
async def asking_peer():
    """A peer that asks, the round it is in, what its owner pushes, when it was asked, and until when it is silent."""
    network, asked, silence = MemoryNetwork(latency=0.02), [], anyio.Event()
    me, owner = (network.transport(signer) for signer in SIGNERS[:2])
    body = frame(SIGNERS[1], 5)

    async def answer(peer, data):
        asked.append(anyio.current_time())
        await silence.wait()
        return body.data

    async def work(function, *args):
        return function(*args)

    serve_requests(owner, FETCH, answer, limit=1 << 16)
    receiver, arrivals = Rounds(4), Arrivals()
    broadcast = ChunkedBroadcast(me, me.peer, arrivals, all_equal, receiver)
    fetcher = FrameFetcher(me, FrameStore(1 << 20), arrivals, broadcast, receiver, work, 1 << 16)
    async with me, owner:
        await me.connect(owner.peer, owner.addresses())
        yield SimpleNamespace(
            fetcher=fetcher,
            rounds=receiver,
            arrivals=arrivals,
            asked=asked,
            silence=silence,
            owner=owner.peer,
            wanted=Fetch(body.hash, owner.peer, 5, (owner.peer,)),
        )


async def test_a_frame_that_did_not_come_is_asked_for(virtual_time):
    async with asking_peer() as asking:
        asking.silence.set()
        await asking.fetcher.fetch(asking.wanted)
        assert asking.rounds.taken == [asking.wanted.frame]


async def test_a_frame_of_a_round_that_is_over_is_not_asked_for_when_its_owner_has_done_with_the_next_one(virtual_time):
    """Five peers waited for the end of a thin one's push, and had all of the frame before sent again."""
    async with asking_peer() as asking:
        async with anyio.create_task_group() as group:
            asking.arrivals.piece(asking.owner)  # of this frame, of which no more comes
            group.start_soon(asking.fetcher.fetch, asking.wanted)
            await anyio.sleep(PAUSE / 2)
            asking.rounds.round = 5
            asking.fetcher.forget_before(6)
            for _ in range(4):  # the next frame
                asking.arrivals.piece(asking.owner)
                await anyio.sleep(PAUSE / 2)
        assert asking.asked == []


async def test_an_answer_is_not_waited_for_when_its_round_is_over(virtual_time):
    async with asking_peer() as asking:
        async with anyio.create_task_group() as group:
            group.start_soon(asking.fetcher.fetch, asking.wanted)
            await anyio.sleep(1)
            asking.rounds.round = 5
            asking.fetcher.forget_before(6)
            began = anyio.current_time()
        assert anyio.current_time() - began < 0.1
        assert (len(asking.asked), asking.rounds.taken) == (1, [])
        asking.silence.set()


async def test_who_catches_up_waits_for_frames_of_rounds_that_are_over_elsewhere(virtual_time):
    async with asking_peer() as asking:
        asking.fetcher.forget_before(5)  # what was applied here last
        async with anyio.create_task_group() as group:
            group.start_soon(asking.fetcher.ask, asking.owner, asking.wanted.frame, asking.owner, 5)
            await anyio.sleep(1)
            asking.fetcher.forget_before(5)
            asking.silence.set()
        assert asking.rounds.taken == [asking.wanted.frame]


async def test_a_request_that_is_carried_out_after_its_round_asks_nobody(virtual_time):
    async with asking_peer() as asking:
        asking.rounds.round = 5
        await asking.fetcher.fetch(asking.wanted)
        assert asking.asked == []


async def test_a_frame_that_ends_its_round_is_taken_to_the_end(virtual_time):
    """What takes it applies the commit and tidies up after it, requests of that round among the rest."""
    async with asking_peer() as asking:
        asking.silence.set()
        take, taken = asking.rounds.take, []

        async def take_and_decide(data, wanted=None):
            asking.rounds.round = 5
            asking.fetcher.forget_before(6)
            await anyio.sleep(1)
            await take(data, wanted)
            taken.append(wanted)

        asking.rounds.take = take_and_decide
        await asking.fetcher.fetch(asking.wanted)
        assert taken == [asking.wanted.frame]
