"""How long a peer waits for its partner of a gossip step."""

from __future__ import annotations

from decentral.rounds.partners import LATEST, Punctuality

A, B = b"a" * 32, b"b" * 32
FLOOR, CEILING = 2.0, 60.0


def waits_after(delays: list[float]) -> float:
    """The wait at the end of steps whose partners came so many seconds after this peer."""
    found, now = Punctuality(FLOOR, CEILING), 0.0
    for step, delay in enumerate(delays):
        now += 100.0
        if delay < 0:
            found.came(step, A, now + delay, is_over=False)
        found.began(step, A, now)
        if delay >= 0:
            found.came(step, A, now + delay, is_over=delay > FLOOR)
    return found.patience()


def test_the_ceiling_holds_until_something_is_known():
    assert waits_after([]) == waits_after([0.0] * 3) == CEILING


def test_a_partner_that_came_too_late_is_waited_for_next_time():
    """Counted by pairs that were made alone, the wait stayed at the floor, and so did the pairs."""
    assert waits_after([12.0] * 4) == 12.0 + FLOOR


def test_who_is_always_last_waits_the_floor_only():
    assert waits_after([-9.0] * 6) == FLOOR


def test_the_spread_counts_on_both_sides():
    """Were who came early counted as in time, half of the delays would be 0, and the wait the floor."""
    assert waits_after([-4.0, 4.0, -3.0, 3.0]) == 6.0 * 3.5


def test_nobody_is_waited_for_beyond_the_ceiling():
    assert waits_after([90.0] * 8) == CEILING


def test_only_the_partner_of_a_step_is_late_for_it_and_once():
    found = Punctuality(FLOOR, CEILING)
    for step in range(20):
        found.began(step, A, 100.0 * step)
        found.came(step, B, 100.0 * step + 50.0, is_over=True)
        found.came(step, A, 100.0 * step + 1.0, is_over=True)
        found.came(step, A, 100.0 * step + 59.0, is_over=True)
    assert found.patience() == 1.0 + FLOOR


def test_what_is_kept_of_steps_is_bounded():
    found = Punctuality(FLOOR, CEILING)
    for step in range(1000):
        found.began(step, A, float(step))
        found.came(step + 1, B, float(step), is_over=False)
        found.came(step - 500, B, float(step), is_over=True)
    assert len(found._begun) <= LATEST
    assert len(found._early) <= 2
