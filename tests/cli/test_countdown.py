from __future__ import annotations

import io

import pytest

from decentral.cli.countdown import Countdown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream, seconds=40.0, calls=400):
    now = [0.0]
    with Countdown(stream, lambda: now[0]) as countdown:
        for call in range(1, calls + 1):
            now[0] = seconds * call / calls
            countdown(call / calls)
    return stream.getvalue()


def test_a_pipe_gets_a_line_every_tenth_with_the_time_that_is_left():
    lines = shown(io.StringIO()).splitlines()
    assert lines[0] == "10% done, about 36 s left"
    assert lines[4] == "50% done, about 20 s left"
    assert len(lines) == 10


def test_a_terminal_gets_one_line_that_is_refreshed_four_times_a_second_and_gone_in_the_end():
    text = shown(Terminal())
    assert "\n" not in text
    assert "50% done, about 20 s left" in text
    assert text.count("left") <= 4 * 40
    assert text.endswith("\r\x1b[2K")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_done_in_a_moment_says_nothing(stream):
    assert shown(stream, seconds=1.9) == ""


def test_hours_are_told_in_minutes():
    assert shown(io.StringIO(), seconds=4000.0).startswith("10% done, about 60 min left")
