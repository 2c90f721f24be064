"""Chunks from several donors over links with a rate, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import anyio
import pytest
import torch
import trio
import trio.testing

from decentral.dissemination.pull import LARGEST_WINDOW, Stripes, StripeSource, fetch_chunks
from decentral.errors import DecentralError, DiskError, PayloadError, TransportError
from decentral.state.snapshot import CHUNK_NBYTES, Assembler, Snapshot
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import Signer

STATE = "/test/state"
MBIT = 125_000.0  # bytes/s
CHUNKS = 100


@pytest.fixture(scope="module")
def snapshot() -> Snapshot:
    numbers = torch.arange(CHUNKS * CHUNK_NBYTES // 4 - 1000, dtype=torch.float32)
    return Snapshot({"anchor/0": numbers}, {})


class World:
    """A joiner and donors that serve one snapshot, each through a hook that may stall it or change its answer."""

    def __init__(self, snapshot: Snapshot, uplinks: list[float], downlink: float | None, latency: float = 0.04) -> None:
        self.snapshot = snapshot
        self.network = MemoryNetwork(latency=latency)
        me, *others = (Signer(bytes([n]) * 32) for n in range(len(uplinks) + 1))
        self.me = self.network.transport(me)
        self.donors = [self.network.transport(signer) for signer in others]
        self.hooks: dict[bytes, Callable[[int, bytes], Awaitable[bytes]]] = {}
        self.served = dict.fromkeys((donor.peer for donor in self.donors), 0)
        self.dropped: dict[bytes, Exception] = {}
        self.assembler = Assembler(snapshot.index)
        self.network.set_downlink(me.peer, downlink)
        for donor, uplink in zip(self.donors, uplinks, strict=True):
            self.network.set_uplink(donor.peer, uplink)
            serve_requests(donor, STATE, self._answers(donor.peer), limit=4)

    def _answers(self, donor: bytes) -> Callable[[bytes, bytes], Awaitable[bytes]]:
        async def answer(peer: bytes, data: bytes) -> bytes:
            number = int.from_bytes(data, "little")
            self.served[donor] += 1
            chunk = self.snapshot.chunk(number)
            return await self.hooks[donor](number, chunk) if donor in self.hooks else chunk

        return answer

    async def ask(self, donor: bytes, number: int) -> bytes:
        body = number.to_bytes(4, "little")
        return await request(self.me, donor, STATE, body, limit=CHUNK_NBYTES, timeout=30.0)

    def all(self) -> list[bytes]:
        return self.peers

    @property
    def peers(self) -> list[bytes]:
        return [donor.peer for donor in self.donors]

    def fetch(
        self, donors: Callable[[], list[bytes]] | None = None, script: Callable[[], Awaitable[None]] | None = None
    ) -> float:
        """Seconds that it took; raises what it raises."""

        async def main() -> float:
            async with AsyncExitStack() as stack, anyio.create_task_group() as group:
                for transport in (self.me, *self.donors):
                    await stack.enter_async_context(transport)
                if script is not None:
                    group.start_soon(script)
                try:
                    await fetch_chunks(self.assembler, self.ask, donors or self.all, self.dropped.__setitem__)
                except DecentralError as error:  # out of the group as it is
                    failed.append(error)
                took = anyio.current_time()
                group.cancel_scope.cancel()
                await stack.aclose()
            return took

        failed: list[DecentralError] = []
        took = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
        if failed:
            raise failed[0]
        return took

    def check(self) -> None:
        found, wanted = self.assembler.tensors()["anchor/0"], torch.arange(CHUNKS * CHUNK_NBYTES // 4 - 1000.0)
        assert torch.equal(found, wanted)

    def bound(self, *, rate: float) -> float:
        return self.snapshot.index.layout.nbytes / rate


@pytest.mark.parametrize(
    ("uplinks", "downlink"), [([5, 5, 5], 12.5), ([20, 20, 20], 50), ([2, 2, 2], 50), ([1, 1, 20], 50)]
)
def test_a_fetch_takes_little_more_than_the_narrowest_place_allows(snapshot, uplinks, downlink):
    world = World(snapshot, [up * MBIT for up in uplinks], downlink * MBIT)
    took = world.fetch()
    world.check()
    assert took <= 1.1 * world.bound(rate=min(sum(uplinks), downlink) * MBIT) + 0.25, "a round trip until it knows them"
    assert sum(world.served.values()) <= CHUNKS + 8, "at the end only is a chunk asked for twice"


def test_a_fast_link_with_a_long_delay_is_filled(snapshot):
    world = World(snapshot, [200 * MBIT] * 3, 400 * MBIT, latency=0.1)
    took = world.fetch()
    assert took <= 1.6 * world.bound(rate=400 * MBIT) + 6 * 0.4, "some round trips until the windows are open"


def test_a_donor_that_stalls_for_ever_costs_its_share_and_no_more(snapshot):
    world = World(snapshot, [10 * MBIT] * 3, 100 * MBIT)

    async def stall(number: int, chunk: bytes) -> bytes:
        if world.served[world.peers[1]] > 3:
            await anyio.sleep_forever()
        return chunk

    world.hooks[world.peers[1]] = stall
    took = world.fetch()
    world.check()
    assert took <= 1.15 * world.bound(rate=20 * MBIT), "not one of its 30 s time-outs was waited for"


def test_a_donor_that_dies_in_the_middle_leaves_its_chunks_to_the_others(snapshot):
    world = World(snapshot, [10 * MBIT] * 3, 100 * MBIT)

    async def die() -> None:
        await anyio.sleep(3.0)
        world.network.kill(world.peers[2])

    took = world.fetch(script=die)
    world.check()
    assert took <= 3.0 + 1.15 * (world.bound(rate=20 * MBIT) - 3.0)
    assert list(world.dropped) == [world.peers[2]]
    assert isinstance(world.dropped[world.peers[2]], TransportError)


def test_a_wrong_chunk_names_its_donor_and_changes_nothing(snapshot):
    world = World(snapshot, [10 * MBIT] * 3, 100 * MBIT)

    async def spoil(number: int, chunk: bytes) -> bytes:
        return chunk if number < 30 else bytes(len(chunk))

    world.hooks[world.peers[0]] = spoil
    world.fetch()
    world.check()
    assert list(world.dropped) == [world.peers[0]]
    assert isinstance(world.dropped[world.peers[0]], PayloadError)


def test_what_came_before_the_last_donor_failed_is_not_fetched_again(snapshot):
    world = World(snapshot, [10 * MBIT], 100 * MBIT)

    async def die() -> None:
        await anyio.sleep(10.0)
        world.network.kill(world.peers[0])

    with pytest.raises(TransportError, match="no donor is left"):
        world.fetch(script=die)
    came = CHUNKS - len(world.assembler.missing())
    assert 30 < came < 60
    again = World(snapshot, [10 * MBIT], 100 * MBIT)
    again.assembler = world.assembler
    again.fetch()
    again.check()
    assert sum(again.served.values()) == CHUNKS - came


def test_a_donor_that_comes_later_is_asked_too(snapshot):
    world = World(snapshot, [10 * MBIT] * 2, 100 * MBIT)
    took = world.fetch(donors=lambda: world.peers[: 1 if anyio.current_time() < 5.0 else 2])
    bound = world.bound(rate=10 * MBIT)
    assert took <= 5.0 + 1.15 * (bound - 5.0) / 2


def test_a_full_disk_ends_the_fetch_with_its_error(snapshot, monkeypatch):
    world = World(snapshot, [10 * MBIT], 100 * MBIT)

    def refuse(number: int, data: bytes) -> None:
        raise DiskError("no space left")

    monkeypatch.setattr(world.assembler, "add", refuse)
    with pytest.raises(DiskError, match="no space left"):
        world.fetch()


def test_the_same_donors_give_the_same_times(snapshot):
    def times() -> tuple[float, dict[bytes, int]]:
        world = World(snapshot, [5 * MBIT, 7 * MBIT, 9 * MBIT], 15 * MBIT)
        return world.fetch(), world.served

    (first, served), (second, again) = times(), times()
    assert first == pytest.approx(second, abs=1e-9)
    assert served == again


def test_a_window_grows_while_answers_are_quick_and_shrinks_when_they_queue():
    donor = StripeSource()
    for _ in range(8):
        donor.note_answer(0.2)
    assert donor.window == 9
    for _ in range(400):
        donor.note_answer(0.2 * donor.window / 2)  # a way that carries two chunks per 0.2 s
    assert 2 < donor.window < 6
    for _ in range(4000):
        donor.note_answer(0.1)
    assert donor.window == LARGEST_WINDOW


def test_a_chunk_is_asked_of_a_second_donor_only_when_that_one_will_be_sooner():
    stripes = Stripes([0, 1, 2])
    stripes.meet([b"quick", b"slow"])
    assert stripes.due(0.0) == [(b"quick", 0), (b"slow", 1)]
    assert stripes.note_chunk(b"quick", 0, 1.0) == []
    assert stripes.due(1.0) == [(b"quick", 2), (b"quick", 1)], "nothing is known of the slow one"
    assert stripes.note_chunk(b"quick", 1, 2.0) == [b"slow"]
    assert stripes.note_chunk(b"quick", 2, 2.0) == []
    assert stripes.due(2.0) == []
    stripes.meet([b"late"])
    assert stripes.due(2.0) == [], "of the late one neither"


def test_a_donor_that_failed_is_never_asked_again():
    stripes = Stripes([0, 1])
    stripes.meet([b"a"])
    stripes.due(0.0)
    assert stripes.drop(b"a") == [0]
    stripes.meet([b"a", b"b"])
    assert stripes.due(0.0) == [(b"b", 0)]
