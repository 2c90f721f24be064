"""A recording disk promises what POSIX promises, and keeps no more than that."""

from __future__ import annotations

import random

import pytest

from decentral.simulate.disk import SECTOR, RecordingDisk, crash_states, scan


@pytest.fixture
def disk(tmp_path):
    return RecordingDisk(tmp_path, keep_log=True)


def left_by(disk, *dropped):
    """Everything that a power cut now may leave, had some calls not been made."""
    log = [operation for operation in disk.log if operation.call not in dropped]
    return {state.tree for state in crash_states(log, disk.base, limit=10_000) if state.done == len(log)}


def test_what_was_synced_with_its_name_is_all_that_a_power_cut_leaves(disk, tmp_path):
    disk.make_folders(tmp_path / "a" / "b")
    disk.replace_file(tmp_path / "a" / "b" / "file", [b"one", b"two"])
    assert left_by(disk) == {(("a", (("b", (("file", b"onetwo"),)),)),)}
    assert scan(tmp_path) == disk.all_kept()


def test_a_file_whose_name_was_not_synced_may_be_gone(disk, tmp_path):
    disk.write(tmp_path / "file", [b"data"])
    assert left_by(disk) == {(), (("file", b"data"),)}


def test_data_that_was_not_synced_may_be_old_new_torn_or_zero(disk, tmp_path):
    disk.write(tmp_path / "file", [b"old"])
    disk.sync_folder(tmp_path)
    disk.become(disk.all_kept())
    disk.write(tmp_path / "file", [b"new!"], 3)
    contents = {dict(tree)["file"] for tree in left_by(disk, "sync file")}
    assert contents == {b"old", b"oldn", b"oldne", b"oldnew", b"oldnew!", b"old\0\0\0\0"}


def test_sectors_of_one_write_may_arrive_without_the_first(disk, tmp_path):
    disk.write(tmp_path / "file", [b"x" * 2 * SECTOR])
    disk.sync_folder(tmp_path)
    contents = {dict(tree)["file"] for tree in left_by(disk, "sync file")}
    assert bytes(SECTOR) + b"x" * SECTOR in contents
    assert b"x" * SECTOR + bytes(SECTOR) in contents


def test_a_rename_may_reach_the_disk_before_the_data_or_not_at_all(disk, tmp_path):
    disk.replace_file(tmp_path / "file", [b"old"])
    disk.become(disk.all_kept())
    disk.replace_file(tmp_path / "file", [b"new"])
    assert left_by(disk) == {(("file", b"new"),)}
    unsynced = left_by(disk, "sync file", "sync folder")
    assert (("file", b""),) in unsynced
    assert (("file", b"old"),) in unsynced
    assert (("file", b"old"),) in left_by(disk, "sync folder")
    assert (("file", b""),) not in left_by(disk, "sync folder")


def test_unsynced_names_are_lost_one_by_one(disk, tmp_path):
    for name in "abc":
        disk.write(tmp_path / name, [])
    disk.sync_folder(tmp_path)
    disk.become(disk.all_kept())
    for name in "abc":
        disk.remove(tmp_path / name)
    assert len(left_by(disk)) == 8


def test_a_folder_is_removed_file_by_file(disk, tmp_path):
    disk.make_folders(tmp_path / "folder")
    disk.write(tmp_path / "folder" / "file", [b"data"])
    disk.sync_folder(tmp_path / "folder")
    disk.become(disk.all_kept())
    disk.remove(tmp_path / "folder")
    disk.remove(tmp_path / "never there")
    assert left_by(disk) == {(), (("folder", ()),), (("folder", (("file", b"data"),)),)}
    assert scan(tmp_path) == ()


def test_a_cut_that_was_not_synced_may_not_have_happened(disk, tmp_path):
    disk.replace_file(tmp_path / "file", [b"long"])
    disk.become(disk.all_kept())
    disk.truncate(tmp_path / "file", 1)
    assert left_by(disk) == {(("file", b"l"),)}
    assert left_by(disk, "sync file") == {(("file", b"l"),), (("file", b"long"),)}


def test_a_crash_leaves_one_of_the_states_and_the_same_one_for_a_seed(disk, tmp_path):
    def live():
        disk.become(())
        disk.replace_file(tmp_path / "kept", [b"kept"])
        disk.write(tmp_path / "file", [b"data"])
        disk.make_folder(tmp_path / "folder")

    seen = set()
    for seed in range(40):
        found = []
        for _ in range(2):
            live()
            possible = left_by(disk)
            disk.crash(random.Random(seed))
            found.append(scan(tmp_path))
            assert found[-1] in possible
            assert left_by(disk) == {found[-1]}, "what is left is durable"
        assert found[0] == found[1]
        seen.add(found[0])
    assert len(seen) == 4


def test_what_did_not_come_through_the_disk_stays_through_a_crash(disk, tmp_path):
    (tmp_path / "events.jsonl").write_text("{}")
    disk.write(tmp_path / "file", [b"data"])
    disk.crash(random.Random(1))
    assert (tmp_path / "events.jsonl").read_text() == "{}"


def test_too_many_states_are_drawn_alike_every_time_and_hold_both_ends(disk, tmp_path):
    for number in range(12):
        disk.write(tmp_path / str(number), [b"data"])
    first, again = ([*crash_states(disk.log, limit=50)] for _ in range(2))
    assert first == again
    last = {state.tree for state in first if state.done == len(disk.log)}
    assert () in last
    assert disk.all_kept() in last
    assert len(last) <= 52
    assert len(last) > 20
