"""Secrets of a command line: asked for, or read from files, environment or stdin; warned of where they are typed."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.cli.demo_processes import Family
from decentral.cli.relaying import Keeping
from decentral.observe.screen import invite_for
from decentral.swarm.invite import Invite
from tests.kit.patience import PATIENCE

TOKEN = "correct-horse-battery"
BARE, WHOLE = str(Invite(bytes(32), ())), str(Invite(bytes(32), (), TOKEN))
UNITS = Path("config/systemd/user")  # below the folder that is typed in


def file_with(text: str, mode: int = 0o600) -> str:
    """How a file of here is named that holds the text."""
    path = Path("secret file")
    path.write_text(f"{text}\n")
    path.chmod(mode)
    return f"@{path}"


# ---- a service, which starts its command again and again ----


WAYS = ("typed", "asked for", "a file", "the environment")
SECRETS = [
    (("start", "run.toml"), "--admit", "DECENTRAL_ADMIT", TOKEN, (*WAYS, "typed with =")),
    (("join",), None, "DECENTRAL_INVITE", WHOLE, WAYS),  # an argument has no =
    (("relay",), "--keep", "DECENTRAL_KEEP", WHOLE, (*WAYS, "typed with =")),
]


@pytest.mark.parametrize(
    ("command", "option", "variable", "text", "way"), [(*secret, way) for *secret, ways in SECRETS for way in ways]
)
def test_a_service_has_its_secret_in_a_file_of_its_owner_however_it_was_given(
    served: Path, command: tuple[str, ...], option: str | None, variable: str, text: str, way: str
) -> None:
    """It stood in the unit, and so on the command line of the service."""
    written = {"asked for": "-", "a file": file_with(text)}.get(way, text)
    given = () if option is None else (option,)
    words = (f"{option}={written}",) if way == "typed with =" else (*given, written)
    words, env = ((), {variable: text}) if way == "the environment" else (words, {})
    after = ("--out", "night") if command != ("relay",) else ()
    asks = ["service", "install", "--name", "night", "--", *command, *words, *after]
    result = CliRunner().invoke(main, asks, env=env, input=f"{text}\n")
    assert result.exit_code == 0, result.output
    unit = (UNITS / "decentral-night.service").read_text()
    kept = UNITS / "decentral-night.1.secret"
    assert kept.read_text() == f"{text}\n"
    assert kept.stat().st_mode & 0o777 == 0o600
    (started,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    assert f"@{served / kept}" in started
    assert text not in unit
    assert " - " not in started
    assert "secret file" not in started
    assert result.stderr.count("warning: ") == way.startswith("typed")
    assert CliRunner().invoke(main, ["service", "remove", "--name", "night"]).exit_code == 0
    assert list(UNITS.iterdir()) == []


def test_what_the_service_is_told_means_what_was_given(served: Path) -> None:
    words = ["start", "run.toml", "--admit", TOKEN, "--out", "night"]
    assert CliRunner().invoke(main, ["service", "install", "--", *words]).exit_code == 0
    kept = f"@{served / UNITS / 'decentral-peer.1.secret'}"
    again = ["service", "install", "--name", "again", "--", "start", "run.toml", "--admit", kept]
    assert CliRunner().invoke(main, again).exit_code == 0
    assert (UNITS / "decentral-again.1.secret").read_text() == f"{TOKEN}\n"


def test_an_invite_without_a_token_is_no_secret(served: Path) -> None:
    result = CliRunner().invoke(main, ["service", "install", "--", "join", BARE])
    assert f"join {BARE}\n" in (UNITS / "decentral-peer.service").read_text()
    assert "warning" not in result.stderr
    assert [path.name for path in UNITS.iterdir()] == ["decentral-peer.service"]
    result = CliRunner().invoke(
        main, ["service", "install", "--name", "b", "--", "join"], env={"DECENTRAL_INVITE": BARE}
    )
    assert result.exit_code == 0, "no service has the environment of who installs it"
    assert (UNITS / "decentral-b.1.secret").read_text() == f"{BARE}\n"


def test_two_runs_that_a_relay_keeps_are_not_mixed_up(served: Path) -> None:
    other = str(Invite(bytes([1]) * 32, (), TOKEN))
    asks = ["service", "install", "--", "relay", "--keep", "-", "--keep", BARE, "--keep", "-"]
    assert CliRunner().invoke(main, asks, input=f"{WHOLE}\n{other}\n").exit_code == 0
    files = [UNITS / f"decentral-peer.{number}.secret" for number in (1, 2)]
    assert [path.read_text().strip() for path in files] == [WHOLE, other]
    told = f"relay --keep @{served / files[0]} --keep {BARE} --keep @{served / files[1]}\n"
    assert told in (UNITS / "decentral-peer.service").read_text()


def test_showing_a_service_shows_no_secret_and_writes_none(home: Path) -> None:
    result = CliRunner().invoke(main, ["service", "install", "--show", "--", "join", WHOLE])
    assert "ExecStart=" in result.stdout
    assert WHOLE not in result.stdout
    assert list(home.iterdir()) == []


# ---- what is said of it ----


def test_what_is_typed_goes_on_to_work_and_is_warned_of_in_one_line(served: Path) -> None:
    asks = ["service", "install", "--show", "--", "start", "run.toml", "--admit", TOKEN]
    (line,) = CliRunner().invoke(main, asks).stderr.splitlines()
    assert line == (
        "warning: --admit: all users of this machine can read the token on its command line; give - to be asked for "
        "it, or @FILE, or set DECENTRAL_ADMIT"
    )
    (line,) = CliRunner().invoke(main, ["service", "install", "--show", "--", "join", WHOLE]).stderr.splitlines()
    assert line.startswith("warning: INVITE: all users of this machine can read the token")


def test_a_file_that_others_may_read_is_warned_of(served: Path) -> None:
    asks = ["service", "install", "--show", "--", "start", "run.toml", "--admit", file_with(TOKEN, 0o644)]
    (line,) = CliRunner().invoke(main, asks).stderr.splitlines()
    assert "others of this machine may read the token in it; chmod 600 'secret file'" in line


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo terminals")
def test_on_a_terminal_it_is_asked_for_and_not_shown(served: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        words = ["service", "install", "--", "start", "run.toml", "--admit", "-"]
        os.execv(sys.executable, [sys.executable, "-m", "decentral", *words])
    seen = b""
    while b"token: " not in seen:
        seen += os.read(terminal, 1024)
    os.write(terminal, f"{TOKEN}\n".encode())
    while True:
        try:
            more = os.read(terminal, 1024)
        except OSError:  # Linux: the other end is closed
            break
        if not more:
            break
        seen += more
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0, seen
    assert TOKEN.encode() not in seen
    assert (UNITS / "decentral-peer.1.secret").read_text() == f"{TOKEN}\n"


# ---- what decentral starts, and writes ----


def test_the_command_line_of_a_relays_follower_has_no_invite(tmp_path: Path) -> None:
    command = Keeping((WHOLE,), tmp_path, 10**6).command(0, ("/ip4/127.0.0.1/tcp/0",), "/ip4/127.0.0.1/tcp/1")
    assert not any(WHOLE in word or TOKEN in word for word in command)


def test_a_demo_takes_no_secret_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first peer would ask the others for a token, and its invite would stand on their command lines."""
    monkeypatch.setenv("DECENTRAL_ADMIT", TOKEN)
    monkeypatch.setenv("DECENTRAL_INVITE", WHOLE)
    program = "import os; print(sorted(name for name in os.environ if name in ('DECENTRAL_ADMIT', 'DECENTRAL_INVITE')))"
    with Family() as family:
        child = family.start_command("one", tmp_path / "one", [sys.executable, "-c", program])
        assert child.first_line(PATIENCE) == "[]"


def test_an_invite_is_written_without_its_token_to_what_may_be_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.openpty()
    end, begin = os.pipe()
    with open(theirs, "w") as terminal, open(begin, "w") as pipe, (tmp_path / "log").open("w") as file:
        assert invite_for(terminal, WHOLE) == WHOLE
        assert invite_for(file, WHOLE) == BARE
        assert invite_for(file, BARE) == BARE
        assert invite_for(pipe, WHOLE) == BARE, "errors that are piped go to a log"
        monkeypatch.setattr(sys, "stdout", pipe)
        assert invite_for(pipe, WHOLE) == WHOLE, "a program reads the result"
    os.close(ours)
    os.close(end)


def test_who_prints_an_invite_prints_no_token() -> None:
    assert TOKEN not in repr(Invite.parse(WHOLE))
