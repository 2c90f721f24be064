"""The estimate of an uplink, from when pieces began and ended."""

from __future__ import annotations

import pytest

from decentral.flow.pacing import KEPT, WINDOW, UplinkMeter, lease_bits


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
        meter.add_delivery(copies * 870_000, seconds)
    assert meter.bytes_per_second == 6 * 870_000 / 2.4
    for _ in range(KEPT):
        meter.begin_delivery()
        meter.add_delivery(870_000, 3.0)
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
    meter.add_delivery(5_000_000, 2.0)
    assert meter.bytes_per_second == 2_500_000
