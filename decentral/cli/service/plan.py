"""What a service runs: a command line of ours, checked as if it were typed, and the folders that it writes to."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from decentral.errors import UsageError
from decentral.swarm.invite import Invite

COMMANDS = ("start", "join", "relay")
STOP_SECONDS = 180  # a peer that is told to stop makes its inner step, and keeps a checkpoint
FOR_GOOD = (2, 10, 11, 12, 21, 30, 40)  # exit codes after which starting again would end the same way
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One service of one user."""

    name: str
    words: tuple[str, ...]  # after "decentral", as typed
    here: Path  # absolute: where they were typed, so that relative paths in them mean the same
    writes: tuple[Path, ...]  # absolute
    python: str = sys.executable

    @property
    def command(self) -> tuple[str, ...]:
        """All of the command line."""
        return (self.python, "-m", "decentral", *self.words)


def label(name: str) -> str:
    """What the system knows a service by."""
    return f"decentral-{name}"


def plan(root: click.Context, name: str, words: tuple[str, ...], here: Path) -> ServicePlan:
    """Check a command line. UsageError, InviteError, or what the command itself says to its options."""
    check_name(name)
    if not words or words[0] not in COMMANDS:
        given = f"{words[0]!r}" if words else "nothing"
        raise UsageError(
            f"a service runs decentral {', '.join(COMMANDS)}, not {given}; write it after --, as you would type it"
        )
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, words[0])
    assert command is not None
    values = command.make_context(words[0], list(words[1:]), parent=root).params
    if words[0] == "join":
        Invite.parse(values["invite"])
    return ServicePlan(name, words, here, _writes(words[0], values, here))


def check_name(name: str) -> None:
    """UsageError for a name that would be no file's."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name {name[:50]!r}: small letters, digits and hyphens, 41 at most, such as overnight")


def _writes(command: str, values: dict[str, Any], here: Path) -> tuple[Path, ...]:
    if command != "relay":
        given = (values["directory"], values.get("offload"))
        return tuple(_named(here / folder) for folder in given if folder is not None)
    return tuple(sorted({_named(here / values["identity"]).parent, _named(here / values["keep_in"])}))


def _named(path: Path) -> Path:
    """Without `..`, which systemd takes no path with."""
    return Path(os.path.normpath(path))
