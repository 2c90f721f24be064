"""What a shell is given to complete with, by the lines that docs/install.md names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from decentral.cli import main

DECENTRAL = Path(sys.executable).with_name("decentral")


@pytest.mark.parametrize(
    ("typed", "begun", "offered"),
    [
        ([], "sta", ["start", "status"]),
        (["start"], "--max-", ["--max-upload", "--max-download"]),
        (["init", "--preset"], "str", ["streaming"]),
        (["demo", "--algorithm"], "nolo", ["noloco"]),
        (["join", "--transport"], "n", ["native"]),
    ],
)
def test_commands_options_and_presets_are_completed(typed: list[str], begun: str, offered: list[str]) -> None:
    found = ShellComplete(main, {}, "decentral", "_DECENTRAL_COMPLETE").get_completions(typed, begun)
    assert {one.value for one in found} >= set(offered)
    assert all(one.value.startswith(begun) for one in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_lines_from_the_installed_command(shell: str) -> None:
    environment = os.environ | {"_DECENTRAL_COMPLETE": f"{shell}_source"}
    given = subprocess.run([DECENTRAL], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert f"_DECENTRAL_COMPLETE={shell}_complete" in given.stdout
