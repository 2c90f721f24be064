"""A launchd agent for macOS, and a scheduled task for Windows. Pure. Made as documented, not tried by this project.

Sources: launchd.plist(5); schtasks /Create in Microsoft's documentation of Windows commands.
"""

from __future__ import annotations

import plistlib
import subprocess

from decentral.cli.service.plan import STOP_SECONDS, ServicePlan, label


def agent(plan: ServicePlan) -> bytes:
    """For ``~/Library/LaunchAgents``."""
    log = str(plan.writes[0] / "service.log")
    return plistlib.dumps(
        {
            "Label": label(plan.name),
            "ProgramArguments": list(plan.command),
            "WorkingDirectory": str(plan.here),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 30,
            "ExitTimeOut": STOP_SECONDS,
            "ProcessType": "Background",
            "Nice": 10,
            "LowPriorityIO": True,
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
    )


def task(plan: ServicePlan) -> str:
    """The line that makes it, for a person to paste: it begins when that person logs on."""
    run = subprocess.list2cmdline(["cmd", "/c", f"cd /d {plan.here} && {subprocess.list2cmdline(plan.command)}"])
    return subprocess.list2cmdline(["schtasks", "/Create", "/SC", "ONLOGON", "/TN", label(plan.name), "/TR", run])
