"""What stands beside the core comes by entry points, ours as another package's."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.cli.ports import PAGES
from decentral.plugins import added
from decentral.transport.choice import GROUP

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]


@click.command("count", help="Count to three.")
def count_command() -> None:
    click.echo("1 2 3")


def also(monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Pretend that another package with these commands is installed."""
    others = {name: EntryPoint(name, value, "decentral.commands") for name, value in commands.items()}
    monkeypatch.setitem(vars(main), "_plugins", others)


@pytest.mark.parametrize("group", ["decentral.commands", PAGES, GROUP])
def test_what_is_declared_is_what_is_installed_and_loads(group: str) -> None:
    installed = added(group)
    assert {name: installed[name].value for name in DECLARED[group]} == DECLARED[group]
    for name in DECLARED[group]:
        installed[name].load()


def test_another_packages_command_is_listed_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    also(monkeypatch, count=f"{__name__}:count_command")
    assert "Count to three." in CliRunner().invoke(main, ["--help"]).stdout
    assert CliRunner().invoke(main, ["count"]).stdout == "1 2 3\n"


def test_a_command_whose_package_does_not_load_says_so_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    also(monkeypatch, count="no_such_package:count", join="no_such_package:join")
    shown = CliRunner().invoke(main, ["--help"]).stdout
    assert "count" not in shown
    assert "  join " in shown
    done = CliRunner().invoke(main, ["count"])
    assert done.exit_code == 2
    assert "count: its package does not load" in done.stderr
