import errno
import math
import os
import threading

import pytest

from decentral.errors import ConfigError, DiskError
from decentral.simulate.disk import RecordingDisk, crash_states
from decentral.state.durable import Disk
from decentral.state.journal import HEAD_NBYTES, MAX_ENTRY_NBYTES, AcceptorFile, Journal
from tests.kit.disks import FailingDisk, recording_disk

BODIES = [b"first", b"", b"third" * 7]


def entries_in(path):
    with Journal(path) as journal:
        return list(journal.entries), journal.dropped_nbytes


@pytest.fixture
def journal_path(tmp_path):
    with Journal(tmp_path / "run" / "journal") as journal:
        for body in BODIES:
            journal.append(body)
    return tmp_path / "run" / "journal"


def test_the_whole_entries_before_a_cut_or_a_flipped_byte_stay(journal_path):
    whole = journal_path.read_bytes()
    ends = [sum(HEAD_NBYTES + len(body) for body in BODIES[:n]) for n in range(4)]
    for length in range(len(whole) + 1):
        journal_path.write_bytes(whole[:length])
        count = sum(length >= end for end in ends) - 1
        assert entries_in(journal_path) == (BODIES[:count], length - ends[count])
        assert journal_path.stat().st_size == ends[count], "the torn tail must be cut off"
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            journal_path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            count = sum(place >= end for end in ends) - 1
            assert entries_in(journal_path)[0] == BODIES[:count]


def test_appending_after_a_torn_tail_goes_on_from_the_last_whole_entry(journal_path):
    with journal_path.open("ab") as file:
        file.write(b"\x05\0\0\0torn")
    with Journal(journal_path) as journal:
        assert journal.dropped_nbytes == 8
        journal.append(b"next")
    assert entries_in(journal_path) == ([*BODIES, b"next"], 0)


def test_what_is_not_needed_goes_in_large_parts_and_the_file_stays_bounded(tmp_path):
    path, largest, forgotten = tmp_path / "journal", 0, 0
    with Journal(path) as journal:
        for number in range(50):
            journal.append(b"%03d" % number)
            forgotten += journal.forget(number - 3 - forgotten)  # four are needed
            assert journal.entries == [b"%03d" % n for n in range(forgotten, number + 1)]
            assert min(4, number + 1) <= len(journal.entries) < 8
            largest = max(largest, path.stat().st_size)
    assert largest <= 8 * (HEAD_NBYTES + 3)
    assert entries_in(path)[0][-4:] == [b"046", b"047", b"048", b"049"]


def test_nothing_is_dropped_that_its_owner_still_needs(journal_path):
    with Journal(journal_path) as journal:
        assert [journal.forget(count) for count in (-1, 0, 1)] == [0, 0, 0]
        assert journal.forget(2) == 2
    assert entries_in(journal_path) == (BODIES[2:], 0)


def test_an_entry_appended_while_old_ones_are_dropped_is_kept(journal_path):
    threads = []

    class Busy(Disk):
        def rename(self, old, new):
            threads.append(threading.Thread(target=journal.append, args=(b"meanwhile",)))
            threads[-1].start()
            threads[-1].join(0.05)  # long enough for an append that does not wait its turn
            super().rename(old, new)

    with Journal(journal_path, Busy()) as journal:
        journal.forget(2)
        threads[0].join()
    assert entries_in(journal_path) == ([*BODIES[2:], b"meanwhile"], 0)


def test_an_append_after_a_rename_that_was_not_synced_syncs_it_first(tmp_path):
    """Else it would go to a file that a power cut replaces by the old one."""
    disk = RecordingDisk(tmp_path, keep_log=True)
    journal, real = Journal(tmp_path / "journal", disk), disk.sync_folder
    for body in BODIES:
        journal.append(body)
    disk.sync_folder = refuse
    assert journal.forget(2) == 2
    with pytest.raises(DiskError):
        journal.append(b"refused")
    disk.sync_folder = real
    journal.append(b"kept")
    for state in [state for state in crash_states(disk.log) if state.done == len(disk.log)]:
        disk.become(state.tree)
        assert entries_in(tmp_path / "journal")[0] == [*BODIES[2:], b"kept"]


