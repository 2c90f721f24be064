"""``service``: a peer or a relay that the system starts by itself, and stops by leaving in good order.

It holds what the system is told, for each kind of system.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import GivenSecret, as_json, secrets_of
from decentral.errors import ConfigError, DecentralError, DiskError, UsageError

_name = click.option("--name", default="peer", show_default=True, help="What the service is called.")


@click.group("service")
def service_command() -> None:
    """Have this system run a peer or a relay, after a restart, too. It runs in the background, last in every queue.

    \b
    $ decentral service install -- join @FILE --out decentral-run --schedule 22:00-07:00
    """


@service_command.command("install")
@_name
@click.option("--show", is_flag=True, help="Print the file, and change nothing.")
@click.argument("words", metavar="-- COMMAND [ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install_command(context: click.Context, name: str, show: bool, words: tuple[str, ...]) -> None:
    """Write a systemd user unit (a launchd agent on macOS) that runs decentral start, join or relay, and start it.

    A token, also one in an invite, goes to a file beside it that you alone read, however it is given: -, @FILE.

    \b
    $ decentral service install --name overnight -- join @FILE --schedule 22:00-07:00
    """
    planned = plan(context.find_root(), name, words, Path.cwd())
    if sys.platform == "win32":
        if not show:
            write_secrets(planned)
        click.echo(task(planned))
    elif show:
        click.echo(unit(planned) if place(name).suffix == ".service" else agent(planned).decode(), nl=False)
    else:
        for line in install(planned):
            click.echo(line)


@service_command.command("status")
@as_json
def status_command(as_json: bool) -> None:
    """List the services that were installed, and what the system says of each.

    \b
    $ decentral service status
    """
    found = {name: state(name) for name in list_services()}
    if as_json:
        click.echo(json.dumps(found))
    for name, words in ({} if as_json else found).items():
        click.echo(f"{name:<16} {words}")
    if not found:
        click.echo("no service is installed; decentral service install -- join INVITE", err=True)


@service_command.command("remove")
@_name
def remove_command(name: str) -> None:
    """Stop a service, which leaves at its next step, and forget it. What it has learnt stays in its folder.

    \b
    $ decentral service remove --name overnight
    """
    check_name(name)
    for line in remove(name):
        click.echo(line)


# ---- a command line to be served ----
#
# It is ours, and checked as if it were typed, with the folders that it writes to.

SERVED = ("start", "join", "relay")
STOP_SECONDS = 180  # a peer that is told to stop makes its inner step, and keeps a checkpoint
FOR_GOOD = (2, 10, 11, 12, 21, 30, 40)  # exit codes after which starting again would end the same way
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """A service of one user."""

    name: str
    words: tuple[str, ...]  # after "decentral", as typed
    here: Path  # absolute: where they were typed, so that relative paths in them mean the same
    writes: tuple[Path, ...]  # absolute
    memory: int | None = None  # bytes, of a relay that keeps no run; None: as much as the machine has
    python: str = sys.executable
    secrets: tuple[tuple[Path, str], ...] = field(default=(), repr=False)  # files that words name by @, and their text

    @property
    def command(self) -> tuple[str, ...]:
        """All of the command line."""
        return (self.python, "-m", "decentral", *self.words)


def label(name: str) -> str:
    """Return the name by which the system knows a service."""
    return f"decentral-{name}"


def plan(root: click.Context, name: str, words: tuple[str, ...], here: Path) -> ServicePlan:
    """Check a command line. UsageError, InviteError, or what the command itself says to its options."""
    check_name(name)
    if not words or words[0] not in SERVED:
        given = f"{words[0]!r}" if words else "nothing"
        raise UsageError(
            f"a service runs decentral {', '.join(SERVED)}, not {given}; write it after --, as you would type it"
        )
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, words[0])
    assert command is not None
    made = command.make_context(words[0], list(words[1:]), parent=root)
    if made.params.get("background"):
        raise UsageError("a service is in the background already; leave --background out")
    if words[0] == "join":
        from decentral.node.folder import way_back  # here: help texts need none of the wire
        from decentral.swarm.invite import Invite

        if (invite := made.params["invite"]) is not None and not invite.startswith("-"):  # that is a script's argument
            Invite.parse(invite)
        elif way_back(here / made.params["directory"]) is None:
            raise UsageError("join: no INVITE, and its --out holds no run to come back to; write the invite after it")
    if words[0] == "start":
        from decentral.manifest import load_manifest

        load_manifest(here / made.params["file"])
    return plan_of(made, name, words, here)


def plan_of(made: click.Context, name: str, words: tuple[str, ...], here: Path) -> ServicePlan:
    """Return what a command line that was checked comes to as a service."""
    told, kept = _move_secrets_to_files(name, words, made)
    return ServicePlan(name, told, here, _writes(words[0], made.params, here), _memory(made.params), secrets=kept)


def _move_secrets_to_files(
    name: str, words: tuple[str, ...], made: click.Context
) -> tuple[tuple[str, ...], tuple[tuple[Path, str], ...]]:
    """The words with a file in the place of every secret, and those files: all users may read what a process was
    started with. An invite that was typed and has no token stays as it was typed.
    """
    told, kept = list(words), list[tuple[Path, str]]()
    for given in secrets_of(made):
        if given.typed and given.written == given.text and not given.exposes:
            continue
        path = secret_file(name, len(kept) + 1)
        kept.append((path, given.text))
        put_in_place(told, given, f"@{path}")
    return tuple(told), tuple(kept)


def put_in_place(words: list[str], given: GivenSecret, file: str) -> None:
    """Let ``file`` stand where the secret stands, or first if that is in the environment, which no service has."""
    assigned = f"{given.option}={given.written}"
    for at, (before, word) in enumerate(itertools.pairwise(words) if given.typed else (), 1):
        if word == assigned:
            words[at] = f"{given.option}={file}"
            return
        if word == given.written and given.option in (None, before):
            words[at] = file
            return
    words[1:1] = [file] if given.option is None else [given.option, file]


def check_name(name: str) -> None:
    """UsageError for a name that would be no file's."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name {name[:50]!r}: small letters, digits and hyphens, 41 at most, such as overnight")


