"""What arrived tells the uplink: never more than it carries, whatever comes late, out of order, or of other streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from math import inf

import anyio
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from decentral.dissemination.broadcast import PIECED, SURE, Deliveries, Passing
from decentral.dissemination.spread import ERROR, FIRST_AGAIN, Line, Lines, Spread, Ways, spread, thin_last
from decentral.flow.pacing import Ack, UplinkMeter, Window
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import Signer

RATE, PIECE = 250_000.0, 32_768


def landings(seconds: float, opened: float = 100.0) -> list[Ack]:
    count = int(seconds * RATE / PIECE)
    return [Ack(PIECE, opened, opened + (n + 1) * PIECE / RATE) for n in range(count)]


def told(found: list[Ack], whole: int = -1) -> float | None:
    """What is thought of the uplink after these; the one at ``whole`` is the last of a copy."""
    meter = UplinkMeter()
    deliveries = Deliveries(meter)
    with deliveries.of_a_frame(1):
        for number, landing in enumerate(found):
            deliveries.arrived(landing, number == whole)
    return meter.bytes_per_second


@pytest.mark.parametrize("seed", range(4))
def test_an_even_stream_tells_the_rate_in_whatever_order_its_answers_come(seed):
    found = landings(8.0)
    random.Random(seed).shuffle(found)
    assert 0.97 * RATE <= told(found) <= RATE


def test_it_is_known_after_two_seconds_and_not_before():
    found = landings(1.2 * SURE)
    assert told([landing for landing in found if landing.at < 100.0 + 0.7 * SURE]) is None
    assert told(found) == pytest.approx(RATE, rel=0.15)


def test_a_whole_copy_tells_it_sooner():
    found = landings(0.5)
    assert told(found, whole=len(found) - 1) == pytest.approx(RATE)


@pytest.mark.parametrize("burst", [65_536, 262_144])
def test_what_a_shaper_lets_through_at_once_is_no_faster_line(burst):
    """The first of five copies told a line of 2.5 MB/s for one of 5.8."""
    rate, copy, meter = 2.5e6, 585_000, UplinkMeter()
    for _ in range(3):
        deliveries = Deliveries(meter)
        with deliveries.of_a_frame(5):
            for number in range(1, 6):
                deliveries.arrived(Ack(copy, 100.0, 100.0 + (number * copy - burst) / rate), True)
    assert rate <= meter.bytes_per_second <= (1 + ERROR / 2) * rate


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
    for landing in landings(SURE):
        deliveries.passed_on(landing)
    with deliveries.of_a_frame(1):
        for turn, landing in enumerate(landings(8.0, 200.0)):
            if turn % 2:
                deliveries.arrived(landing, False)
            else:
                deliveries.passed_on(Ack(PIECE, 150.0, landing.at))
    assert 0.9 * RATE <= meter.bytes_per_second <= RATE


# ---- test spread ----
#
# Who sends which part of a frame: nothing is lost, nobody sends more than it can, and all are done at once.

P = 10_000_000  # bytes
FAST = 2_500_000.0  # bytes/s


def lines(*rates: float) -> list[Line]:
    return [Line(rate, passes_on=True) for rate in rates]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_equal_peers_send_to_everybody_themselves(n):
    assert all(spread(P, lines(*[FAST] * n), me) is None for me in range(n))


@pytest.mark.parametrize("n", [4, 6, 10])
@pytest.mark.parametrize("wrong", [1 - ERROR, 0.5, 2.0, 2.3])
def test_on_equal_lines_nobody_passes_anything_on_whichever_one_of_them_is_estimated_wrongly(n, wrong):
    peers = lines(*[FAST] * (n - 1), wrong * FAST)
    assert all(spread(P, peers, me) is None for me in range(n - 1))


def test_a_thin_peer_sends_each_part_once_and_the_others_send_as_before():
    peers = lines(*[FAST] * 7, FAST / 10)
    assert all(spread(P, peers, me) is None for me in range(7))
    way = spread(P, peers, 7)
    assert way is not None
    assert way.direct == 0
    assert way.passed[7] == 0
    assert max(way.passed) - min(way.passed[:7]) <= 1


def test_what_the_own_uplink_still_carries_goes_directly():
    way = spread(P, lines(*[FAST] * 7, FAST / 2), 7)
    assert way is not None
    assert P / 10 < way.direct < P


# ---- what rounds took, by either way ----


def ways_of(rounds: int, took: Callable[[int, bool], float], ways: Ways | None = None) -> list[bool]:
    """The ways of so many frames, which ``took`` so many times what sending to everybody should."""
    ways, went = ways or Ways(), []
    for number in range(rounds):
        went.append(ways.choose())
        ways.took(went[-1], took(number, went[-1]))
    return went


def test_a_peer_for_which_passing_on_turned_out_slower_stops_and_tries_ever_more_rarely():
    went = ways_of(300, lambda number, by_others: 0.8 if by_others else 0.5)
    tried = [number for number, by_others in enumerate(went) if by_others]
    assert tried == [0, *accumulate([1 + FIRST_AGAIN, 16, 32, 64, 128])]


def test_a_peer_that_passing_on_helps_by_more_than_rates_are_wrong_never_sends_to_everybody():
    assert all(ways_of(300, lambda number, by_others: 0.4 if by_others else 1.0))


def test_where_rates_could_make_up_the_gain_sending_to_everybody_is_tried_ever_more_rarely():
    went = ways_of(300, lambda number, by_others: 0.7 if by_others else 1.0)
    assert [number for number, by_others in enumerate(went) if not by_others][:3] == [1, 1 + 2 * FIRST_AGAIN, 49]


def test_a_line_that_changed_is_found_out_either_way():
    ways = Ways()
    for others in (2.0, 0.4, 2.0):
        went = ways_of(160, lambda number, by_others, others=others: others if by_others else 1.0, ways)
        assert went[-20:].count(others < 1) >= 18


@pytest.mark.parametrize("slow", [lambda number: 3.0, lambda number: number % 5])
def test_a_peer_for_which_every_round_waits_by_whichever_way_goes_on_passing_on(slow):
    went = ways_of(300, lambda number, by_others: max(slow(number), 0.7 if by_others else 1.0))
    assert went.count(False) <= 6


def test_a_frame_that_is_in_no_commit_by_either_way_goes_as_planned():
    assert ways_of(100, lambda number, by_others: inf).count(False) <= 4


def test_who_has_more_to_spare_passes_on_more_and_who_has_none_nothing():
    way = spread(P, lines(FAST / 10, FAST / 10, FAST, 2 * FAST, 2 * FAST), 0)
    assert way is not None
    assert way.passed[1] == 0
    assert way.passed[2] < way.passed[3]
    assert abs(way.passed[3] - way.passed[4]) <= 1


def test_a_peer_behind_a_relay_passes_nothing_on():
    peers = [*lines(FAST / 10), Line(FAST, passes_on=False), *lines(FAST, FAST)]
    way = spread(P, peers, 0)
    assert way is not None
    assert way.passed[1] == 0
    assert spread(P, [Line(line.rate, passes_on=False) for line in peers], 0) is None


def test_what_saves_less_than_a_way_more_costs_goes_directly():
    assert spread(10_000, lines(*[FAST] * 7, FAST / 10), 7) is None


@given(
    st.integers(10**7, 10**9),
    st.floats(1e4, 1e6),
    st.lists(st.tuples(st.floats(1e6, 1e9), st.booleans()), min_size=3, max_size=19),
    st.integers(0, 19),
)
def test_every_byte_is_given_out_once_and_nobody_is_asked_for_more_than_all_need(nbytes, thin, drawn, me):
    """A thin line among fast ones, most of which help: there is something to give out."""
    me %= len(drawn)
    peers = [Line(rate, passes_on=helps) for rate, helps in drawn]
    peers.insert(me, Line(thin, passes_on=True))
    way = spread(nbytes, peers, me)
    assume(way is not None)  # nobody helps
    n, rate = len(peers), peers[me].rate
    assert way.direct + sum(way.passed) == nbytes
    assert way.direct >= 0
    assert min(way.passed) >= 0
    assert all(line.passes_on or not given for line, given in zip(peers, way.passed, strict=True))
    sent = (n - 1) * way.direct + sum(way.passed)
    finish = max(nbytes / rate, n * (n - 1) * nbytes / sum(line.rate for line in peers))
    assert sent <= 1.01 * finish * rate + n, "it is done when all can be"


def test_thin_peers_are_asked_last_and_the_rest_in_their_order():
    a, b, c, d = (bytes([n]) * 32 for n in range(4))
    assert thin_last([a, b, c, d], lines(1.0, 10.0, 10.0, 9.0)) == [b, c, d, a]
    assert thin_last([d, c], lines(5.0, 5.0)) == [d, c]
    assert thin_last([], []) == []


@given(
    st.integers(1, 1 << 20),
    st.lists(st.tuples(st.floats(1.0, 1e6), st.booleans()), min_size=2, max_size=8),
    st.integers(0, 7),
)
@example(1000, [(1.0, True), (10.0, False), (1.0, True)], 0)  # the only one that passes on has nothing to spare
def test_how_long_a_frame_takes_follows_from_how_it_is_sent(nbytes, drawn, me):
    lines = [Line(rate, passes_on=passes_on) for rate, passes_on in drawn]
    me %= len(lines)
    alone = (len(lines) - 1) * nbytes / lines[me].rate
    finish = max(nbytes / lines[me].rate, len(lines) * (len(lines) - 1) * nbytes / sum(one.rate for one in lines))
    seconds = alone if spread(nbytes, lines, me) is None else finish
    assert Lines(lines).seconds_to_all(nbytes, me) == seconds


@pytest.mark.parametrize("uplink", [None, RATE])
def test_a_frame_in_pieces_for_nobody_is_sent_at_once(uplink):
    """Pieces are as long as what the uplink carries in a second, over the number of those who get them."""

    async def send():
        transport = MemoryNetwork().transport(Signer(bytes(32)))
        passing = Passing(transport, Window(lambda: uplink), (), bytes(PIECED), lambda landing, whole: None, fail)
        with anyio.fail_after(1.0):
            await passing.send(lambda nbytes: Spread(nbytes, (0,)), lambda: uplink)

    async def fail(peer):
        raise AssertionError(f"{peer!r} should not have been sent to")

    anyio.run(send)
