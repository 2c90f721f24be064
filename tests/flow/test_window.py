"""How much may be under way on each stream and on all together, and that no stream waits for another's peer."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import accumulate

import pytest
import trio
import trio.testing

from decentral.flow.schedule import FIRST, SECONDS, InFlight, Window

RATE = 1000.0


async def at_once():
    """Somebody says that it has handled a body."""
    return 0.0


@pytest.mark.parametrize("number", [1, 3, 10])
def test_streams_that_are_open_share_what_the_uplink_carries(number):
    window, heard = Window(lambda: RATE), []

    async def script():
        with ExitStack() as stack:
            flights = [stack.enter_context(InFlight(window, at_once, heard.append)) for _ in range(number)]
            for flight in flights:
                while not heard:
                    await flight.begin(10)
                    assert window.nbytes <= SECONDS * RATE
                heard.clear()
            assert SECONDS * RATE - 20 * number <= window.nbytes
            assert window.streams == number
        assert (window.nbytes, window.streams) == (0, 0)

    trio.run(script)


def test_what_some_have_under_way_is_no_room_for_those_that_come_later():
    window, heard = Window(lambda: RATE), []

    async def script():
        with InFlight(window, at_once, heard.append) as first:
            await first.begin(int(SECONDS * RATE))
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