def _writes(command: str, values: dict[str, Any], here: Path) -> tuple[Path, ...]:
    if command != "relay":
        given = (values["directory"], values.get("offload"))
        return tuple(_without_dots(here / folder) for folder in given if folder is not None)
    return tuple(sorted({_without_dots(here / values["identity"]).parent, _without_dots(here / values["keep_in"])}))


def _memory(values: dict[str, Any]) -> int | None:
    """Return what a relay's process may hold at the most: its own bound and a fifth more, for what is no place."""
    return None if "max_memory" not in values or values.get("kept") else int(1.2 * (values["max_memory"] or 0)) or None


def _without_dots(path: Path) -> Path:
    """Without `..`, which systemd takes no path with."""
    return Path(os.path.normpath(path))


# ---- a systemd user unit ----
#
# Its text; pure. Directives as in systemd.service(5), systemd.exec(5) and systemd.resource-control(5). A user's manager
# may take files away from a process only inside a user namespace, hence PrivateUsers.


def unit(plan: ServicePlan) -> str:
    """For ``~/.config/systemd/user``. UsageError for words that a unit cannot hold."""
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: ServicePlan) -> Iterator[str]:
    yield from (
        "# Written by decentral service install; decentral service remove takes it away.",
        "[Unit]",
        f"Description=decentral {plan.words[0]} ({plan.name})",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(quote, plan.command))}",
        f"WorkingDirectory={_escape_percent(str(plan.here))}",
        "",
        "# Told to stop it leaves at its next step; it is started again unless that would end the same way.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_SECONDS}",
        "SuccessExitStatus=130 143",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={' '.join(map(str, FOR_GOOD))}",
        "",
        *_place_in_queues(plan),
        "",
        "# It may write to its own folders and to nothing else.",
        "PrivateUsers=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={quote(str(folder))}" for folder in plan.writes),
        "CacheDirectory=decentral",
        "Environment=NUMBA_CACHE_DIR=%C/decentral MPLCONFIGDIR=%C/decentral",
        *([] if any(_is_temporary(folder) for folder in (plan.here, *plan.writes)) else ["PrivateTmp=yes"]),
        "NoNewPrivileges=yes",
        "ProtectKernelTunables=yes",
        "ProtectControlGroups=yes",
        "RestrictSUIDSGID=yes",
        "LockPersonality=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "UMask=0077",
        "",
        "[Install]",
        "WantedBy=default.target",
    )


def _place_in_queues(plan: ServicePlan) -> tuple[str, ...]:
    """A peer trains in time that is left over; for a relay others wait, who send through it."""
    if plan.words[0] != "relay":
        return ("# Whatever else runs here comes first.", "Nice=10", "CPUWeight=20", "IOSchedulingClass=idle")
    memory = () if plan.memory is None else (f"MemoryMax={plan.memory}",)
    return ("# It carries what others wait for, within bounds.", *memory, "LimitNOFILE=4096")


def quote(word: str) -> str:
    """Quote a word of a command line as systemd.service(5) reads it. UsageError for control characters."""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        raise UsageError(f"{word[:40]!r} has control characters; a service cannot be told that")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return _escape_percent(f'"{escaped}"' if not escaped or set(escaped) & set(" '\"\\;#") else escaped)


def _is_temporary(folder: Path) -> bool:
    """Tell whether it would not be there for a service with temporary folders of its own."""
    return any(folder.is_relative_to(place) for place in ("/tmp", "/var/tmp"))


def _escape_percent(text: str) -> str:
    """A percent sign begins a specifier."""
    return text.replace("%", "%%")


# ---- macOS and Windows ----
#
# A launchd agent, and a scheduled task; pure. Made as documented, not tried by this project.
#
# Sources: launchd.plist(5); schtasks /Create in Microsoft's documentation of Windows commands.


