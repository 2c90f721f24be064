"""What arrived tells the uplink: never more than it carries, whatever comes late, out of order, or of other streams."""

from __future__ import annotations

import random

import pytest

from decentral.dissemination.broadcast import SURE, Deliveries
from decentral.flow.schedule import Ack
from decentral.flow.upload import UplinkMeter

RATE, PIECE = 250_000.0, 32_768


def landings(seconds: float, opened: float = 100.0) -> list[Ack]:
    count = int(seconds * RATE / PIECE)
    return [Ack(PIECE, opened, opened + (n + 1) * PIECE / RATE) for n in range(count)]


def told(found: list[Ack], whole: int = -1) -> float | None:
    """What is thought of the uplink after these; the one at ``whole`` is the last of a copy."""
    meter = UplinkMeter()
    deliveries = Deliveries(meter)
    with deliveries.of_a_frame():
        for number, landing in enumerate(found):
            deliveries.arrived(landing, number == whole)
    return meter.bytes_per_second


@pytest.mark.parametrize("seed", range(4))
def test_an_even_stream_tells_the_rate_in_whatever_order_its_answers_come(seed):
    found = landings(8.0)
    random.Random(seed).shuffle(found)
    assert 0.97 * RATE <= told(found) <= RATE


def test_it_is_known_after_a_second_and_not_before():
    found = landings(1.2)
    assert told([landing for landing in found if landing.at < 100.0 + 0.7 * SURE]) is None
    assert told(found) == pytest.approx(RATE, rel=0.15)


def test_a_whole_copy_tells_it_sooner():
    found = landings(0.5)
    assert told(found, whole=len(found) - 1) == pytest.approx(RATE)


def test_a_stream_that_begins_slowly_tells_the_rate_in_the_end():
    found = [Ack(PIECE, 100.0, landing.at + 2.0) for landing in landings(30.0)]
    assert 0.9 * RATE <= told(found) <= RATE


def test_a_stream_that_was_open_earlier_than_thought_does_not_make_the_uplink_a_faster_one():
    """Its first answers took two seconds longer than the others."""
    late = [Ack(PIECE, 102.0, landing.at + 2.0) for landing in landings(1.0)]
    rest = [landing for landing in landings(8.0) if landing.at > 101.0]
    assert 0.7 * RATE <= told([*late, *rest]) <= 1.01 * RATE


def test_what_is_passed_on_counts_while_a_frame_is_under_way_and_at_no_other_time():
    meter = UplinkMeter()
    deliveries = Deliveries(meter)
    for landing in landings(2.0):
        deliveries.passed_on(landing)
    with deliveries.of_a_frame():
        for turn, landing in enumerate(landings(8.0, 200.0)):
            if turn % 2:
                deliveries.arrived(landing, False)
            else:
                deliveries.passed_on(Ack(PIECE, 150.0, landing.at))
    assert 0.9 * RATE <= meter.bytes_per_second <= RATE
