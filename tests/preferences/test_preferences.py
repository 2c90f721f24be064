"""Rests that make a machine compute for a share of the time; time is given."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from decentral.errors import ConfigError
from decentral.preferences import Hours
from decentral.preferences.preferences import Duty


class Machine:
    """Steps of so many seconds, and the rests between them."""

    def __init__(self, share: float) -> None:
        self.now, self.busy, self.settled = 0.0, 0.0, 0
        self.duty = Duty(lambda: self.now, self._settle)
        self.duty.share = share

    def _settle(self) -> None:
        self.settled += 1

    def step(self, seconds: float) -> float:
        self.now += seconds
        self.busy += seconds
        rest = self.duty.seconds_to_rest()
        self.now += rest
        self.duty.goes_on()
        return rest


@pytest.mark.parametrize("share", [0.05, 0.5, 0.7, 0.9])
def test_a_machine_computes_for_its_share_of_the_time(share: float) -> None:
    machine = Machine(share)
    machine.step(1.0)  # when it began is not known
    for n in range(200):
        machine.step(1.0 + 0.1 * (n % 3))
    assert machine.busy / machine.now == pytest.approx(share, rel=0.02)


def test_without_a_limit_nothing_rests_and_no_device_is_waited_for() -> None:
    machine = Machine(1.0)
    assert [machine.step(1.0) for _ in range(5)] == [0.0] * 5
    assert machine.settled == 0


def test_what_was_waited_for_elsewhere_is_no_work() -> None:
    """Between ``worked`` and ``goes_on`` a round may be waited for."""
    machine = Machine(0.5)
    machine.step(1.0)
    machine.step(1.0)
    machine.now += 1.0
    assert machine.duty.seconds_to_rest() == pytest.approx(1.0)
    machine.now += 3600.0
    machine.duty.goes_on()
    assert machine.step(1.0) == pytest.approx(1.0)


def test_a_pause_of_hours_earns_no_rest_of_hours() -> None:
    machine = Machine(0.5)
    for _ in range(3):
        machine.step(1.0)
    assert machine.step(7200.0) <= 3.0


def test_the_share_may_change_between_two_steps() -> None:
    machine = Machine(1.0)
    machine.step(1.0)
    machine.duty.share = 0.5
    assert machine.step(1.0) == pytest.approx(1.0)
    machine.duty.share = 1.0
    assert machine.step(1.0) == 0.0


# ---- test hours ----
#
# Hours of the day: read, spelled, and asked whether they are open.


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
