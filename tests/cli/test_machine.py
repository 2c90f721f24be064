"""Machines as they are: output that is not UTF-8, readers that have gone, streams that are closed, users without HOME,
names with blanks in what is to be typed next.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import decentral
from decentral.cli.service import place
from decentral.cli.support import write_support
from decentral.cli.terms import next_step
from decentral.errors import ConfigError, UsageError
from decentral.manifest import load_manifest, preset_manifest
from decentral.observe.screen import PlainDisplay, write_line, write_out
from decentral.observe.status import ProcessInfo, Status, write_status

ODD = "dätä 😀"
BLANK = "my run"


def command(*words: str, cwd: Path, encoding: str = "utf-8", shell: str = '"$@"') -> subprocess.CompletedProcess[bytes]:
    """What a shell has of ``decentral``; ``shell`` says where its streams lead."""
    alike = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    line = ["bash", "-c", shell, "bash", sys.executable, "-m", "decentral", *words]
    return subprocess.run(line, cwd=cwd, env={**os.environ, **alike}, capture_output=True, timeout=240, check=False)


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_name_that_the_screen_cannot_show_ends_no_command(encoding: str, tmp_path: Path) -> None:
    (tmp_path / ODD).mkdir()
    (tmp_path / ODD / "tëxt.txt").write_text("some words of text that peers train on\n" * 4000, encoding="utf-8")
    made = command("init", "run.toml", "--data", ODD, "--preset", "diloco", cwd=tmp_path, encoding=encoding)
    assert made.returncode == 0, made.stderr
    assert b"codec can't" not in made.stderr
    assert (tmp_path / "run.toml").is_file()


@pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")
@pytest.mark.parametrize("shell", ['"$@" | true', '"$@" >&-', '"$@" <&- >&- 2>&-'])
def test_a_reader_that_has_gone_and_closed_streams_are_no_errors(shell: str, tmp_path: Path) -> None:
    ended = command("--version", cwd=tmp_path, shell=f"set +o pipefail; {shell}")
    assert ended.stderr == b""
    assert ended.returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")
def test_a_token_that_is_asked_for_on_a_closed_stdin_is_one_sentence(tmp_path: Path) -> None:
    ended = command("start", "run.toml", "--admit", "-", cwd=tmp_path, shell='"$@" <&-')
    assert ended.returncode == UsageError.exit_code
    assert b"no token came on stdin" in ended.stderr


def test_a_loop_goes_on_where_its_screen_takes_ascii_only_or_is_none() -> None:
    kept = io.BytesIO()
    narrow = io.TextIOWrapper(kept, encoding="ascii", errors="strict")
    PlainDisplay(narrow, stop="peer.leave()").say(ODD)
    assert rb"d\xe4t\xe4 \U0001f600" in kept.getvalue()
    write_line(None, ODD)  # a process without stderr


def test_a_run_goes_on_where_nobody_reads_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="ascii") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        write_out(ODD)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_is_told_so_of_services_and_gets_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for system in ("linux", "darwin"):
        with pytest.raises(UsageError, match="no home folder; set HOME"):
            place("overnight", system)
    write_status(tmp_path, Status(), ProcessInfo())
    assert "status.json" in write_support(tmp_path, tmp_path / "help.zip", examined=False)


def test_what_is_to_be_typed_next_is_quoted_for_a_shell() -> None:
    line = next_step(preset_manifest("diloco"), Path(BLANK) / "run.toml", Path("my text"))
    assert shlex.split(line)[-3:] == [f"{BLANK}/run.toml", "--data", "my text"]
    with pytest.raises(ConfigError) as caught:
        load_manifest(Path(BLANK) / "run.toml")
    assert shlex.split(str(caught.value).partition("decentral init ")[2]) == [f"{BLANK}/run.toml"]


def test_every_hint_with_a_path_quotes_it() -> None:
    hint = re.compile(
        r"(?:decentral (?:init|start|export|leave|invite|dashboard|evaluate)|--out|chmod \d+) \{(?!shlex\.quote)"
    )
    sources = Path(decentral.__file__).parent.rglob("*.py")
    found = [
        f"{file}: {line.strip()}"
        for file in sources
        for line in file.read_text("utf-8").splitlines()
        if hint.search(line)
    ]
    assert not found
