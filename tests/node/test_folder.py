"""The folder of a peer: who has it, what begins there, what it tells, and who may read it."""

import errno
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from filelock import BaseFileLock

import decentral
from decentral.cli.preflight import look_over
from decentral.cli.progress import read_peer
from decentral.errors import DiskError, FolderInUse
from decentral.node.folder import (
    ADDRESSES_FILE,
    Addresses,
    begun,
    keep_addresses,
    keep_token,
    occupy,
    read_addresses,
)
from decentral.observe.beacon import Beacon
from decentral.observe.events import EventLog
from decentral.observe.requests import ask, ask_running
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from decentral.state.durable import DISK
from decentral.tensors.threads import ThreadsWanted
from tests.kit.patience import PATIENCE
from tests.kit.problems import LOOPBACK, Problem, run_terms
from tests.kit.processes import held_elsewhere

ASKER = """
import sys
from pathlib import Path
from decentral.node.folder import occupy
with occupy(Path(sys.argv[1])):
    pass
"""


def test_a_peer_that_begins_where_another_has_not_said_a_word_yet_is_refused_and_touches_nothing(tmp_path):
    problem = Problem(0)
    with held_elsewhere(tmp_path):
        second = join_here(tmp_path, problem)
        with pytest.raises(decentral.ConfigError, match="a peer begins here just now; choose another --out"), second:
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    with join_here(tmp_path, problem) as peer:
        assert peer.round == 0


def join_here(folder: Path, problem: Problem) -> decentral.Peer:
    return decentral.join(
        run_terms("sparseloco"),
        problem.model,
        problem.optimizer,
        out=folder,
        listen=LOOPBACK,
        transport="native",
        alone=True,
    )


def test_a_folder_whose_peer_was_killed_is_free_though_a_child_of_it_lives(tmp_path):
    with held_elsewhere(tmp_path, "forks") as (holder, child):
        with pytest.raises(FolderInUse), occupy(tmp_path):
            pass
        holder.kill()
        holder.wait()
        try:
            os.kill(child, 0)
            with occupy(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.long
def test_a_command_that_has_begun_keeps_it_while_its_peer_comes_and_goes(tmp_path):
    with begun(tmp_path):
        with occupy(tmp_path):
            pass
        refused = subprocess.run([sys.executable, "-c", ASKER, tmp_path], capture_output=True, text=True)
    assert "FolderInUse" in refused.stderr
    (tmp_path / "status.json").unlink()  # this process, which it names, lives on
    assert subprocess.run([sys.executable, "-c", ASKER, tmp_path]).returncode == 0


def test_a_second_peer_of_one_process_is_refused_in_a_folder_that_the_first_has(tmp_path):
    with occupy(tmp_path):
        with pytest.raises(FolderInUse, match="another peer of this process lives here"), occupy(tmp_path):
            pass
        with occupy(tmp_path / "other"):
            pass
    with occupy(tmp_path):
        pass


def begin(folder: Path, meanwhile: Callable[[], object], ends: BaseException) -> None:
    with begun(folder):
        meanwhile()
        raise ends


def test_while_a_peer_begins_its_status_says_so_and_what_stood_there_is_back_if_nothing_comes_of_it(tmp_path):
    last = Status(state="left", round=7, rounds=9, invite="decentral1:old", finishing=True, members=({"peer": "a"},))
    write_status(tmp_path, last, ProcessInfo(pid=1, created=0.0))
    before = (tmp_path / "status.json").read_bytes()

    def looked_at() -> None:
        status, alive = read_peer(tmp_path)
        assert (status.state, status.round, alive) == ("starting", 7, True)
        assert status.health.startswith("starting: ")
        assert (status.invite, status.finishing, status.members) == ("", False, ()), "nobody is reached there yet"

    with pytest.raises(RuntimeError, match="refused"):
        begin(tmp_path, looked_at, RuntimeError("refused"))
    assert (tmp_path / "status.json").read_bytes() == before


def test_a_start_of_which_nothing_comes_leaves_no_folder_where_there_was_none(tmp_path):
    states = list[str]()
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "new", lambda: states.append(read_status(tmp_path / "new").state), KeyboardInterrupt())
    assert states == ["starting"]
    assert list(tmp_path.iterdir()) == []


def test_what_a_peer_says_itself_stays(tmp_path):
    with pytest.raises(RuntimeError, match="later"):
        begin(tmp_path, lambda: write_status(tmp_path, Status(state="left"), ProcessInfo()), RuntimeError("later"))
    assert read_status(tmp_path).state == "left"


def test_what_is_asked_of_a_peer_that_begins_is_heard_and_what_was_asked_of_the_last_one_is_not(tmp_path):
    ask(tmp_path, "pause")
    heard: queue.Queue[str] = queue.Queue()
    with begun(tmp_path):
        ask_running(tmp_path, "leave")
        with Beacon(tmp_path, Status, lambda request: heard.put(request.name), period=0.01, begun=True):
            assert heard.get(timeout=PATIENCE) == "leave"
    assert heard.empty()