def agent(plan: ServicePlan) -> bytes:
    """For ``~/Library/LaunchAgents``."""
    log = str(plan.writes[0] / "service.log")
    import plistlib

    return plistlib.dumps(
        {
            "Label": label(plan.name),
            "ProgramArguments": list(plan.command),
            "WorkingDirectory": str(plan.here),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": STOP_SECONDS,
            **({} if plan.words[0] == "relay" else {"ProcessType": "Background", "Nice": 10, "LowPriorityIO": True}),
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
    )


def task(plan: ServicePlan) -> str:
    """The line that makes it, for a person to paste: it begins when that person logs on."""
    run = subprocess.list2cmdline(["cmd", "/c", f"cd /d {plan.here} && {subprocess.list2cmdline(plan.command)}"])
    return subprocess.list2cmdline(["schtasks", "/Create", "/SC", "ONLOGON", "/TN", label(plan.name), "/TR", run])


# ---- putting it in place ----
#
# The system is told of the file; both are taken away again.

_SYSTEM_SECONDS = 60.0  # for a question to the system, besides what a peer may take to stop


def secret_file(name: str, number: int, system: str = sys.platform) -> Path:
    """Where a service has what nobody else should read."""
    folder = home() / "AppData/Local/decentral" if system == "win32" else place(name, system).parent
    return folder / f"{label(name)}.{number}.secret"


def home() -> Path:
    """The user's own folder. UsageError for a user without any, as ``docker run --user 4242`` makes one."""
    try:
        return Path.home()
    except RuntimeError:
        raise UsageError("a service belongs to a user, and this one has no home folder; set HOME") from None


def place(name: str, system: str = sys.platform) -> Path:
    """Where the file of a service lies. UsageError where there are none."""
    if system.startswith("linux"):
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home() / ".config")
        return config / f"systemd/user/{label(name)}.service"
    if system == "darwin":
        return home() / f"Library/LaunchAgents/{label(name)}.plist"
    raise UsageError("services are for Linux and macOS; on Windows decentral service install shows a line to paste")


def install(plan: ServicePlan) -> Iterator[str]:
    """Write the file and start it; yields what there is to say. UsageError when one of that name is there."""
    from decentral.state.durable import make_private_folders

    path = place(plan.name)
    if path.exists():
        raise UsageError(f"{path} is there already; decentral service remove --name {plan.name}, or give another name")
    text = unit(plan).encode() if path.suffix == ".service" else agent(plan)
    try:
        for folder in (*plan.writes, path.parent):
            make_private_folders(folder)
        write_secrets(plan)
        path.touch(mode=0o600)
        path.write_bytes(text)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written ({error.strerror}); use an account that may") from error
    yield f"{path}: written"
    yield from _carry_out(_begin(path))
    if path.suffix == ".service":
        yield "it runs while you are logged in; loginctl enable-linger keeps it running when you are not"


def write_secrets(plan: ServicePlan) -> None:
    """Each in its file, which its owner alone reads from its first byte on. Raises OSError."""
    from decentral.state.durable import make_private_folders

    for path, text in plan.secrets:
        make_private_folders(path.parent)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(f"{text}\n")


def remove(name: str) -> Iterator[str]:
    """Stop it, which leaves at the next step, and take the file away. The run directory stays."""
    path = place(name)
    if not path.exists():
        raise UsageError(f"{path}: there is no such service; decentral service status lists them")
    try:
        yield from _carry_out(_end(path))
    finally:  # what the system does not stop begins no more, at least
        path.unlink()
        for kept in path.parent.glob(f"{label(name)}.*.secret"):
            kept.unlink()
    if path.suffix == ".service":
        with suppress(ConfigError):
            _ask(["systemctl", "--user", "daemon-reload"])
    yield f"{path}: removed; the run directory stays as it is"


def list_services() -> list[str]:
    """Names of the services that there are."""
    pattern = place("*")
    prefix = label("")
    return sorted(path.stem.removeprefix(prefix) for path in pattern.parent.glob(pattern.name))


def systemd_answers() -> bool:
    """Tell whether the system runs services for this user by systemd."""
    try:
        _ask(["systemctl", "--user", "show-environment"])
    except ConfigError:
        return False
    return True


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


def _carry_out(commands: list[list[str]]) -> Iterator[str]:
    """Run them. DecentralError where the system does not answer, with what is left to do."""
    for number, command in enumerate(commands):
        try:
            _ask(command)
        except ConfigError as error:
            left = " && ".join(" ".join(command) for command in commands[number:])
            raise DecentralError(f"{error}; run where it does: {left}") from error
    yield f"{' '.join(commands[-1])}: done"


def _ask(command: list[str]) -> str:
    """Run a command of the system and return its answer. ConfigError when it is missing or refuses."""
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no {command[0]} here")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SYSTEM_SECONDS + STOP_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]} did not answer ({type(error).__name__})") from error
    if done.returncode:
        words = " ".join(done.stderr.split())[:200]
        raise ConfigError(f"{command[0]} says: {words or f'code {done.returncode}'}")
    return " ".join(done.stdout.split())
