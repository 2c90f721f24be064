"""Every state that a power cut may leave of a peer's folder: what was acknowledged is there, and nothing is torn."""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
from collections.abc import Sequence

import pytest

from decentral.errors import DiskError
from decentral.simulate.disk import Call, Names, Operation, RecordingDisk, scan
from tests.kit.disks import FailingDisk, Killed, KillingDisk
from tests.kit.history import History, make_history
from tests.kit.life import Acknowledged, Life, found_in, goes_on
from tests.kit.power_loss import GO_ON_EVERY, ROUNDS, Recorded, broken_promises


@pytest.fixture(scope="module")
def history() -> History:
    return make_history(ROUNDS + 1)


@pytest.fixture(scope="module")
def recorded(history, tmp_path_factory) -> Recorded:
    return Recorded(history, tmp_path_factory.mktemp("life"))


def test_no_power_cut_loses_what_was_acknowledged_or_tears_anything(recorded, tmp_path):
    assert [*broken_promises(recorded, recorded.log, tmp_path, cuts=4, limit=48)] == []


def without(log: Sequence[Operation], call: Call, *path: str) -> list[Operation]:
    """The log of a disk that drops one kind of sync where the path begins so; a bug to be caught."""
    return [operation for operation in log if operation.call != call or operation.path[: len(path)] != path]


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ("sync file", ()),
        ("sync folder", ()),
        ("sync file", ("journal",)),
        ("sync file", (".tmp-acceptor",)),
        ("sync file", ("checkpoints",)),
        ("sync folder", ("checkpoints",)),
        ("sync file", ("frames",)),
        ("sync folder", ("frames",)),
    ],
)
def test_the_same_enumeration_catches_a_dropped_fsync(recorded, tmp_path, call, path):
    log = without(recorded.log, call, *path)
    assert next(broken_promises(recorded, log, tmp_path, cuts=1, limit=6), None) is not None


@pytest.fixture(scope="module")
def seven_rounds(history, tmp_path_factory) -> Names:
    """A folder in which the next checkpoint drops an old one, frames and the journal's head."""
    folder = tmp_path_factory.mktemp("seven")
    life = Life(history, folder, lambda word, round_: None, RecordingDisk(folder))
    life.go_on(6)
    life.one_round()
    life.close()
    return scan(folder)


@pytest.mark.parametrize(
    ("error", "times"),
    [(errno.ENOSPC, 1), (errno.EIO, 2), (errno.EROFS, math.inf)],
    ids=["full for a moment", "two errors", "read-only for good"],
)
def test_whichever_operation_fails_the_error_is_one_line_and_nothing_acknowledged_is_lost(
    history, seven_rounds, tmp_path, error, times
):
    refusals: list[str] = []
    disk = RecordingDisk(tmp_path)
    for first in itertools.count(1):
        disk.become(seven_rounds)
        failing = FailingDisk(tmp_path, first, error, times)
        promised = Acknowledged(vote=7, commit=7, checkpoint=6)
        try:
            Life(history, tmp_path, promised.hear, failing).go_on(8)
        except DiskError as refusal:
            refusals.append(str(refusal))
        disk = RecordingDisk(tmp_path)
        assert found_in(history, tmp_path, disk).faults(history, promised) == []
        assert first % GO_ON_EVERY or goes_on(history, tmp_path, disk), f"operation {first}"
        if failing.count < first:
            break
    assert all(os.strerror(error) in refusal and "\n" not in refusal for refusal in refusals)
    assert len(refusals) > 30


def test_what_a_restart_saw_after_a_kill_survives_the_power_cut_after_it(history, seven_rounds, tmp_path):
    """A killed process leaves names that were never synced; the next one acts on them, so it must sync them."""
    disk = KillingDisk(tmp_path)
    for last in itertools.count():
        disk.become(seven_rounds)
        disk.left = last
        try:
            Life(history, tmp_path, lambda word, round_: None, disk).go_on(8)
        except Killed:
            pass
        else:
            break
        disk.left = math.inf
        seen = found_in(history, tmp_path, disk)
        disk.crash(random.Random(last))
        then = found_in(history, tmp_path, disk)
        assert (then.voted, then.round, then.equal) == (seen.voted, seen.round, True), f"killed after {last} operations"
    assert last > 30
