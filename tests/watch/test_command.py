"""``decentral watch``: what it refuses, and that a real terminal is as before once it ends."""

from __future__ import annotations

import importlib.util
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.cli.group import INTERRUPTED, TERMINATED
from tests.kit.patience import PATIENCE
from tests.kit.site import Folder

OTHER_SCREEN, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textual" else real(name))
    result = CliRunner().invoke(main, ["watch"])
    assert result.exit_code == 2
    assert result.stderr == "error: the view needs textual; pip install 'textual>=8.0'\n"


def read_until(terminal: int, words: bytes) -> bytes:
    """What was drawn until ``words`` came, those included."""
    seen = b""
    while words not in seen:
        ready, _, _ = select.select([terminal], [], [], PATIENCE)
        assert ready, seen
        seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda process, terminal: os.write(terminal, b"q"), 0),
        (lambda process, terminal: os.write(terminal, b"\x03"), INTERRUPTED),
        (lambda process, terminal: process.send_signal(signal.SIGTERM), TERMINATED),
    ],
    ids=["q", "ctrl-c", "sigterm"],
)
def test_it_gives_the_terminal_back_and_ends_with_the_code_of_what_ended_it(
    folder: Folder, end: Callable[[subprocess.Popen[bytes], int], object], code: int
) -> None:
    terminal, inner = pty.openpty()
    os.set_blocking(terminal, True)
    command = [sys.executable, "-m", "decentral", "watch", "--out", str(folder.path)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
        os.close(inner)
        drawn = read_until(terminal, b"close")
        assert OTHER_SCREEN in drawn
        end(process, terminal)
        assert BACK in read_until(terminal, BACK)
        assert process.wait(PATIENCE) == code
    os.close(terminal)
