"""Commands as they are typed, a peer that runs, and the processes of others."""

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from decentral.cli import main
from decentral.manifest import Manifest, preset_manifest
from decentral.observe.status import ProcessInfo, Status, write_status
from tests.kit.families import NET, family, write_terms

__all__ = ["family"]
Run = Callable[..., Result]


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Each command by the words that name it, those of groups behind their group."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            for inner, inner_command in command.commands.items():
                yield f"{name} {inner}", inner_command


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Type ``decentral ARGUMENTS`` in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, **extra: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], **extra)  # type: ignore[arg-type]

    return run


@pytest.fixture
def terms(tmp_path: Path) -> list[str]:
    """A manifest that trains for hours, run.toml; and the options by which peers of this machine train by it."""
    write_terms(tmp_path)
    return ["--data", str(tmp_path / "text"), *NET]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folders, in which they type; no system answers there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def asked(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that notes what it is asked, and says that all is well."""
    folder = home / "bin"
    folder.mkdir()
    (folder / "systemctl").write_text(
        f'#!/bin/sh\necho "$@" >> {shlex.quote(str(home / "asked"))}\necho active running\n'
    )
    (folder / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.defpath}")
    return home / "asked"


@pytest.fixture
def served(home: Path, asked: Path) -> Path:
    """A person's folders where services are started, and terms of a run."""
    (home / "run.toml").write_text(preset_manifest("diloco").to_toml())
    return home


@pytest.fixture
def running_peer(tmp_path: Path) -> Path:
    """The directory of a peer that runs: this very process."""
    folder = tmp_path / "decentral-run"
    folder.mkdir()
    status = Status(
        state="training",
        peer="12D3KooWabcdef",
        run="demo",
        algorithm="sparseloco",
        round=41,
        rounds=60,
        rounds_seen=41,
        rounds_contributed=40,
        bytes_per_round=200_000,
        next_sync_seconds=12.0,
        members=({"peer": "12D3KooWabcdef", "live": True, "round": 41}, {"peer": "12D3KooWother", "round": 41}),
        health="healthy: round 41, you contributed to 40 of the last 41, 0.2 MB sent per round, next sync in 12 s",
        invite="decentral1:abc",
    )
    write_status(folder, status, ProcessInfo())
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """100 kB in which the next byte is easy to guess."""
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox. " * 5000)
    return path


def small(**tables: Any) -> Manifest:
    """Terms of six rounds on that text."""
    given: dict[str, Any] = {
        "run": {"rounds": 6},
        "model": {"hidden": 16, "layers": 1, "heads": 2, "context": 16},
        "data": {"corpus": "foxes", "batch_size": 2},
        "inner": {"steps": 10, "learning_rate": 1e-2, "warmup": 2},
    }
    return preset_manifest("sparseloco", **(given | tables))
