"""What strangers may hold of this process."""

from __future__ import annotations

from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest

from decentral.errors import ConfigError, TransportError
from decentral.flow.upload import KEPT, WINDOW, Budget, Changes, Limits, Repeats, UplinkMeter, lease_bits

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


def test_one_peers_bytes_wait_while_anothers_pass():
    budget = Budget(Limits(peer_nbytes=10, total_nbytes=100, small_nbytes=1))
    order = []

    async def script():
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

    anyio.run(script)


def test_a_cancelled_reservation_gives_its_bytes_back():
    budget = Budget(Limits(peer_nbytes=10, small_nbytes=1))

    async def script():
        with anyio.CancelScope() as scope:
            async with budget.bytes_of(ONE, 10):
                scope.cancel()
                await anyio.sleep_forever()
        assert budget.held(ONE) == (0, 0)

    anyio.run(script)


def strangers(**limits) -> Budget:
    """The budget of a peer whose run has one member, ``ONE``."""
    budget = Budget(Limits(**limits))
    budget.prefer({ONE})
    return budget


def test_outsiders_however_many_leave_members_their_streams_and_bytes():
    budget = strangers(total_streams=4, outsider_streams=2, total_nbytes=100, outsider_nbytes=50, small_nbytes=1)
    passed = []

    async def hold(peer):
        with suppress(TransportError), budget.inbound(peer):
            async with budget.bytes_of(peer, 30):
                passed.append(peer)
                await anyio.sleep_forever()

    async def script():
        async with anyio.create_task_group() as group:
            for number in range(100, 120):
                group.start_soon(hold, bytes([number]) * 32)
                await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                group.start_soon(hold, ONE)
            await anyio.wait_all_tasks_blocked()
            assert passed.count(ONE) == 3
            group.cancel_scope.cancel()

    anyio.run(script)


def test_when_outsiders_have_all_their_streams_the_oldest_of_who_has_most_makes_room():
    budget = strangers(outsider_streams=4)
    gone = []

    async def hold(name, peer):
        try:
            with budget.inbound(peer):
                await anyio.sleep_forever()
        except TransportError:
            gone.append(name)

    async def script():
        async with anyio.create_task_group() as group:
            for name, peer in (("a", OTHER), ("b", b"3" * 32), ("c", b"3" * 32), ("d", OTHER), ("e", b"3" * 32)):
                group.start_soon(hold, name, peer)
                await anyio.wait_all_tasks_blocked()
            assert gone == ["a"]
            group.start_soon(hold, "f", b"4" * 32)
            await anyio.wait_all_tasks_blocked()
            assert gone == ["a", "b"]
            group.cancel_scope.cancel()

    anyio.run(script)


def test_outsiders_that_come_all_at_once_make_room_all_the_same():
    budget = strangers(outsider_streams=4)
    standing = set()

    async def hold(number):
        with suppress(TransportError), budget.inbound(bytes([number]) * 32):
            standing.add(number)
            try:
                await anyio.sleep_forever()
            finally:
                standing.discard(number)

    async def script():
        async with anyio.create_task_group() as group:
            for number in range(100, 200):
                group.start_soon(hold, number)
            await anyio.wait_all_tasks_blocked()
            assert len(standing) == 4
            group.cancel_scope.cancel()

    anyio.run(script)


def test_a_small_body_never_waits_behind_a_large_one():
    budget = Budget(Limits(peer_nbytes=100, small_nbytes=10))
    order = []

    async def script():
        done = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(take, budget, order, "frame", ONE, 1000, done)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(take, budget, order, "slice", ONE, 11)
            group.start_soon(take, budget, order, "vote", ONE, 10)
            await anyio.wait_all_tasks_blocked()
            assert order == ["frame", "vote"]
            done.set()

    anyio.run(script)


# ---- test changes ----
#
# Something that changes again and again: who is woken, and by which change.

backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@backends
def test_a_change_wakes_everybody_that_waits_and_nobody_that_comes_later(backend: str) -> None:
    changes, woken = Changes(), []

    async def wait(name: str) -> None:
        await changes.next()
        woken.append(name)

    async def script() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "one")
            group.start_soon(wait, "two")
            await anyio.wait_all_tasks_blocked()
            changes.tell()
            group.start_soon(wait, "late")
            await anyio.wait_all_tasks_blocked()
            assert sorted(woken) == ["one", "two"]
            changes.tell()
        assert woken[2:] == ["late"]

    anyio.run(script, backend=backend)


@backends
def test_a_change_during_a_look_is_not_missed(backend: str) -> None:
    changes = Changes()

    async def script() -> None:
        coming = changes.coming()
        changes.tell()  # while something takes its time to look
        with anyio.fail_after(1):
            await coming.wait()

    anyio.run(script, backend=backend)


