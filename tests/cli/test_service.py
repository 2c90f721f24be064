"""Services: what systemd and launchd are told, and what happens where they answer, refuse or are missing."""

from __future__ import annotations

import plistlib
import shlex
from pathlib import Path

import pytest

from decentral.cli.service import ServicePlan, agent, quote, task, unit
from decentral.errors import UsageError
from decentral.swarm.invite import Invite
from tests.cli.conftest import Run

INVITE = str(Invite(bytes(32), ()))


def settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] != "#")


def test_a_peer_is_installed_started_listed_and_removed(run: Run, home: Path, asked: Path) -> None:
    result = run("service", "install", "--name", "overnight", "--", "join", INVITE, "--out", "night")
    assert result.exit_code == 0, result.stderr
    path = home / "config/systemd/user/decentral-overnight.service"
    told = settings(path.read_text())
    assert shlex.split(told["ExecStart"])[1:] == ["-m", "decentral", "join", INVITE, "--out", "night"]
    assert told["WorkingDirectory"] == str(home)
    assert told["ReadWritePaths"] == str(home / "night")
    assert path.stat().st_mode & 0o777 == 0o600, "an invite may hold a token"
    assert asked.read_text().splitlines() == ["--user daemon-reload", "--user enable --now decentral-overnight.service"]
    assert run("service", "status").stdout.split() == ["overnight", "active", "running"]
    asked.unlink()
    assert run("service", "remove", "--name", "overnight").exit_code == 0
    assert asked.read_text().splitlines()[0] == "--user disable --now decentral-overnight.service"
    assert not path.exists()
    assert (home / "night").is_dir(), "what it has learnt stays"


def test_where_the_system_does_not_answer_what_is_left_to_do_is_said(run: Run, home: Path) -> None:
    result = run("service", "install", "--", "relay", "--max-rate", "50mbit")
    assert result.exit_code == 1, "nothing was started"
    assert "there is no systemctl here; run where it does: systemctl --user daemon-reload && " in result.stderr
    assert settings((home / "config/systemd/user/decentral-peer.service").read_text())["ExecStart"].endswith(
        "relay --max-rate 50mbit"
    )


def test_a_service_of_that_name_is_not_replaced(run: Run, home: Path, asked: Path) -> None:
    assert run("service", "install", "--", "relay").exit_code == 0
    path = home / "config/systemd/user/decentral-peer.service"
    before = path.read_bytes()
    again = run("service", "install", "--", "join", INVITE)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    assert path.read_bytes() == before


def test_showing_changes_nothing(run: Run, home: Path) -> None:
    assert "ExecStart=" in run("service", "install", "--show", "--", "relay").stdout
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (["--out", "night", "--offload", "large"], ["night", "large"]),  # the unit made that folder read-only
        (["--out", "../other/run"], ["../other/run"]),
    ],
)
def test_a_unit_may_write_to_the_folders_of_its_peer_as_systemd_takes_their_names(
    run: Run, home: Path, options: list[str], folders: list[str]
) -> None:
    shown = run("service", "install", "--show", "--", "join", INVITE, *options).stdout
    written = [line.partition("=")[2].strip('"') for line in shown.splitlines() if line.startswith("ReadWritePaths=")]
    assert written == [str((home / folder).resolve()) for folder in folders]


def a_plan(*words: str, here: str = "/home/a b") -> ServicePlan:
    return ServicePlan("peer", words, Path(here), (Path(here) / "run",), python="/usr/bin/python3")


def test_a_unit_leaves_by_itself_comes_last_and_writes_to_its_folder_only() -> None:
    told = settings(unit(a_plan("join", INVITE)))
    assert int(told["TimeoutStopSec"]) >= 120
    assert (told["Nice"], told["IOSchedulingClass"]) == ("10", "idle")
    assert (told["ProtectSystem"], told["ProtectHome"], told["PrivateTmp"]) == ("strict", "read-only", "yes")
    assert told["ReadWritePaths"] == '"/home/a b/run"'
    assert {"2", "11", "12", "21"} <= set(told["RestartPreventExitStatus"].split())


def test_a_relay_comes_not_last_and_has_the_limits_that_its_page_names(run: Run, home: Path) -> None:
    """Peers that meet through it would wait for whatever else the machine does."""
    told = settings(run("service", "install", "--show", "--", "relay", "--max-memory", "200MB").stdout)
    assert not {"Nice", "CPUWeight", "IOSchedulingClass"} & set(told)
    assert (told["MemoryMax"], told["LimitNOFILE"]) == ("240000000", "4096")
    keeps = settings(run("service", "install", "--show", "--", "relay", "--keep", INVITE).stdout)
    assert "MemoryMax" not in keeps, "a process with torch for each run would be in it"


def test_a_service_is_in_the_background_already(run: Run, served: Path) -> None:
    refused = run("service", "install", "--", "start", "run.toml", "--background")
    assert (refused.exit_code, "leave --background out" in refused.stderr) == (2, True)


def test_a_peer_whose_terms_there_are_not_is_refused_before_anything_is_written(run: Run, home: Path) -> None:
    refused = run("service", "install", "--", "start", "absent.toml")
    assert (refused.exit_code, "absent.toml" in refused.stderr) == (10, True)
    assert list(home.iterdir()) == []


def test_a_run_below_the_temporary_folder_is_not_hidden_from_its_service() -> None:
    assert "PrivateTmp" not in unit(a_plan("relay", here="/tmp/trial"))


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain-1.toml", "plain-1.toml"),
        ("my run", '"my run"'),
        ("", '""'),
        ('say "hi"', '"say \\"hi\\""'),
        ("50%", "50%%"),
        ("$HOME", "$$HOME"),
        ("back\\slash", '"back\\\\slash"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, written: str) -> None:
    assert quote(word) == written


def test_a_word_with_a_line_break_cannot_add_a_directive() -> None:
    with pytest.raises(UsageError, match="control characters"):
        unit(a_plan("join", "x\nExecStartPre=/bin/evil"))


def test_an_agent_of_macos_says_the_same() -> None:
    told = plistlib.loads(agent(a_plan("join", INVITE)))
    assert told["ProgramArguments"] == ["/usr/bin/python3", "-m", "decentral", "join", INVITE]
    assert told["WorkingDirectory"] == "/home/a b"
    assert told["ExitTimeOut"] >= 120


def test_a_task_of_windows_is_one_line_to_paste() -> None:
    line = task(a_plan("join", INVITE))
    assert line.startswith("schtasks /Create /SC ONLOGON /TN decentral-peer /TR ")
    assert "\n" not in line
