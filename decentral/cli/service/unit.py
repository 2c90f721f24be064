"""The text of a systemd user unit. Pure.

Directives as in systemd.service(5), systemd.exec(5) and systemd.resource-control(5). A user's manager may take files
away from a process only inside a user namespace, hence PrivateUsers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from decentral.cli.service.plan import FOR_GOOD, STOP_SECONDS, ServicePlan
from decentral.errors import UsageError


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
        f"ExecStart={' '.join(map(quoted, plan.command))}",
        f"WorkingDirectory={_specified(str(plan.here))}",
        "",
        "# Told to stop it leaves at its next step; it is started again unless that would end the same way.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_SECONDS}",
        "SuccessExitStatus=130 143",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={' '.join(map(str, FOR_GOOD))}",
        "",
        "# Whatever else runs here comes first.",
        "Nice=10",
        "CPUWeight=20",
        "IOSchedulingClass=idle",
        "",
        "# It may write to its own folders and to nothing else.",
        "PrivateUsers=yes",
        "ProtectSystem=strict",
        "ProtectHome=read-only",
        *(f"ReadWritePaths={quoted(str(folder))}" for folder in plan.writes),
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


def quoted(word: str) -> str:
    """One word of a command line, as systemd.service(5) reads it. UsageError for control characters."""
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        raise UsageError(f"{word[:40]!r} has control characters; a service cannot be told that")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return _specified(f'"{escaped}"' if not escaped or set(escaped) & set(" '\"\\;#") else escaped)


def _is_temporary(folder: Path) -> bool:
    """Whether it would not be there for a service with temporary folders of its own."""
    return any(folder.is_relative_to(place) for place in ("/tmp", "/var/tmp"))


def _specified(text: str) -> str:
    """A percent sign begins a specifier."""
    return text.replace("%", "%%")
