"""How much may be under way on each stream and on all together, and that no stream waits for another's peer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import trio

from decentral.transport.window import FIRST, SECONDS, Flight, Window

RATE = 1000.0


async def at_once():
    """Somebody says that it has handled a body."""


@pytest.mark.parametrize("number", [1, 3, 10])
def test_streams_that_are_open_share_what_the_uplink_carries(number):
    window, heard = Window(lambda: RATE), []

    async def script():
        with ExitStack() as stack:
            flights = [stack.enter_context(Flight(window, at_once, heard.append)) for _ in range(number)]
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
        with Flight(window, at_once, heard.append) as first:
            await first.begin(int(SECONDS * RATE))
            with Flight(window, at_once, heard.append) as second:
                await second.begin(10)  # one goes always
                assert not heard
                await second.begin(11)
                assert heard == [10]

    trio.run(script)


def test_a_body_larger_than_the_share_goes_alone():
    window, heard = Window(lambda: 1.0), []

    async def script():
        with Flight(window, at_once, heard.append) as flight:
            for nbytes in (100, 200, 300):
                await flight.begin(nbytes)
            assert heard == [100, 200]

    trio.run(script)


def test_an_uplink_that_is_not_known_keeps_no_first_piece_waiting():
    window, heard = Window(lambda: None), []

    async def script():
        with Flight(window, at_once, heard.append) as flight:
            await flight.begin(FIRST // 2)
            await flight.begin(FIRST // 2)
            assert not heard
            await flight.begin(1)
            assert heard == [FIRST // 2]

    trio.run(script)
