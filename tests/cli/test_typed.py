"""What is typed: rates, sizes, and what a shell is given to complete with by the lines that docs/install.md names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from decentral.cli import main
from decentral.cli.quantities import Rate, Size

DECENTRAL = Path(sys.executable).with_name("decentral")
READ = [
    (Rate(), "20mbit", 2.5e6),
    (Rate(), "20 Mbit/s", 2.5e6),
    (Rate(), "2MB/s", 2e6),
    (Rate(), "2.5MB/s", 2.5e6),
    (Rate(), "600kB/s", 6e5),
    (Rate(), "1.5Mbit", 187_500.0),
    (Rate(), "1gbit", 1.25e8),
    (Rate(), "264kbit", 33_000.0),
    (Size(), "50GB", 50 * 10**9),
    (Size(), "0.5 tb", 5 * 10**11),
    (Size(), "800MB", 8 * 10**8),
]
REFUSED = [  # what may be bits or bytes or neither; rates with which nobody can take part; what is no size
    (Rate(), ["", "20", "mbit", "5mb", "5Mb/s", "5mb/s", "-1mbit", "1e3mbit", "5mbit/h"], "write it as 20mbit or"),
    (Rate(), ["0mbit", "250kbit", "30kB/s"], "263kbit is the least"),
    (Size(), ["", "50", "50G", "0GB", "-1GB", "50gbit", "50GB/s"], "write it as 50GB or 800MB"),
]


@pytest.mark.parametrize(("kind", "text", "meant"), READ, ids=[text for _, text, _ in READ])
def test_rates_are_read_as_links_are_sold_and_sizes_in_decimal_units(
    kind: click.ParamType, text: str, meant: float
) -> None:
    assert kind.convert(text, None, None) == meant


@pytest.mark.parametrize(
    ("kind", "text", "says"), [(kind, text, says) for kind, texts, says in REFUSED for text in texts]
)
def test_what_cannot_be_meant_is_refused_with_an_example(kind: click.ParamType, text: str, says: str) -> None:
    with pytest.raises(click.BadParameter, match=says):
        kind.convert(text, None, None)


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
    given = subprocess.run([DECENTRAL], env=environment, capture_output=True, text=True, check=True)
    assert f"_DECENTRAL_COMPLETE={shell}_complete" in given.stdout
