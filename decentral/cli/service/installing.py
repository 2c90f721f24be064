"""Putting a service's file in place, telling the system of it, and taking both away again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from decentral.cli.service.agent import agent
from decentral.cli.service.plan import ServicePlan, label
from decentral.cli.service.unit import unit
from decentral.errors import ConfigError, DiskError, UsageError

_PATIENCE = 60.0  # s for a question to the system


def place(name: str, system: str = sys.platform) -> Path:
    """Where the file of a service lies. UsageError where there are none."""
    if system.startswith("linux"):
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return config / f"systemd/user/{label(name)}.service"
    if system == "darwin":
        return Path.home() / f"Library/LaunchAgents/{label(name)}.plist"
    raise UsageError("services are for Linux and macOS; on Windows decentral service install shows a line to paste")


def install(plan: ServicePlan) -> Iterator[str]:
    """Write the file and start it; yields what there is to say. UsageError when one of that name is there."""
    path = place(plan.name)
    if path.exists():
        raise UsageError(f"{path} is there already; decentral service remove --name {plan.name}, or give another name")
    text = unit(plan).encode() if path.suffix == ".service" else agent(plan)
    try:
        for folder in (*plan.writes, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # an invite may hold the token that lets others in
        path.write_bytes(text)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written ({error.strerror}); use an account that may") from error
    yield f"{path}: written"
    yield from _told(_begin(path))
    if path.suffix == ".service":
        yield "it runs while you are logged in; loginctl enable-linger keeps it running when you are not"


def remove(name: str) -> Iterator[str]:
    """Stop it, which leaves at the next step, and take the file away. The run directory stays."""
    path = place(name)
    if not path.exists():
        raise UsageError(f"{path}: there is no such service; decentral service status lists them")
    yield from _told(_end(path))
    path.unlink()
    if path.suffix == ".service":
        with suppress(ConfigError):
            _ask(["systemctl", "--user", "daemon-reload"])
    yield f"{path}: removed; the run directory stays as it is"


def installed() -> list[str]:
    """Names of the services that there are."""
    pattern = place("*")
    prefix = label("")
    return sorted(path.stem.removeprefix(prefix) for path in pattern.parent.glob(pattern.name))


def state(name: str) -> str:
    """In the system's words."""
    path = place(name)
    try:
        if path.suffix == ".service":
            return _ask(["systemctl", "--user", "show", "--value", "-p", "ActiveState,SubState", path.name])
        return _ask(["launchctl", "print", f"gui/{os.getuid()}/{path.stem}"])
    except ConfigError as error:
        return str(error)


def _begin(path: Path) -> list[list[str]]:
    if path.suffix == ".service":
        systemctl = ["systemctl", "--user"]
        return [[*systemctl, "daemon-reload"], [*systemctl, "enable", "--now", path.name]]
    return [["launchctl", "bootstrap", f"gui/{os.getuid()}", str(path)]]


def _end(path: Path) -> list[list[str]]:
    if path.suffix == ".service":
        return [["systemctl", "--user", "disable", "--now", path.name]]
    return [["launchctl", "bootout", f"gui/{os.getuid()}/{path.stem}"]]


def _told(commands: list[list[str]]) -> Iterator[str]:
    """Run them; where the system does not answer, say what is left to do."""
    for number, command in enumerate(commands):
        try:
            _ask(command)
        except ConfigError as error:
            yield f"{error}; run where it does: {' && '.join(' '.join(left) for left in commands[number:])}"
            return
    yield f"{' '.join(commands[-1])}: done"


def _ask(command: list[str]) -> str:
    """What a command of the system answers. ConfigError when it is missing or refuses."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no {command[0]} here")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE + 180, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]} did not answer ({type(error).__name__})") from error
    if done.returncode:
        words = " ".join(done.stderr.split())[:200]
        raise ConfigError(f"{command[0]} says: {words or f'code {done.returncode}'}")
    return " ".join(done.stdout.split())