def test_a_change_may_be_told_before_there_is_a_loop() -> None:
    Changes().tell()


# ---- test repeats ----
#
# To whom the same thing is said again, and when.

A, B = b"a" * 32, b"b" * 32


def times_told(repeats: Repeats, seconds: int, said: object = "let me in") -> list[int]:
    return [second for second in range(seconds) if repeats.due(said, [A], float(second))]


def test_each_wait_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    assert times_told(Repeats(1.0, 8.0), 40) == [0, 1, 3, 7, 15, 23, 31, 39]


def test_who_comes_later_is_told_at_once_and_nobody_else_is() -> None:
    repeats = Repeats(1.0, 8.0)
    assert repeats.due("let me in", [A], 0.0) == [A]
    assert repeats.due("let me in", [A, B], 0.5) == [B]
    assert repeats.due("let me in", [A, B], 1.0) == [A]


def test_something_new_is_said_to_all_at_once() -> None:
    repeats = Repeats(1.0, 8.0)
    assert times_told(repeats, 6) == [0, 1, 3]
    assert repeats.due("let me in, I have caught up", [A], 6.0) == [A]
    assert repeats.due("let me in, I have caught up", [A], 7.0) == [A], "it waits as short as at first"


# ---- test uplink ----
#
# The estimate of an uplink, from when pieces began and ended.


def send(meter: UplinkMeter, now: float, nbytes: int, seconds: float) -> float:
    meter.begin(now)
    meter.end(now, now + seconds, nbytes)
    return now + seconds


def test_bytes_that_a_buffer_swallows_say_nothing():
    meter, now = UplinkMeter(), 0.0
    for _ in range(100_000):
        now = send(meter, now, 65536, 0.0005)
    assert meter.bytes_per_second is None or meter.bytes_per_second == 0
    assert lease_bits(meter.bytes_per_second) == 0


def test_a_link_that_is_kept_busy_has_its_rate_and_pauses_do_not_count():
    meter, now = UplinkMeter(), 0.0
    for _ in range(200):
        now = send(meter, now, 50_000, 0.05) + 0.2
    assert meter.bytes_per_second == pytest.approx(1e6, rel=0.02)


def test_streams_at_once_add_up_to_the_link():
    meter, now = UplinkMeter(), 0.0
    meter.begin(now)
    meter.begin(now)
    for _ in range(100):
        meter.end(now, now + 0.1, 50_000)
        meter.end(now, now + 0.1, 50_000)
        now += 0.1
        meter.begin(now)
        meter.begin(now)
    assert meter.bytes_per_second == pytest.approx(1e6, rel=0.02)


def test_the_fastest_of_the_last_windows_counts_and_a_link_that_became_slow_is_found_out():
    meter, now = UplinkMeter(), 0.0
    for rate in (1e6, 2e5):
        for _ in range(round(WINDOW / 0.1)):
            now = send(meter, now, int(rate * 0.1), 0.1)
    assert meter.bytes_per_second == pytest.approx(1e6, rel=0.02), "one slow receiver is no slow uplink"
    for _ in range(round((KEPT + 1) * WINDOW / 0.1)):
        now = send(meter, now, 20_000, 0.1)
    assert meter.bytes_per_second == pytest.approx(2e5, rel=0.02)


def test_copies_that_arrived_are_counted_until_each_and_the_slow_receiver_that_comes_last_spoils_nothing():
    meter = UplinkMeter()
    meter.begin_delivery()
    for copies, seconds in ((1, 2.1), (5, 2.2), (6, 2.4), (7, 30.0)):
        meter.delivered(copies * 870_000, seconds)
    assert meter.bytes_per_second == 6 * 870_000 / 2.4
    for _ in range(KEPT):
        meter.begin_delivery()
        meter.delivered(870_000, 3.0)
    assert meter.bytes_per_second == 290_000, "a link that became slow is found out"


def test_a_lease_tells_two_digits():
    assert [lease_bits(rate) for rate in (None, 0.0, 1.0, 625_000.0, 623_456.0, 12_345_678.0)] == [
        0,
        0,
        8,
        5_000_000,
        5_000_000,
        99_000_000,
    ]


def test_what_arrived_counts_more_than_what_was_taken_for_a_busy_machine_s_buffers_make_pieces_wait():
    meter = UplinkMeter()
    meter.begin(0.0)
    meter.end(0.0, WINDOW + 0.1, 90_000_000)
    assert meter.bytes_per_second > 10_000_000
    meter.begin_delivery()
    meter.delivered(5_000_000, 2.0)
    assert meter.bytes_per_second == 2_500_000
