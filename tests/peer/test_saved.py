"""Checkpoints wait for the day's writes, and for nothing too long."""

from pathlib import Path

import pytest

from decentral.peer.saved import AT_ONCE, DAY, LONGEST, MOST_FRAMES, WriteBudget, count_free

LIMIT = 2 * 10**9  # bytes a day
CHECKPOINT, COMMIT = 10**7, 64 * 10**4  # bytes


class Machine:
    """A disk and two clocks that are moved by hand."""

    def __init__(self, limit: int | None = LIMIT, *, tells: bool = True) -> None:
        self.now = self.written = self.frames = self.num_saved = 0
        self.budget = WriteBudget(
            limit,
            lambda: self.frames,
            lambda: self.written if tells else None,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )

    def trains(self, seconds: int, frames: int = 0) -> int:
        """Train so long with a commit a second; returns how many checkpoints were written."""
        before = self.num_saved
        for _ in range(seconds):
            self.now += 1
            self.frames += frames
            self.written += frames
            if self.budget.may_save():
                self.written += CHECKPOINT
                self.num_saved += 1
                self.budget.note_save(CHECKPOINT)
        return self.num_saved - before


@pytest.mark.parametrize("tells", [True, False], ids=["the system tells", "checkpoints alone are counted"])
def test_checkpoints_write_as_much_in_a_day_as_its_bound_says(tells: bool):
    machine = Machine(tells=tells)
    machine.trains(int(DAY) - 1)
    assert 0.99 * LIMIT < machine.written < (1 + AT_ONCE) * LIMIT + 2 * CHECKPOINT
    assert machine.budget.today == machine.written
    machine.now += 1
    assert machine.budget.today == 0  # a new day, UTC


def test_a_bound_that_is_changed_holds_from_then_on():
    machine = Machine()
    machine.trains(int(LONGEST))
    machine.budget.hold_to(10 * LIMIT)
    machine.now += int(LONGEST)
    assert machine.trains(40) == 40
    machine.budget.hold_to(None)
    assert machine.trains(100) == 100


def test_a_bound_that_is_raised_leaves_the_debt_of_the_old_one_behind():
    machine = Machine()
    machine.written = 2 * LIMIT
    assert not machine.budget.may_save()
    machine.budget.hold_to(10 * LIMIT)
    assert machine.budget.may_save()
    machine.budget.hold_to(10 * LIMIT)  # another setting was changed
    machine.budget.hold_to(LIMIT)
    assert not machine.budget.may_save(), "the day has none left"


@pytest.mark.parametrize("given", [None, LIMIT], ids=["no bound", "a lower one"])
def test_a_bound_that_was_set_holds_after_a_restart_as_if_it_had_been_there_from_the_start(given: int | None):
    """The command line's is there first, and of it the day had nothing left."""
    machine = Machine(given)
    machine.budget.recall([0, 2 * LIMIT])
    machine.budget.hold_to(5 * LIMIT)
    assert machine.budget.may_save()


def test_without_a_bound_every_checkpoint_that_is_due_is_written():
    assert Machine(None).trains(50) == 50


def test_rounds_that_write_more_than_the_bound_leave_a_checkpoint_to_every_hour_or_so_many_frames():
    machine = Machine()
    machine.written += 2 * LIMIT
    assert machine.trains(2 * int(LONGEST)) == 2
    each = MOST_FRAMES // COMMIT + 1
    assert machine.trains(3 * each, COMMIT) == 3


def test_the_next_process_of_a_day_goes_on_from_what_was_written():
    first, second, other_day = Machine(), Machine(), Machine()
    first.trains(100)
    second.budget.recall(first.budget.memory())
    assert second.budget.today == first.written
    other_day.now = 5 * DAY
    other_day.budget.recall(first.budget.memory())
    assert other_day.budget.today == 0
    second.budget.recall(())  # of an older version


def test_what_an_alarm_of_a_full_disk_goes_by_is_told(tmp_path: Path):
    machine = Machine(None)
    assert machine.budget.newest is None
    machine.trains(1)
    assert machine.budget.newest == CHECKPOINT
    assert (count_free(tmp_path) or 0) > 0
    assert count_free(tmp_path / "gone") is None
