"""Hours of the day: read, spelled, and asked whether they are open."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from decentral.errors import ConfigError
from decentral.preferences import Hours


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-03-01T{clock}:30").replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("clock", "is_open"), [("21:59", False), ("22:00", True), ("00:00", True), ("06:59", True), ("07:00", False)]
)
def test_hours_over_midnight_include_their_first_minute_and_not_their_last(clock: str, is_open: bool) -> None:
    assert Hours.parse("22:00-07:00").are_open(at(clock)) is is_open


@pytest.mark.parametrize(("clock", "opens"), [("08:00", "12:00"), ("12:00", "22:00"), ("23:00", "12:00")])
def test_the_next_opening_is_the_first_that_comes(clock: str, opens: str) -> None:
    hours = Hours.parse("22:00-07:00, 12:00-13:30")
    assert f"{hours.next_opening(at(clock)):%H:%M}" == opens
    assert hours.next_opening(at(clock)) > at(clock)


@pytest.mark.parametrize("text", ["always", "22:00-07:00", "12:00-13:30,22:00-07:00", "00:00-12:00"])
def test_hours_are_spelled_as_they_are_read(text: str) -> None:
    assert str(Hours.parse(text)) == text


def test_a_day_may_end_at_twenty_four() -> None:
    assert Hours.parse("18:00-24:00").are_open(at("23:59"))
    assert not Hours.parse("18:00-24:00").are_open(at("00:00"))


@pytest.mark.parametrize(
    "text", ["", "22-07", "25:00-07:00", "22:60-23:00", "07:00-07:00", "22:00-07:00;", "24:01-1:00"]
)
def test_what_cannot_be_read_shows_how_hours_are_written(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write 22:00-07:00, or .* or always"):
        Hours.parse(text)
