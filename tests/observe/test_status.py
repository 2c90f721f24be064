import json
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from decentral.errors import DiskError, FolderInUse, UsageError, VersionError
from decentral.observe.requests import REQUESTS, Request, answer_to, ask, ask_running, drop_requests, take_requests
from decentral.observe.status import (
    STATUS_FILE,
    STATUS_VERSION,
    ProcessInfo,
    Status,
    check_free,
    is_lost,
    is_running,
    read_status,
    write_status,
)


def test_a_status_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    status = Status(state="training", round=4, members=({"peer": "a", "round": 4},), waiting_for=("b",), loss=1.5)
    write_status(tmp_path, status, ProcessInfo())
    read = read_status(tmp_path)
    assert (read.state, read.round, read.members, read.waiting_for, read.loss) == (
        "training",
        4,
        ({"peer": "a", "round": 4},),
        ("b",),
        1.5,
    )
    assert is_running(read)
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_FILE]


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    stop = threading.Event()
    write_status(tmp_path, Status(), ProcessInfo())

    def write() -> None:
        for round_ in range(300):
            write_status(
                tmp_path, Status(round=round_, problem="x" * (round_ * 7 % 900)), ProcessInfo(pid=1, created=0.0)
            )
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not stop.is_set():
        assert read_status(tmp_path).state == "starting"
    writer.join()


def test_a_process_that_ended_is_not_running_even_when_its_number_is_used_again(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    assert not ProcessInfo(pid=int(child.stdout), created=0.0).is_alive()
    mine = ProcessInfo()
    assert mine.is_alive()
    assert not ProcessInfo(pid=mine.pid, created=mine.created - 100).is_alive()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="ticks since the boot are Linux's")
def test_a_step_of_the_clock_makes_no_other_process_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_status(tmp_path, Status(state="training"), ProcessInfo())
    told = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: told(self) + 3600.0)
    assert is_running(read_status(tmp_path))
    with pytest.raises(FolderInUse):
        check_free(tmp_path)


def test_a_status_that_a_power_cut_left_empty_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text("")
    check_free(tmp_path)


def test_unknown_fields_of_a_newer_writer_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / STATUS_FILE).write_text(json.dumps({"version": STATUS_VERSION, "round": 3, "colour": "green"}))
    assert read_status(tmp_path).round == 3


@pytest.mark.parametrize("version", [STATUS_VERSION + 1, None, "1"])
def test_a_status_of_another_version_says_so_and_is_not_read_as_starting(tmp_path: Path, version: object) -> None:
    (tmp_path / STATUS_FILE).write_text(json.dumps({"version": version, "phase": "training"}))
    with pytest.raises(
        VersionError, match=r"another version of decentral wrote it \(format .*, this one reads 1\); ask"
    ):
        read_status(tmp_path)


def test_a_folder_of_another_version_is_free_once_its_peer_has_ended(tmp_path: Path) -> None:
    mine = ProcessInfo()
    told = {"version": 2, "pid": mine.pid, "process_created": mine.created}
    (tmp_path / STATUS_FILE).write_text(json.dumps(told))
    with pytest.raises(UsageError, match="a peer runs here already"):
        check_free(tmp_path)
    (tmp_path / STATUS_FILE).write_text(json.dumps(told | {"process_created": 0.0}))
    check_free(tmp_path)


@pytest.mark.parametrize(("state", "lost"), [("training", True), ("leaving", True), ("left", False), ("done", False)])
def test_who_is_gone_without_a_last_word_is_lost(tmp_path: Path, state: str, lost: bool) -> None:
    write_status(tmp_path, Status(state=state), ProcessInfo(pid=1, created=0.0))
    assert is_lost(read_status(tmp_path)) is lost
    write_status(tmp_path, Status(state=state), ProcessInfo())
    assert not is_lost(read_status(tmp_path))


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", '{"members": 3}'])
def test_a_damaged_status_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(UsageError, match="not readable"):
        read_status(tmp_path)


def test_a_directory_where_nobody_ran_says_so_and_names_those_where_peers_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"no peer has run here; name the directory.*--out"):
        read_status(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decentral-my run").mkdir()
    write_status(tmp_path / "decentral-my run", Status(), ProcessInfo())
    with pytest.raises(UsageError, match=r"started with by --out: 'decentral-my run'$"):
        read_status(Path("decentral-run"))
    with pytest.raises(DiskError, match="status cannot be written"):
        write_status(tmp_path / "absent", Status(), ProcessInfo())


# ---- requests ----


def test_each_request_is_taken_once_in_the_order_of_asking_but_leave_which_comes_first(tmp_path: Path) -> None:
    for request in reversed(REQUESTS):
        ask(tmp_path, request, **({"key": "threads", "value": "2"} if request == "set" else {}))
    assert [request.name for request in take_requests(tmp_path)] == ["leave", "set", "finish", "resume", "pause"]
    assert take_requests(tmp_path) == ()
    for request in ("pause", "resume", "pause"):
        ask(tmp_path, request)
    assert [request.name for request in take_requests(tmp_path)] == ["resume", "pause"]
    ask(tmp_path, "pause")
    drop_requests(tmp_path)
    assert take_requests(tmp_path) == ()


def test_a_follower_is_asked_for_nothing_but_to_leave_and_who_has_ended_for_nothing(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="following"), ProcessInfo())
    with pytest.raises(UsageError, match="this peer only follows, and trains nothing that could pause"):
        ask_running(tmp_path, "pause")
    ask_running(tmp_path, "leave")
    assert [request.name for request in take_requests(tmp_path)] == ["leave"]
    write_status(tmp_path, Status(state="left"), ProcessInfo())
    with pytest.raises(UsageError, match="has ended"):
        ask_running(tmp_path, "pause")
    with pytest.raises(UsageError, match="one of leave, pause, resume, finish, set"):
        ask(tmp_path, "explode")


def test_a_request_brings_its_values_and_settings_do_not_replace_each_other(tmp_path: Path) -> None:
    ask(tmp_path, "pause", until=17.5)
    for key, value in (("threads", "2"), ("max-upload", "1mbit"), ("max-upload", "5mbit")):
        ask(tmp_path, "set", key=key, value=value)
    pause, *settings = take_requests(tmp_path)
    assert pause == Request("pause", {"until": 17.5})
    assert {one.values["key"]: one.values["value"] for one in settings} == {"threads": "2", "max-upload": "5mbit"}


def test_a_file_that_was_touched_by_hand_asks_and_what_cannot_be_read_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    (folder / "pause").touch()
    (folder / "leave").write_bytes(b"\xff{")
    (folder / "resume").write_text("[" * 5000)
    (folder / "explode").touch()
    (folder / "set").write_text('{"value": "2"}')
    assert take_requests(tmp_path) == (Request("pause", {}),)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "at_once"),
    [
        (Status(state="training"), False),
        (Status(state="waiting"), False),  # for a round that takes long, and comes
        (Status(state="waiting", wanted_members=2), True),
        (Status(state="paused"), True),
        (Status(state="resting"), True),
    ],
)
def test_who_asks_a_peer_to_finish_is_told_whether_it_leaves_at_once(status: Status, at_once: bool) -> None:
    assert ("no round would come" in answer_to("finish", status)) is at_once
