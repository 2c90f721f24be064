"""Peers that outlive their terminal, or end with it in good order, and a disk that fills; back without the invite."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from decentral.cli.background import service_name
from decentral.cli.demo_processes import Family
from decentral.errors import DiskError
from decentral.manifest import load_manifest, preset_manifest
from decentral.node.folder import Addresses, keep_addresses, way_back
from decentral.observe.status import read_status
from decentral.swarm.invite import Invite
from tests.chaos.disks import small_disk
from tests.cli.conftest import Run
from tests.kit.families import INVITE, NET, NOBODY, status_of, write_terms
from tests.kit.patience import PATIENCE, until


@pytest.mark.long
def test_a_terminal_that_closes_is_left_in_good_order(terms: list[str], tmp_path: Path) -> None:
    """It is a crash for who has only ever closed windows."""
    out = tmp_path / "first"
    command = [sys.executable, "-m", "decentral", "start", "run.toml", *terms, "--alone", "--out", str(out)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as peer:
        os.close(theirs)
        try:
            seen = b""
            while b"decentral join decentral1:" not in seen:
                seen += os.read(ours, 4096)
            until(lambda: read_status(out).round > 0)
            os.close(ours)
            assert peer.wait(PATIENCE) == 129
        finally:
            peer.kill()
    assert read_status(out).state == "left"
    assert read_status(out).health.endswith(
        "was its last, everything is kept; start it again with the same --out to resume"
    )


def test_the_way_back_is_made_of_what_the_folder_keeps(tmp_path: Path) -> None:
    assert way_back(tmp_path) is None
    write_terms(tmp_path)
    keep_addresses(tmp_path, Addresses(others=("/a b", "/ip4/" + "1" * 600, NOBODY)))
    assert way_back(tmp_path) == Invite(load_manifest(tmp_path / "run.toml").digest, (NOBODY,))


def test_without_an_invite_the_folder_must_hold_a_run(run: Run) -> None:
    result = run("join", "--out", "night")
    assert result.exit_code == 2
    assert "missing argument 'INVITE', and night holds no run to come back to; ask a peer" in result.stderr


def test_what_stands_behind_two_dashes_is_the_scripts_where_no_invite_was_given(run: Run, tmp_path: Path) -> None:
    (tmp_path / "night").mkdir()
    write_terms(tmp_path / "night")
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    result = run("join", "--out", "night", "--script", "train.py", "--", "--seed", "7")
    assert (result.exit_code, result.stdout) == (0, "['--seed', '7']\n")


@pytest.mark.long
def test_a_peer_in_the_background_is_steered_as_any_and_comes_back_without_its_invite(
    family: Family, run: Run, terms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["start", "run.toml", *terms, "--alone", "--admit", "moss-and-fern-by-the-water", "--out", "first"]
    first = family.start("first", tmp_path / "first", typed)
    until(lambda: (tmp_path / "first/status.json").exists() and status_of(first).round > 0)
    invite = run("invite", "--out", "first").stdout.split()[2]
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemctl
    for given, said in (["-"], invite), ([], ""):  # it comes back after it has left
        result = run("join", *given, *terms, "--out", "night", "--background", input=said)
        assert result.exit_code == 0, result.stderr
        peer = psutil.Process(int(result.stdout.split()[1].rstrip(";")))
        assert peer.is_running()
        assert (os.getsid(peer.pid), peer.terminal()) == (peer.pid, None)
        assert invite not in peer.cmdline(), "all users may read it"
        assert "what it says goes to night/background.log\n" in result.stdout
        until(lambda: len(read_status(tmp_path / "night").members) == 2)
        assert run("leave", "--out", "night", "--wait", PATIENCE).exit_code == 0
        psutil.wait_procs([peer], timeout=PATIENCE)
        assert read_status(tmp_path / "night").state == "left"
    assert (tmp_path / "night/background.log").stat().st_mode & 0o777 == 0o600


def test_what_fails_in_the_background_fails_here_and_leaves_nothing(run: Run, home: Path) -> None:
    """The child asks nobody: its terms are of a script, and it is refused before anything begins."""
    (home / "run.toml").write_text(preset_manifest("diloco").to_toml())
    (home / "foxes").write_bytes(b"the quick brown fox. " * 5000)
    result = run("start", "run.toml", "--data", "foxes", "--out", "new", "--background")
    assert result.exit_code == 30
    assert result.stderr.splitlines()[-1].startswith('error: data.corpus = "stdlib"')
    assert not (home / "new").exists()


@pytest.mark.parametrize("words", [["acid cargo mural tulip 4711"], ["acid", "cargo", "mural", "tulip", "4711"]])
def test_words_that_are_good_for_one_start_are_exchanged_by_the_process_that_goes_on(
    run: Run, home: Path, asked: Path, words: list[str]
) -> None:
    """Nobody is there to invite: the process says so, and nothing is left."""
    result = run("join", *words, *NET, "--join-timeout", "0.5", "--out", "new", "--background")
    assert result.exit_code == 20, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: words: nobody invites at 4711")
    assert not (home / "new").exists()
    assert not asked.exists(), "no service"


def test_where_systemd_answers_it_is_a_service_called_after_its_folder(run: Run, home: Path, asked: Path) -> None:
    for _ in range(2):  # the second one is the peer that comes back
        result = run("join", INVITE, "--out", "night", "--background")
        assert result.exit_code == 0, result.stderr
    name = service_name(home / "night")
    unit = (home / f"config/systemd/user/decentral-{name}.service").read_text()
    assert f"-m decentral join {INVITE} --out night\n" in unit
    assert asked.read_text().splitlines()[-1] == f"--user enable --now decentral-{name}.service"
    assert f"decentral service remove --name {name}  keeps the system from starting it again\n" in result.stdout
    assert "decentral leave --out night  stops it" in result.stdout


@pytest.mark.long
def test_a_peer_that_a_full_disk_stops_says_so_and_goes_on_when_there_is_room(
    family: Family, run: Run, terms: list[str], tmp_path: Path
) -> None:
    """It was "killed or crashed": there was no room for the last word, either."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with ExitStack() as stack:
        try:
            stack.enter_context(small_disk(disk, 8))
        except DiskError as error:
            pytest.skip(str(error))
        typed = ["start", "run.toml", *terms, "--alone", "--out", str(disk / "out"), "--metrics", "0"]
        peer = family.start("peer", tmp_path / "peer", typed)
        until(lambda: (disk / "out/status.json").exists() and read_status(disk / "out").round > 0)
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))
        told = re.search(r"metrics at (\S+)", (peer.directory / "stderr.txt").read_text())
        assert told is not None
        until(lambda: b"\ndecentral_peer_write_failed 1.0\n" in urllib.request.urlopen(told[1]).read())
        assert peer.process.wait(PATIENCE) == 50
        result = run("status", "--out", disk / "out")
        assert result.exit_code == 1
        assert result.stdout.startswith(
            "stopped: the disk is full; free some space; start it again with the same --out to resume\n"
        )
        (disk / "filler").unlink()
        stopped = read_status(disk / "out").round
        again = family.start("again", tmp_path / "again", typed)
        until(lambda: read_status(disk / "out").round > stopped)
        again.process.terminate()
        assert again.process.wait(PATIENCE) == 143
