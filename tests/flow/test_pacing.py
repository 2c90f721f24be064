"""The schedule alone: what passes in how much time, in which order, whatever is asked."""

from __future__ import annotations

import random
from contextlib import ExitStack
from itertools import accumulate, pairwise

import anyio
import pytest
import trio

from decentral.flow.pacing import (
    BURST,
    EXPRESS_BURST,
    EXPRESS_SHARE,
    FEW,
    FIRST,
    HASTE,
    KEPT,
    SAMPLES,
    SECONDS,
    WINDOW,
    InFlight,
    Schedule,
    SendQueue,
    UplinkMeter,
    Window,
    lease_bits,
    order_after,
)

pytestmark = pytest.mark.usefixtures("virtual_time")

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


def test_timely_bytes_go_before_bulk_which_keeps_its_share():
    schedule, now, moved = Schedule(RATE, 0.0), 0.0, {True: 0, False: 0}
    turns = {timely: schedule.ask(A, 20_000, 0.0, timely=timely) for timely in (False, True)}
    while now < 60.0:
        for timely, turn in turns.items():
            if turn.granted:
                moved[timely] += turn.nbytes
                turns[timely] = schedule.ask(A if timely else B, 20_000, now, timely=timely)
        now += 0.005
        schedule.due(now)
    assert sum(moved.values()) == pytest.approx(60 * RATE, rel=0.02)
    assert moved[False] / moved[True] == pytest.approx(1 / 3, rel=0.05)


def test_what_is_timely_overtakes_all_bulk_that_waits():
    schedule = Schedule(RATE, 0.0)
    while schedule.ask(A, 50_000, 0.0).granted:
        pass
    waiting = [schedule.ask(A, 50_000, 0.0) for _ in range(50)]
    timely = schedule.ask(B, 50_000, 0.0, timely=True)
    assert schedule.head is timely
    schedule.drop(timely)
    assert schedule.head is not timely
    assert not any(turn.granted for turn in waiting)


def test_no_order_of_asks_moves_more_than_the_rate_and_its_bursts():
    for seed in range(8):
        generator = random.Random(seed)
        schedule, now, waiting, moved = Schedule(RATE, 0.0), 0.0, [], []
        for _ in range(2000):
            now += generator.expovariate(1 / 0.01)
            peer, nbytes = generator.choice((A, B, C)), generator.randint(1, 65536)
            kinds = {"urgent": generator.random() < 0.3, "timely": generator.random() < 0.3}
            turn = schedule.ask(peer, nbytes, now, **kinds)
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


# ---- the queue of frames ----
#
# Frames begun one after another: as fast as the uplink carries them, whoever does not take his.

NBYTES = 100_000


async def knowing(rate):
    """Return a queue whose frames arrived one after another at ``rate`` before."""
    turns = SendQueue()
    if rate:
        line = Line(0.0, rate)
        await begun(turns, SAMPLES + 1, line.takes)
    return turns


async def begun(turns, count, takes):
    """When each of ``count`` frames began, in virtual time; ``takes(n)`` seconds after that the n-th has arrived."""
    times, start = [], anyio.current_time()

    async def one(number, sending):
        await anyio.sleep(takes(number))
        turns.arrive(sending)
        turns.end()

    async with anyio.create_task_group() as group:
        for number in range(count):
            sending = await turns.begin(NBYTES)
            times.append(anyio.current_time() - start)
            group.start_soon(one, number, sending)
    return times


class Line:
    """A line of so many bytes a second, and seconds until somebody at its end has said that a frame is there."""

    def __init__(self, trip, rate=RATE):
        self.trip, self.rate, self.free_at = trip, rate, 0.0

    def takes(self, number):
        """Take a frame; return the seconds until it is known to be there."""
        now = anyio.current_time()
        self.free_at = max(now, self.free_at) + NBYTES / self.rate
        return self.free_at + self.trip - now


async def test_all_begin_at_once_while_nobody_knows_what_the_uplink_carries():
    assert await begun(await knowing(None), 7, lambda n: 3.0) == [0.0] * 7


async def test_a_few_begin_at_once_and_then_as_many_as_the_uplink_carries():
    times = await begun(await knowing(RATE), 30, lambda n: 10.0)
    assert times[:FEW] == [0.0] * FEW
    gaps = [b - a for a, b in pairwise(times[FEW:])]
    assert gaps == pytest.approx([NBYTES / (HASTE * RATE)] * len(gaps))


