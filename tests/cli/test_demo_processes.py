"""tests/cli/test_demo_processes.py"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.errors import DecentralError, DiskError
from tests.kit.patience import PATIENCE

FOREVER = "import threading, sys; print('ready', flush=True); threading.Event().wait()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOREVER
PARENT = (
    "import subprocess, sys; "
    f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}]); print(child.pid, flush=True); child.wait()"
)


KILLED = (
    "import sys; from pathlib import Path; from decentral.cli.demo_processes import Family; family = Family(); "
    f"child = family.start_command('a', Path(sys.argv[1]), [sys.executable, '-c', {FOREVER!r}]); "
    "child.first_line(240); print(child.process.pid, flush=True); child.process.wait()"
)


def start(family: Family, folder: Path, program: str, name: str = "a") -> DemoProcess:
    return family.start_command(name, folder / name, [sys.executable, "-c", program])


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_child_is_heard_and_ended_with_the_block(tmp_path: Path) -> None:
    with Family() as family:
        child = start(family, tmp_path, FOREVER)
        assert child.first_line(PATIENCE) == "ready"
        assert child.running
        assert family.strays() == []
    assert not child.running
    assert (tmp_path / "a/stdout.txt").read_text() == "ready\n"


def test_a_grandchild_of_a_killed_child_is_counted_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.cli.demo_processes.STRAY_SECONDS", 0.2)
    with Family() as family:
        child = start(family, tmp_path, PARENT)
        grandchild = int(child.first_line(PATIENCE))
        child.kill()
        child.process.wait(PATIENCE)
        assert family.count_strays() == 1
        assert [process.pid for process in family.strays()] == [grandchild]
    assert not alive(grandchild)


def test_a_child_that_ignores_the_request_to_leave_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.cli.demo_processes.LEAVE_SECONDS", 0.2)
    with Family() as family:
        child = start(family, tmp_path, STUBBORN)
        child.first_line(PATIENCE)
    assert child.process.returncode == -signal.SIGKILL


def test_everything_is_ended_when_the_block_ends_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Family() as family:  # noqa: PT012
        child = start(family, tmp_path, FOREVER)
        child.first_line(PATIENCE)
        raise KeyboardInterrupt
    assert not child.running


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_child_ends_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        child = psutil.Process(int(demo.stdout.readline()))
        assert alive(child.pid)
        demo.kill()
    assert psutil.wait_procs([child], timeout=PATIENCE)[1] == []


def test_children_have_one_torch_thread_and_their_own_process_group(tmp_path: Path) -> None:
    with Family() as family:
        child = start(family, tmp_path, "import os; print(os.environ['OMP_NUM_THREADS'], os.getpgrp())")
        threads, group = child.first_line(PATIENCE).split()
    assert threads == "1"
    assert int(group) != os.getpgrp()


def test_a_child_that_ends_silently_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with Family() as family:
        child = start(family, tmp_path, "import sys; sys.exit('error: the port is busy')")
        with pytest.raises(
            DecentralError, match=r"a said nothing.*error: the port is busy \(all of it in .*stderr.txt\)"
        ):
            child.first_line(PATIENCE)


def test_waiting_tells_whether_all_have_ended_in_time(tmp_path: Path) -> None:
    with Family() as family:
        quick = start(family, tmp_path, "pass", "quick")
        slow = start(family, tmp_path, FOREVER, "slow")
        assert family.wait([quick], PATIENCE)
        assert not family.wait([quick, slow], 0.05)


def test_a_place_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file, not a directory")
    with Family() as family, pytest.raises(DiskError, match="choose another --out"):
        start(family, tmp_path, "pass")
