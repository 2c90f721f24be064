"""Small disks that can be filled: one tmpfs per peer, mounted and unmounted by the harness."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from decentral.errors import DiskError


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[None]:
    """A tmpfs on ``folder`` while the block lasts. Raises DiskError when this user may not mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiskError(f"{folder}: no tmpfs can be mounted ({done.stderr.strip()}); run as root, or --small-disks 0")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=False)


def mounted_below(folder: Path) -> list[str]:
    """Mount points under ``folder`` that are left."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{folder}/")]
