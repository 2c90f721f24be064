"""What `decentral start` leaves on a real terminal and in pipes, as people start it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from decentral.cli.demo_processes import Family
from decentral.observe.events import EVENTS_FILE, EventLog
from decentral.observe.lines import pack_put_aside, put_aside
from decentral.observe.status import ProcessInfo, Status, read_status, write_status
from tests.cli.conftest import Run
from tests.kit.families import NET, NOBODY, write_terms
from tests.kit.patience import PATIENCE, until
from tests.kit.terminals import OnTerminal, Screen

COMMAND = (sys.executable, "-m", "decentral")
START = ["start", "run.toml", "--data", "text", "--alone", *NET]
FILES = ("run.toml", "text")  # of the folder of terms
BRINGS = " --data PATH/TO/foxes"


@pytest.fixture
def terms(tmp_path: Path) -> Path:
    """A folder with a manifest that trains for hours on a model of a few thousand parameters, and its text."""
    write_terms(tmp_path)
    return tmp_path


def rounds_seen(screen: Screen) -> int:
    return max(map(int, re.findall(r"round +(\d+) of", "\n".join(screen.lines))), default=0)


@pytest.mark.parametrize(
    ("columns", "rows"), [(60, 20), *(pytest.param(*size, marks=pytest.mark.long) for size in ((80, 24), (200, 50)))]
)
def test_the_invite_is_whole_in_the_scrollback_while_the_view_is_live_and_after_it(
    terms: Path, columns: int, rows: int
) -> None:
    with OnTerminal([*COMMAND, *START], columns, rows, cwd=terms) as terminal:
        terminal.until(lambda screen: rounds_seen(screen) >= 2, PATIENCE)
        seen = rounds_seen(terminal.screen)
        terminal.until(lambda screen: rounds_seen(screen) >= seen + 2, PATIENCE)
        line = f"decentral join {read_status(terms / 'decentral-run').invite}{BRINGS}"
        terminal.until(lambda screen: screen.lines.count(line) == 1, PATIENCE)  # a frame may be half drawn by now
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.finish(PATIENCE) == 130
    lines = [row.rstrip() for row in terminal.screen.lines]
    assert lines.count(line) == 1, "\n".join(lines)
    assert "to stop: " not in "\n".join(lines)  # there is nothing to stop any more


@pytest.mark.long
def test_a_relay_that_does_not_answer_is_told_of_within_20_s_on_the_screen_in_the_status_and_beside_the_invite(
    terms: Path, family: Family, run: Run
) -> None:
    typed = ["start", "run.toml", "--data", "text", "--alone", *NET, "--relay", NOBODY, "--out", str(terms / "out")]
    peer = family.start("peer", terms / "out", [str(terms / word) if word in FILES else word for word in typed])
    until(lambda: (terms / "out/status.json").exists() and bool(read_status(terms / "out").invite))
    began = time.monotonic()
    until(lambda: bool(read_status(terms / "out").silent_relays))
    assert time.monotonic() - began < 20
    told = "relay 127.0.0.1:1 does not answer"
    until(lambda: f"warning: {told}" in (peer.directory / "stderr.txt").read_text())
    assert "reaches: this machine only (127.0.0.1)" in (peer.directory / "stderr.txt").read_text()
    assert run("invite", "--out", terms / "out").stderr == f"reaches: this machine only (127.0.0.1); {told}\n"
    lines = run("status", "--out", terms / "out").stdout.splitlines()
    assert lines[0].endswith(told)
    assert lines[-1] == f"reaches   this machine only (127.0.0.1); {told}"


@pytest.mark.long
def test_in_a_pipe_a_state_is_said_once_and_a_round_in_one_short_line(terms: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, *START], cwd=terms, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        lines = list(until_rounds(process.stderr, 3))
        process.send_signal(signal.SIGINT)
        lines += process.stderr.read().splitlines()
        assert process.stdout.read() == f"decentral join {read_status(terms / 'decentral-run').invite}{BRINGS}\n"
    assert sum(line.startswith("looking: ") for line in lines) <= 1
    assert all(len(line) < 120 for line in lines if line.startswith("round "))
    assert any(line.startswith("text ") for line in lines), lines


def until_rounds(lines: Iterator[str], number: int) -> Iterator[str]:
    """The lines up to the ``number``-th of a round."""
    for line in lines:
        number -= line.startswith("round ")
        yield line.rstrip("\n")
        if not number:
            return


def test_logs_are_followed_until_ctrl_c(run: Run, running_peer: Path) -> None:
    log = EventLog(running_peer)
    log("commit", outer_step=1, contributors=["me"], members=["me"], contributed=True)
    command = [*COMMAND, "logs", "-f", "--out", str(running_peer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "round 1: you alone" in process.stdout.readline()
        log("commit", outer_step=2, contributors=["me"], members=["me"], contributed=True)
        assert "round 2: you alone" in process.stdout.readline()
        (running_peer / "events.jsonl").rename(running_peer / "events.1.jsonl")
        log.close()
        log = EventLog(running_peer)
        log("commit", outer_step=3, contributors=["me"], members=["me"], contributed=True)
        assert "round 3: you alone" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == ""
    log.close()


@pytest.mark.parametrize("follow", [["--follow"], ["-f", "--json"]])
def test_logs_of_a_peer_that_has_ended_are_not_followed(run: Run, running_peer: Path, follow: list[str]) -> None:
    log = EventLog(running_peer)
    log("commit", outer_step=1, contributors=["me"], members=["me"], contributed=True)
    log.close()
    status = Status(state="done", round=1, rounds=1, health="done: 1 rounds, 0.2 MB sent")
    write_status(running_peer, status, ProcessInfo(pid=os.getpid(), created=1.0))  # a number that was reused since
    result = run("logs", *follow)
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert "commit" in line if "--json" in follow else line.endswith(" round 1: you alone")
    assert result.stderr == "the peer has ended: done: 1 rounds, 0.2 MB sent\n"


@pytest.mark.parametrize("grows", [True, False], ids=["and one that grows", "and nothing else"])
def test_logs_of_some_time_are_followed_through_what_lies_packed(run: Run, running_peer: Path, grows: bool) -> None:
    began = time.time()
    log = EventLog(running_peer, wall=iter((began - 7200, *[began] * 10)).__next__)
    for number in range(9):
        log("round", number=number)
        if number % 3 == 2 and (number < 8 or not grows):
            log.close()
            put_aside(running_peer / EVENTS_FILE)
            pack_put_aside(running_peer / EVENTS_FILE)
            log = EventLog(running_peer, wall=lambda: began)
    log.close()
    if not grows:
        (running_peer / EVENTS_FILE).unlink(missing_ok=True)
    write_status(running_peer, Status(state="done", health="done: 9 rounds"), ProcessInfo(pid=os.getpid(), created=1.0))
    assert re.findall(r"number=(\d)", run("logs", "-f").stdout) == [*"012345678"]
    assert re.findall(r"number=(\d)", run("logs", "-f", "--since", "1h").stdout) == [*"12345678"]
    assert re.findall(r"number=(\d)", run("logs", "--since", "1h").stdout) == [*"12345678"]
    assert re.findall(r"number=(\d)", run("logs", "-f", "--last", "4").stdout) == [*"5678"]


def test_logs_are_followed_until_the_peer_ends_and_its_last_words_are_told(running_peer: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peer = ProcessInfo(child.pid, psutil.Process(child.pid).create_time())
    write_status(running_peer, Status(state="training", health="healthy: round 3"), peer)
    log = EventLog(running_peer)
    log("commit", outer_step=1, contributors=["me"], members=["me"], contributed=True)
    command = [*COMMAND, "logs", "-f", "--out", str(running_peer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "round 1: you alone" in process.stdout.readline()
        log("commit", outer_step=2, contributors=["me"], members=["me"], contributed=True)
        log.close()
        write_status(running_peer, Status(state="left", health="left: round 2 was its last"), peer)
        child.communicate()
        assert "round 2: you alone" in process.stdout.readline()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == "the peer has ended: left: round 2 was its last\n"
