"""What strangers may hold of this process."""

from contextlib import suppress

import anyio
import pytest

from decentral.errors import ConfigError, TransportError
from decentral.flow.budget import PIECE, Answers, Budget, Limits

pytestmark = pytest.mark.usefixtures("virtual_time")

ONE, OTHER = b"1" * 32, b"2" * 32


async def take(budget, order, name, peer, nbytes, until=None):
    """Hold so many bytes until an event, and write down when they were had."""
    async with budget.bytes_of(peer, nbytes):
        order.append(name)
        if until is not None:
            await until.wait()


def test_a_limit_below_one_is_refused_by_name():
    with pytest.raises(ConfigError, match="peer_nbytes=0"):
        Limits(peer_nbytes=0)


def test_streams_are_limited_per_peer_and_in_total_and_freed_by_their_end():
    budget = Budget(Limits(peer_streams=1, total_streams=2))
    with budget.inbound(ONE):
        with pytest.raises(TransportError, match="1 inbound streams"), budget.inbound(ONE):
            pytest.fail("one too many")
        with budget.inbound(OTHER), pytest.raises(TransportError, match="2 in all"), budget.inbound(b"3" * 32):
            pytest.fail("one too many")
        with budget.inbound(OTHER):
            pass
    assert budget.held(ONE) == (0, 0)


async def test_one_peers_bytes_wait_while_anothers_pass():
    budget = Budget(Limits(peer_nbytes=10, total_nbytes=100, small_nbytes=1))
    order = []
    done = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(take, budget, order, "first", ONE, 8, done)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(take, budget, order, "second", ONE, 8)
        group.start_soon(take, budget, order, "other", OTHER, 8)
        await anyio.wait_all_tasks_blocked()
        assert order == ["first", "other"]
        done.set()
    assert order == ["first", "other", "second"]


async def test_a_cancelled_reservation_gives_its_bytes_back():
    budget = Budget(Limits(peer_nbytes=10, small_nbytes=1))
    with anyio.CancelScope() as scope:
        async with budget.bytes_of(ONE, 10):
            scope.cancel()
            await anyio.sleep_forever()
    assert budget.held(ONE) == (0, 0)


def strangers(**limits) -> Budget:
    """The budget of a peer whose run has one member, ``ONE``."""
    budget = Budget(Limits(**limits))
    budget.prefer({ONE})
    return budget


async def test_outsiders_however_many_leave_members_their_streams_and_bytes():
    budget = strangers(total_streams=4, outsider_streams=2, total_nbytes=100, outsider_nbytes=50, small_nbytes=1)
    passed = []

    async def hold(peer):
        with suppress(TransportError), budget.inbound(peer):
            async with budget.bytes_of(peer, 30):
                passed.append(peer)
                await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        for number in range(100, 120):
            group.start_soon(hold, bytes([number]) * 32)
            await anyio.wait_all_tasks_blocked()
        for _ in range(3):
            group.start_soon(hold, ONE)
        await anyio.wait_all_tasks_blocked()
        assert passed.count(ONE) == 3
        group.cancel_scope.cancel()


async def test_when_outsiders_have_all_their_streams_the_oldest_of_who_has_most_makes_room():
    budget = strangers(outsider_streams=4)
    gone = []

    async def hold(name, peer):
        try:
            with budget.inbound(peer):
                await anyio.sleep_forever()
        except TransportError:
            gone.append(name)

    async with anyio.create_task_group() as group:
        for name, peer in (("a", OTHER), ("b", b"3" * 32), ("c", b"3" * 32), ("d", OTHER), ("e", b"3" * 32)):
            group.start_soon(hold, name, peer)
            await anyio.wait_all_tasks_blocked()
        assert gone == ["a"]
        group.start_soon(hold, "f", b"4" * 32)
        await anyio.wait_all_tasks_blocked()
        assert gone == ["a", "b"]
        group.cancel_scope.cancel()


