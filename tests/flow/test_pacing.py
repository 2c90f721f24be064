"""The schedule alone: what passes in how much time, in which order, whatever is asked."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import accumulate, pairwise

import anyio
import pytest
import trio
import trio.testing

from decentral.flow.pacing import (
    BURST,
    EXPRESS_BURST,
    EXPRESS_SHARE,
    FEW,
    FIRST,
    HASTE,
    SECONDS,
    InFlight,
    Schedule,
    SendQueue,
    Window,
    order_after,
)

RATE = 1e6
A, B, C = (bytes([number]) * 32 for number in range(3))


def saturated(schedule: Schedule, seconds: float, streams: dict[str, tuple[bytes, int]]) -> dict[str, int]:
    """Bytes that each stream moved by ``seconds`` when each always wants to move its next piece."""
    moved = dict.fromkeys(streams, 0)
    turns, now = {}, 0.0
    while now < seconds:
        for name, (peer, nbytes) in streams.items():
            while name not in turns:
                turn = schedule.ask(peer, nbytes, now)
                if not turn.granted:
                    turns[name] = turn
                else:
                    moved[name] += nbytes
        now = schedule.next_at()
        granted = schedule.due(now)
        for name, turn in list(turns.items()):
            if turn in granted:
                moved[name] += turn.nbytes
                del turns[name]
    return moved


def test_a_minute_of_bulk_is_a_minute_of_the_rate():
    moved = saturated(Schedule(RATE, 0.0), 60.0, {"one": (A, 50_000)})
    assert sum(moved.values()) == pytest.approx(60 * RATE, rel=0.005)


def test_peers_get_equal_shares_whatever_the_number_of_their_streams_and_the_size_of_their_pieces():
    streams = {f"a{n}": (A, 50_000) for n in range(40)} | {"b": (B, 50_000), "c": (C, 3_000)}
    moved = saturated(Schedule(RATE, 0.0), 60.0, streams)
    of_a = sum(nbytes for name, nbytes in moved.items() if name.startswith("a"))
    assert (of_a, moved["b"], moved["c"]) == pytest.approx((20 * RATE,) * 3, rel=0.02)
    each = [nbytes for name, nbytes in moved.items() if name.startswith("a")]
    assert max(each) - min(each) <= 3 * 50_000, (
        "and the streams of one peer, but for the burst that the first one found"
    )


def test_who_was_silent_has_no_claim_to_what_the_others_moved_meanwhile():
    schedule = Schedule(RATE, 0.0)
    saturated(schedule, 30.0, {"a": (A, 50_000)})
    moved = saturated(schedule, 31.0, {"a": (A, 50_000), "b": (B, 50_000)})
    assert moved["b"] <= 30_000 + 31 * RATE * 0.6


def test_an_idle_link_saves_up_no_more_than_its_burst():
    schedule = Schedule(RATE, 0.0)
    moved, now = 0, 1000.0
    while schedule.ask(A, 10_000, now).granted:
        moved += 10_000
    assert moved <= BURST * RATE + 10_000


def test_an_urgent_byte_does_not_wait_and_bulk_pays_for_it():
    schedule = Schedule(RATE, 0.0)
    while schedule.ask(A, 50_000, 0.0).granted:
        pass
    before = schedule.next_at()
    assert schedule.ask(B, 100_000, 0.0, urgent=True).granted
    assert schedule.next_at() == pytest.approx(before + 0.1)


def test_a_flood_of_urgent_bytes_leaves_bulk_its_share_and_the_cap_whole():
    schedule, now, urgent, bulk = Schedule(RATE, 0.0), 0.0, 0, 0
    waiting = schedule.ask(A, 20_000, 0.0)
    flood = schedule.ask(B, 1, 0.0)
    while now < 60.0:
        if waiting.granted:
            bulk += waiting.nbytes
            waiting = schedule.ask(A, 20_000, now)
        while flood.granted:
            urgent += flood.nbytes
            flood = schedule.ask(B, 20_000, now, urgent=True)
        now += 0.005
        schedule.due(now)
    assert urgent + bulk <= RATE * (60 + BURST + EXPRESS_BURST) + 40_000
    assert bulk >= 0.9 * (1 - EXPRESS_SHARE) / 2 * RATE * 60, "half of what is not express"
    assert urgent >= EXPRESS_SHARE * RATE * 59


def test_no_order_of_asks_moves_more_than_the_rate_and_its_bursts():
    for seed in range(8):
        generator = random.Random(seed)
        schedule, now, waiting, moved = Schedule(RATE, 0.0), 0.0, [], []
        for _ in range(2000):
            now += generator.expovariate(1 / 0.01)
            peer, nbytes = generator.choice((A, B, C)), generator.randint(1, 65536)
            turn = schedule.ask(peer, nbytes, now, urgent=generator.random() < 0.3)
            if turn.granted:
                moved.append((now, nbytes))
            else:
                waiting.append(turn)
            if waiting and generator.random() < 0.1:
                schedule.drop(waiting.pop(generator.randrange(len(waiting))))
            moved += [(now, granted.nbytes) for granted in schedule.due(now)]
            waiting = [turn for turn in waiting if not turn.granted]
        for window in (1.0, 5.0):
            start, held = 0, 0
            for end, nbytes in moved:
                held += nbytes
                while moved[start][0] < end - window:
                    held -= moved[start][1]
                    start += 1
                assert held <= RATE * (window + BURST + EXPRESS_BURST) + 2 * 65536


def test_who_does_not_want_any_more_is_passed_over():
    schedule = Schedule(RATE, 0.0)
    while schedule.ask(A, 50_000, 0.0).granted:
        pass
    first, second = schedule.ask(B, 50_000, 0.0), schedule.ask(C, 50_000, 0.0)
    schedule.drop(first)
    assert second in schedule.due(10.0)
    assert not first.granted
    assert schedule.next_at() == float("inf"), "and nobody is left"


def test_strangers_that_come_and_go_leave_nothing_behind():
    schedule = Schedule(RATE, 0.0)
    for number in range(10_000):
        schedule.ask(number.to_bytes(32, "little"), 5000, float(number))
    assert schedule.num_remembered < 200


# ---- test send queue ----
#
# Frames begun one after another: as fast as the uplink carries them, whoever does not take his.

RATE_of_send_queue, NBYTES = 1e6, 100_000


def begun(uplink, count, takes):
    """When each of ``count`` frames began, in virtual time; ``takes(n)`` seconds after that the n-th has arrived."""
    times = []

    async def one(turns, number):
        await anyio.sleep(takes(number))
        turns.end()

    async def main():
        turns = SendQueue(lambda: uplink)
        async with anyio.create_task_group() as group:
            for number in range(count):
                await turns.begin(NBYTES)
                times.append(anyio.current_time())
                group.start_soon(one, turns, number)

    async def from_zero():
        began = anyio.current_time()
        await main()
        return began

    began = trio.run(from_zero, clock=trio.testing.MockClock(autojump_threshold=0))
    return [time - began for time in times]


def test_all_begin_at_once_while_nobody_knows_what_the_uplink_carries():
    assert begun(None, 7, lambda n: 3.0) == [0.0] * 7


def test_a_few_begin_at_once_and_then_as_many_as_the_uplink_carries():
    each = NBYTES / (HASTE * RATE_of_send_queue)
    assert begun(RATE_of_send_queue, 6, lambda n: 10.0)[:FEW] == [0.0] * FEW
    times = begun(RATE_of_send_queue, 30, lambda n: 10.0)[FEW:]
    assert [b - a for a, b in pairwise(times)] == pytest.approx([each] * (len(times) - 1))


def test_where_the_estimate_is_far_too_low_a_few_are_always_under_way():
    times = begun(RATE_of_send_queue / 1000, 12, lambda n: 1.0)
    assert times == pytest.approx([n // FEW for n in range(12)])


def test_peers_that_take_nothing_hold_nobody_up():
    times = begun(RATE_of_send_queue, 30, lambda n: 1e6 if n < FEW else 0.1)
    assert times[-1] == pytest.approx((30 - FEW) * NBYTES / (HASTE * RATE_of_send_queue), rel=0.1)


def test_each_peer_begins_with_the_next_so_that_nobody_receives_from_two_at_once():
    peers = [bytes([n]) * 32 for n in range(5)]
    orders = [order_after(reversed(peers), peer)[:-1] for peer in peers]
    assert all(set(turn) == set(peers) for turn in zip(*orders, strict=True))
    assert order_after(peers, peers[2]) == [peers[3], peers[4], peers[0], peers[1], peers[2]]
    assert order_after(peers[:2], peers[2]) == peers[:2]


# ---- test window ----
#
# How much may be under way on each stream and on all together, and that no stream waits for another's peer.

RATE_of_window = 1000.0


async def at_once():
    """Somebody says that it has handled a body."""
    return 0.0


@pytest.mark.parametrize("number", [1, 3, 10])
def test_streams_that_are_open_share_what_the_uplink_carries(number):
    window, heard = Window(lambda: RATE_of_window), []

    async def script():
        with ExitStack() as stack:
            flights = [stack.enter_context(InFlight(window, at_once, heard.append)) for _ in range(number)]
            for flight in flights:
                while not heard:
                    await flight.begin(10)
                    assert window.nbytes <= SECONDS * RATE_of_window
                heard.clear()
            assert SECONDS * RATE_of_window - 20 * number <= window.nbytes
            assert window.streams == number
        assert (window.nbytes, window.streams) == (0, 0)

    trio.run(script)


def test_what_some_have_under_way_is_no_room_for_those_that_come_later():
    window, heard = Window(lambda: RATE_of_window), []

    async def script():
        with InFlight(window, at_once, heard.append) as first:
            await first.begin(int(SECONDS * RATE_of_window))
            with InFlight(window, at_once, heard.append) as second:
                await second.begin(10)  # one goes always
                assert not heard
                await second.begin(11)
                assert [landing.nbytes for landing in heard] == [10]

    trio.run(script)


def test_a_body_larger_than_the_share_goes_alone():
    window, heard = Window(lambda: 1.0), []

    async def script():
        with InFlight(window, at_once, heard.append) as flight:
            for nbytes in (100, 200, 300):
                await flight.begin(nbytes)
            assert [landing.nbytes for landing in heard] == [100, 200]

    trio.run(script)


def test_an_uplink_that_is_not_known_keeps_no_first_piece_waiting():
    window, heard = Window(lambda: None), []

    async def script():
        with InFlight(window, at_once, heard.append) as flight:
            await flight.begin(FIRST // 2)
            await flight.begin(FIRST // 2)
            assert not heard
            await flight.begin(1)
            assert [landing.nbytes for landing in heard] == [FIRST // 2]

    trio.run(script)


@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0, 0.0), (3.0, 0.0, 2.0, 1.0), (0.5, 3.0, 0.1, 2.5)])
def test_when_a_body_was_handled_does_not_depend_on_how_long_its_answer_took(delays):
    """They wait behind what the other side sends, for seconds: a link of 238 kB/s was taken for one of 138."""
    window, heard = Window(lambda: 1e9), []
    handled = [1.0, 2.0, 3.0, 4.0]  # s after the stream was open over there, 0.1 s after it was here
    come = list(accumulate((0.1 + since + delay for since, delay in zip(handled, delays, strict=True)), max))
    answers = iter(zip(handled, come, strict=True))

    async def hear():
        since, comes = next(answers)
        await trio.sleep_until(began + comes)
        return since

    async def script():
        nonlocal began
        began = trio.current_time()
        with InFlight(window, hear, heard.append) as flight:
            for _ in handled:
                await flight.begin(10)
            await flight.land()

    began = 0.0
    trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))
    opened = list(accumulate((comes - since for since, comes in zip(handled, come, strict=True)), min))
    assert [landing.opened - began for landing in heard] == pytest.approx(opened)
    assert [landing.at - landing.opened for landing in heard] == pytest.approx(handled)


@pytest.mark.parametrize("claims", [[0.0, 0.0, 0.0], [9.0, 9.0, 9.0], [9.0, 0.0, 5.0]])
def test_no_body_was_handled_before_it_left_or_after_its_answer_whatever_clock_the_other_side_has(claims):
    window, heard, spans = Window(lambda: 1e9), [], []
    left = iter(claims)

    async def hear():
        await trio.sleep(1.0)
        return next(left)

    async def script():
        with InFlight(window, hear, heard.append) as flight:
            for _ in claims:
                began = trio.current_time()
                await flight.begin(10)
                await flight.land()
                spans.append((began, trio.current_time()))

    trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))
    assert all(began <= landing.at <= ended for landing, (began, ended) in zip(heard, spans, strict=True))
    assert all(landing.opened >= spans[0][0] for landing in heard)