def test_the_other_processes_of_a_peer_are_not_refused_in_its_folder(tmp_path, monkeypatch):
    parent = psutil.Process(os.getppid())
    write_status(tmp_path, Status(), ProcessInfo(parent.pid, parent.create_time()))
    with pytest.raises(FolderInUse):
        look_over(tmp_path, (), (), None, None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    look_over(tmp_path, (), (), None, None)


def test_where_the_file_system_has_no_locks_a_peer_goes_on_with_a_warning(tmp_path, monkeypatch, caplog):
    def acquire(*arguments: object, **given: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(BaseFileLock, "acquire", acquire)
    with occupy(tmp_path):
        pass
    assert "this file system has no locks; see that no second process uses the folder" in caplog.text


def test_a_folder_that_cannot_be_locked_is_one_sentence(tmp_path, monkeypatch):
    def acquire(*arguments: object, **given: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(BaseFileLock, "acquire", acquire)
    with pytest.raises(DiskError, match=r"locking .* failed"), occupy(tmp_path):
        pass


def test_who_is_asked_to_finish_before_it_begins_leaves_with_a_round_of_this_life(tmp_path):
    problem = Problem(0)
    with join_here(tmp_path, problem) as peer:
        while peer.round < 2:
            problem.step()
    before, again = peer.round, Problem(0)
    resumed = join_here(tmp_path, again)
    resumed.finish()
    with resumed:
        assert resumed.round == before
        while not resumed.done:
            again.step()
        assert resumed.round == before + 1


def test_what_is_asked_in_the_last_moment_is_heard(tmp_path):
    heard = list[str]()
    with Beacon(tmp_path, Status, lambda request: heard.append(request.name), period=3600.0):
        ask(tmp_path, "set", key="threads", value="2")
    assert heard == ["set"]


def test_a_script_that_goes_elsewhere_keeps_its_peers_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problem = Problem(0)
    with join_here(Path("run"), problem) as peer:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        while peer.round < 2:
            problem.step()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert read_status(tmp_path / "run").state == "left"


def test_threads_that_nobody_wants_any_more_are_as_many_as_before():
    before, threads = torch.get_num_threads(), ThreadsWanted()
    try:
        torch.set_num_threads(3)
        threads.want(None)
        assert torch.get_num_threads() == 3, "nobody asked for anything"
        threads.want(1)
        threads.want(2)
        assert torch.get_num_threads() == 2
        threads.want(None)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_addresses_come_back_as_they_were_and_none_from_a_damaged_file(tmp_path):
    assert read_addresses(tmp_path) == Addresses()
    known = Addresses(("/ip4/0.0.0.0/tcp/4001",), ("/ip4/192.0.2.1/tcp/4002/p2p/x", "/ip6/::1/tcp/3/p2p/y"))
    keep_addresses(tmp_path, known)
    assert read_addresses(tmp_path) == known
    for damaged in (b"", b"\xff", b"[" * 100_000, b"[]", b"{}", b'{"listen": "/ip4", "others": []}', b"null"):
        (tmp_path / ADDRESSES_FILE).write_bytes(damaged)
        assert read_addresses(tmp_path) == Addresses()
    (tmp_path / ADDRESSES_FILE).write_text(json.dumps({"listen": [1, None], "others": ["/x"] * 1000}))
    assert read_addresses(tmp_path) == Addresses((), ("/x",) * 64)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_folders_that_are_made_are_their_owners_alone_and_others_stay(tmp_path: Path) -> None:
    """They were as the umask says, 0755 mostly, as were the logs in them."""
    theirs, before = tmp_path / "theirs", os.umask(0o022)
    try:
        theirs.mkdir()
        with occupy(theirs / "runs/mine"):
            DISK.make_folders(theirs / "runs/mine/checkpoints/of")
            ask(theirs / "runs/mine", "leave")
            EventLog(theirs / "runs/mine").close()
            write_status(theirs / "runs/mine", Status(), ProcessInfo())
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in theirs.rglob("*")}
    folders = ("runs", "mine", "checkpoints", "of", "requests")
    assert {name: modes[name] for name in folders} == dict.fromkeys(folders, 0o700)
    assert (modes["status.json"], modes["events.jsonl"]) == (0o600, 0o600)
    assert theirs.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_logs_of_an_earlier_version_are_hidden_with_the_token_that_they_hold(tmp_path: Path) -> None:
    for name in ("status.json", "events.jsonl", "events.1.jsonl.zst", "metrics.jsonl"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    keep_token(tmp_path, "correct-horse-battery")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.pop("metrics.jsonl") == 0o644, "it never had an invite"
    assert set(modes.values()) == {0o600}