async def test_where_the_estimate_is_far_too_low_a_few_are_always_under_way():
    times = await begun(await knowing(RATE / 1000), 12, lambda n: 1.0)
    assert all(time < n // FEW + 1e-6 for n, time in enumerate(times))


async def test_peers_that_take_nothing_hold_nobody_up():
    times = await begun(await knowing(RATE), 30, lambda n: 1e6 if n < FEW else 0.1)
    assert times[-1] <= (30 - FEW) * NBYTES / (HASTE * RATE)


@pytest.mark.parametrize("trip", [0.0, 0.2, 1.0])
async def test_trips_make_no_line_slower_however_few_frames_a_round_has(trip):
    turns = await knowing(RATE)
    for _ in range(20):
        line, start = Line(trip), anyio.current_time()
        await begun(turns, 20, line.takes)
        sent = line.free_at - start
        assert sent == pytest.approx(20 * NBYTES / RATE), "it never stood still"
        assert turns.rate == pytest.approx(RATE, rel=0.1)


@pytest.mark.parametrize("count", [3, 7])
async def test_a_line_of_which_a_round_fills_but_a_part_becomes_no_slower_in_any(count):
    """Eight peers at 1 Gbit/s: seven slices of 1.4 MB take 76 ms, and the way there and back longer."""
    turns = await knowing(None)
    for _ in range(20):
        line, start = Line(20 * count * NBYTES / RATE), anyio.current_time()
        await begun(turns, count, line.takes)
        assert line.free_at - start == pytest.approx(count * NBYTES / RATE, rel=0.01), "it never stood still"
    assert turns.rate == pytest.approx(RATE, rel=0.01)


async def test_answers_that_come_together_tell_of_no_line_that_is_much_faster():
    turns, start = await knowing(RATE), anyio.current_time()
    await begun(turns, 20, lambda _: start + 5.0 - anyio.current_time())
    assert turns.rate <= 1.01 * HASTE * RATE


async def test_a_line_that_became_ten_times_as_fast_is_full_again_in_the_fourth_round():
    turns, last = await knowing(RATE / 10), 0.0
    for _ in range(4):
        line, start = Line(0.2), anyio.current_time()
        await begun(turns, 20, line.takes)
        last = line.free_at - start
    assert last == pytest.approx(20 * NBYTES / RATE, rel=0.1)


def test_each_peer_begins_with_the_next_so_that_nobody_receives_from_two_at_once():
    peers = [bytes([n]) * 32 for n in range(5)]
    orders = [order_after(reversed(peers), peer)[:-1] for peer in peers]
    assert all(set(turn) == set(peers) for turn in zip(*orders, strict=True))
    assert order_after(peers, peers[2]) == [peers[3], peers[4], peers[0], peers[1], peers[2]]
    assert order_after(peers[:2], peers[2]) == peers[:2]


# ---- the window ----
#
# How much may be under way on each stream and on all together, and that no stream waits for another's peer.

LINE = 1000.0


async def at_once():
    """Somebody says that it has handled a body."""
    return 0.0


@pytest.mark.parametrize("number", [1, 3, 10])
async def test_streams_that_are_open_share_what_the_uplink_carries(number):
    window, heard = Window(lambda: LINE), []
    with ExitStack() as stack:
        flights = [stack.enter_context(InFlight(window, at_once, heard.append)) for _ in range(number)]
        for flight in flights:
            while not heard:
                await flight.begin(10)
                assert window.nbytes <= SECONDS * LINE
            heard.clear()
        assert SECONDS * LINE - 20 * number <= window.nbytes
        assert window.streams == number
    assert (window.nbytes, window.streams) == (0, 0)


async def test_what_some_have_under_way_is_no_room_for_those_that_come_later():
    window, heard = Window(lambda: LINE), []
    with InFlight(window, at_once, heard.append) as first:
        await first.begin(int(SECONDS * LINE))
        with InFlight(window, at_once, heard.append) as second:
            await second.begin(10)  # one goes always
            assert not heard
            await second.begin(11)
            assert [landing.nbytes for landing in heard] == [10]


async def test_a_body_larger_than_the_share_goes_alone():
    window, heard = Window(lambda: 1.0), []
    with InFlight(window, at_once, heard.append) as flight:
        for nbytes in (100, 200, 300):
            await flight.begin(nbytes)
        assert [landing.nbytes for landing in heard] == [100, 200]


async def test_an_uplink_that_is_not_known_keeps_no_first_piece_waiting():
    window, heard = Window(lambda: None), []
    with InFlight(window, at_once, heard.append) as flight:
        await flight.begin(FIRST // 2)
        await flight.begin(FIRST // 2)
        assert not heard
        await flight.begin(1)
        assert [landing.nbytes for landing in heard] == [FIRST // 2]


@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0, 0.0), (3.0, 0.0, 2.0, 1.0), (0.5, 3.0, 0.1, 2.5)])
async def test_when_a_body_was_handled_does_not_depend_on_how_long_its_answer_took(delays):
    """They wait behind what the other side sends, for seconds: a link of 238 kB/s was taken for one of 138."""
    window, heard = Window(lambda: 1e9), []
    handled = [1.0, 2.0, 3.0, 4.0]  # s after the stream was open over there, 0.1 s after it was here
    come = list(accumulate((0.1 + since + delay for since, delay in zip(handled, delays, strict=True)), max))
    answers = iter(zip(handled, come, strict=True))

    async def hear():
        since, comes = next(answers)
        await trio.sleep_until(began + comes)
        return since

    began = trio.current_time()
    with InFlight(window, hear, heard.append) as flight:
        for _ in handled:
            await flight.begin(10)
        await flight.land()
    opened = list(accumulate((comes - since for since, comes in zip(handled, come, strict=True)), min))
    assert [landing.opened - began for landing in heard] == pytest.approx(opened)
    assert [landing.at - landing.opened for landing in heard] == pytest.approx(handled)


@pytest.mark.parametrize("claims", [[0.0, 0.0, 0.0], [9.0, 9.0, 9.0], [9.0, 0.0, 5.0]])
async def test_no_body_was_handled_before_it_left_or_after_its_answer_whatever_clock_the_other_side_has(claims):
    window, heard, spans = Window(lambda: 1e9), [], []
    left = iter(claims)

    async def hear():
        await trio.sleep(1.0)
        return next(left)

    with InFlight(window, hear, heard.append) as flight:
        for _ in claims:
            began = trio.current_time()
            await flight.begin(10)
            await flight.land()
            spans.append((began, trio.current_time()))
    assert all(began <= landing.at <= ended for landing, (began, ended) in zip(heard, spans, strict=True))
    assert all(landing.opened >= spans[0][0] for landing in heard)


# ---- the estimate of an uplink, from when pieces began and ended ----


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


def deliver(meter: UplinkMeter, *frames: tuple[float, float]) -> None:
    """Frames, each of so many bytes that arrived in so many seconds."""
    for nbytes, seconds in frames:
        meter.begin_delivery()
        meter.add_delivery(round(nbytes), seconds)


def test_copies_that_arrived_are_counted_until_each_and_the_slow_receiver_that_comes_last_spoils_nothing():
    meter = UplinkMeter()
    meter.begin_delivery()
    for copies, seconds in ((1, 2.1), (5, 2.2), (6, 2.4), (7, 30.0)):
        meter.add_delivery(copies * 870_000, seconds)
    assert meter.bytes_per_second == 6 * 870_000 / 2.4


@pytest.mark.parametrize("accident", [0.4, 2.6, 9.0])
def test_one_of_four_frames_that_was_fast_or_slow_is_an_accident(accident):
    meter = UplinkMeter()
    for seconds in (2.0, 2.0, accident, 2.0, 2.0, 2.0, accident, 2.0):
        deliver(meter, (5e6, seconds))
        assert meter.bytes_per_second == 2_500_000


@pytest.mark.parametrize(("seconds", "frames"), [(3.0, 3), (6.0, 2), (12.0, 1)])
def test_a_line_that_became_slow_is_found_out_by_three_frames_or_by_one_that_takes_ten_seconds(seconds, frames):
    meter = UplinkMeter()
    deliver(meter, *[(5e6, 2.0)] * 8, *[(3e5, seconds)] * (frames - 1))
    assert meter.bytes_per_second == 2_500_000
    deliver(meter, (3e5, seconds))
    assert meter.bytes_per_second == 3e5 / seconds


@pytest.mark.parametrize(("seconds", "frames"), [(2.0, 2), (12.0, 1)])
def test_a_line_that_became_fast_is_found_out_by_two_frames_or_by_one_long_one(seconds, frames):
    meter = UplinkMeter()
    deliver(meter, *[(25e4 * seconds, seconds)] * 8, *[(25e5 * seconds, seconds)] * frames)
    assert meter.bytes_per_second == 2_500_000


def test_small_frames_show_no_slower_line_than_larger_ones_did():
    """They take a trip or two: of parts of a model, some are small."""
    meter = UplinkMeter()
    deliver(meter, *[(5e6, 2.0)] * 2, *[(2e4, 0.1)] * 20)
    assert meter.bytes_per_second == 2_500_000


def test_what_arrives_at_once_is_as_fast_as_it_would_be_in_a_quarter_of_a_second():
    meter = UplinkMeter()
    deliver(meter, *[(2e5, 0.001)] * 3)
    assert meter.bytes_per_second == 800_000
    deliver(meter, *[(5e6, 2.0)] * 2)
    assert meter.bytes_per_second == 2_500_000


def test_a_lease_tells_two_digits():
    told = {None: 0, 0.0: 0, 1.0: 8, 625_000.0: 5_000_000, 623_456.0: 5_000_000, 12_345_678.0: 99_000_000}
    for rate, bits in told.items():
        assert lease_bits(rate) == bits


def test_what_arrived_counts_more_than_what_was_taken_for_a_busy_machine_s_buffers_make_pieces_wait():
    meter = UplinkMeter()
    meter.begin(0.0)
    meter.end(0.0, WINDOW + 0.1, 90_000_000)
    assert meter.bytes_per_second > 10_000_000
    meter.begin_delivery()
    meter.add_delivery(5_000_000, 2.0)
    assert meter.bytes_per_second == 2_500_000