def refuse(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_no_crash_loses_an_entry_whose_append_returned(tmp_path):
    disk = recording_disk(tmp_path / "disk")
    written = [f"entry {number}".encode() for number in range(7)]
    finished = []
    with Journal(disk.root / "run" / "journal", disk) as journal:  # rewritten on the way
        for body in written:
            journal.append(body)
            finished.append(len(disk.log))
            journal.forget(len(journal.entries) - 2)
    left = recording_disk(tmp_path / "left")
    for state in crash_states(disk.log):
        left.become(state.tree)
        safe = sum(state.done >= mark for mark in finished)
        with Journal(left.root / "run" / "journal", left) as journal:
            found = journal.entries
        last = written.index(found[-1]) + 1 if found else 0
        assert last in (safe, safe + 1), f"after operation {state.done}"
        assert found == written[last - len(found) : last]
        assert len(found) >= min(last, 2)


def test_the_same_enumeration_catches_a_journal_without_fsync(tmp_path):
    disk = RecordingDisk(tmp_path, keep_log=True)
    with Journal(tmp_path / "journal", disk) as journal:
        journal.append(b"acknowledged")
    log = [operation for operation in disk.log if operation.call != "sync file"]
    lost = 0
    for state in crash_states(log):
        disk.become(state.tree)
        lost += state.done == len(log) and entries_in(tmp_path / "journal")[0] == []
    assert lost


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_refused_append_changes_nothing(journal_path, error, times):
    """The write itself, then also the cut that should follow it, then also the fsync of that."""
    disk = FailingDisk(journal_path.parent, 4, error, times)  # after the truncate and two fsyncs of opening
    journal = Journal(journal_path, disk)
    with pytest.raises(DiskError, match="writing journal"):
        journal.append(b"does not fit" * 3)
    assert journal.entries == BODIES
    disk.first = math.inf
    journal.append(b"fits")
    journal.close()
    assert entries_in(journal_path)[0] == [*BODIES, b"fits"]


def test_a_full_disk_at_the_rewrite_loses_nothing(journal_path):
    for first in (4, 5, 6, 7):  # create, write, fsync, rename
        disk = FailingDisk(journal_path.parent, first, errno.ENOSPC)
        with Journal(journal_path, disk) as journal:
            assert journal.forget(2) == 0
            assert journal.entries == BODIES
        assert entries_in(journal_path) == (BODIES, 0)
    with Journal(journal_path) as journal:
        assert journal.forget(2) == 2
        journal.append(b"next")
    assert entries_in(journal_path) == ([*BODIES[2:], b"next"], 0)


def test_what_a_journal_cannot_do_is_one_line(tmp_path):
    with Journal(tmp_path / "journal") as journal, pytest.raises(ConfigError, match="at most"):
        journal.append(bytes(MAX_ENTRY_NBYTES + 1))
    with pytest.raises(ConfigError, match="was closed"):
        journal.append(b"late")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DiskError, match="opening journal"):
        Journal(tmp_path / "folder")


def test_an_acceptor_holds_what_was_written_last(tmp_path):
    file = AcceptorFile(tmp_path / "run" / "acceptor")
    assert file.read() is None
    for body in (b"one", b"", b"three" * 100):
        file.write(body)
        assert AcceptorFile(file.path).read() == body


def test_a_damaged_acceptor_is_an_error_and_never_forgotten(tmp_path):
    file = AcceptorFile(tmp_path / "acceptor")
    file.write(b"promised 3")
    whole = file.path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))] + [whole + b"x", whole + whole]
    damaged += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))]
    for data in damaged:
        file.path.write_bytes(data)
        with pytest.raises(DiskError, match="could vote twice"):
            file.read()


def test_no_crash_tears_an_acceptor_or_loses_a_promise_that_was_answered(tmp_path):
    disk, left = recording_disk(tmp_path / "disk"), recording_disk(tmp_path / "left")
    file, finished = AcceptorFile(disk.root / "acceptor", disk), [0]
    bodies = [None, b"promised 1", b"promised 2, much longer", b"3"]
    for body in bodies[1:]:
        file.write(body)
        finished.append(len(disk.log))
    for state in crash_states(disk.log):
        left.become(state.tree)
        safe = sum(state.done >= mark for mark in finished) - 1
        assert AcceptorFile(left.root / "acceptor", left).read() in bodies[safe : safe + 2]


def test_a_promise_that_a_restart_has_read_survives_a_power_cut(tmp_path):
    """The writer is killed between rename and sync; the next process acts on what it finds."""
    disk = RecordingDisk(tmp_path, keep_log=True)
    AcceptorFile(tmp_path / "acceptor", disk).write(b"old")
    real, disk.sync_folder = disk.sync_folder, refuse
    with pytest.raises(DiskError):
        AcceptorFile(tmp_path / "acceptor", disk).write(b"new")
    disk.sync_folder = real
    assert AcceptorFile(tmp_path / "acceptor", disk).read() == b"new"
    for state in [state for state in crash_states(disk.log) if state.done == len(disk.log)]:
        disk.become(state.tree)
        assert AcceptorFile(tmp_path / "acceptor").read() == b"new"


def test_a_refused_promise_leaves_the_old_one(tmp_path):
    file = AcceptorFile(tmp_path / "acceptor")
    file.write(b"old")
    for first in range(1, 5):  # create, write, fsync, rename
        with pytest.raises(DiskError, match="No space left"):
            AcceptorFile(file.path, FailingDisk(tmp_path, first, errno.ENOSPC)).write(b"new")
        assert file.read() == b"old"
        assert not list(tmp_path.glob(".tmp-*"))