async def test_outsiders_that_come_all_at_once_make_room_all_the_same():
    budget = strangers(outsider_streams=4)
    standing = set()

    async def hold(number):
        with suppress(TransportError), budget.inbound(bytes([number]) * 32):
            standing.add(number)
            try:
                await anyio.sleep_forever()
            finally:
                standing.discard(number)

    async with anyio.create_task_group() as group:
        for number in range(100, 200):
            group.start_soon(hold, number)
        await anyio.wait_all_tasks_blocked()
        assert len(standing) == 4
        group.cancel_scope.cancel()


async def test_a_small_body_never_waits_behind_a_large_one():
    budget = Budget(Limits(peer_nbytes=100, small_nbytes=10))
    order = []
    done = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(take, budget, order, "frame", ONE, 1000, done)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(take, budget, order, "slice", ONE, 11)
        group.start_soon(take, budget, order, "vote", ONE, 10)
        await anyio.wait_all_tasks_blocked()
        assert order == ["frame", "vote"]
        done.set()


# ---- answers to outsiders ----

KIB = 1 << 10


async def fetch(answers, peer, nbytes, sent, rate):
    """One answer over a line of ``rate`` bytes/s, which a piece at a time is on; ``sent`` has (when, who, bytes)."""
    async with answers.turn(peer, nbytes) as pace:
        for at in range(0, nbytes, PIECE):
            await pace(min(PIECE, nbytes - at))
            await anyio.sleep(PIECE / rate)
            sent.append((anyio.current_time(), peer, PIECE))


def moved(sent, since, until):
    return sum(nbytes for at, _, nbytes in sent if since < at <= until)


async def leech(answers, number, sent, rate):
    while True:
        await fetch(answers, bytes([number]) * 32, 256 * KIB, sent, rate)


async def test_outsiders_have_a_tenth_together_while_own_frames_wait_and_all_while_none_does():
    answers, sent, rate = Answers(), [], 250e3
    answers.uplink = lambda: rate
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        with answers.own_frame():
            for number in range(8):
                group.start_soon(leech, answers, number, sent, rate)
            await anyio.sleep(100.0)
        assert 0.09 <= moved(sent, began, began + 100.0) / (100.0 * rate) <= 0.105
        await anyio.sleep(20.0)
        assert moved(sent, began + 101.0, began + 120.0) >= 0.9 * 19.0 * rate
        group.cancel_scope.cancel()


async def test_whoever_has_had_least_comes_first():
    answers, sent, rate = Answers(), [], 250e3
    answers.uplink = lambda: rate
    async with anyio.create_task_group() as group:
        with answers.own_frame():
            for number in range(8):
                group.start_soon(leech, answers, number, sent, rate)
            await anyio.sleep(100.0)
            began = anyio.current_time()
            await fetch(answers, b"n" * 32, 256 * KIB, sent, rate)
            assert anyio.current_time() - began <= 30.0, "one answer before it, and its own"
        group.cancel_scope.cancel()


async def test_who_does_not_read_holds_up_others_for_a_moment():
    answers = Answers()
    answers.uplink = lambda: 250e3

    async def never_reads(peer):
        async with answers.turn(peer, 256 * KIB):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(never_reads, ONE)
        await anyio.sleep(0.1)
        with anyio.fail_after(5.0):
            async with answers.turn(OTHER, 256 * KIB):
                pass
        group.cancel_scope.cancel()


async def test_short_answers_do_not_wait_until_there_are_many():
    answers = Answers()
    free = 0
    while answers.is_free(ONE, 8 * KIB):
        free += 1
    assert free == 8
    assert answers.is_free(OTHER, 8 * KIB)
    assert not answers.is_free(b"3" * 32, 32 * KIB), "a long one"
    await anyio.sleep(2.0)
    assert answers.is_free(ONE, 8 * KIB)


async def test_members_and_whoever_is_none_where_there_is_no_run_are_answered_at_once():
    budget = strangers()
    with budget.own_frame():
        for peer, one in ((ONE, budget), (OTHER, Budget())):
            async with one.answering(peer, 1 << 30) as pace:
                assert pace is None
        async with budget.answering(OTHER, 256 * KIB) as pace:
            assert pace is not None
