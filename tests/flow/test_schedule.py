"""The schedule alone: what passes in how much time, in which order, whatever is asked."""

from __future__ import annotations

import random

import pytest

from decentral.flow.schedule import BURST, EXPRESS_BURST, EXPRESS_SHARE, Schedule

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
