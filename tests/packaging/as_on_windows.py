"""Run the command line as Windows would have it, on Linux: without what it lacks, and with what it forbids.

    python as_on_windows.py start run.toml --alone ...

What is taken away: modules, calls and signals that are only there on POSIX, hivemind, unix sockets, signal handlers of
event loops. What is forbidden: to replace or remove a file that is open or mapped, to open a folder, names with the
characters that Windows reserves. What it cannot show: another file system, another scheduler, another torch.
"""

import asyncio
import importlib.util
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "readline", "hivemind", "uvloop")
CALLS = (
    "fork",
    "forkpty",
    "getuid",
    "geteuid",
    "getgid",
    "setsid",
    "killpg",
    "sched_getaffinity",
    "mkfifo",
    "nice",
    "wait4",
)
SIGNALS = (
    "SIGKILL",
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
    "SIGSTOP",
    "SIGCONT",
    "SIGCHLD",
    "SIGALRM",
    "pthread_sigmask",
    "sigwait",
)
OTHERS = (
    *("accelerate", "anyio", "anyio._backends._asyncio", "click", "cryptography.hazmat.primitives.asymmetric.ed25519"),
    *("numba", "prometheus_client", "psutil", "pydantic", "rich.console", "rich.live", "safetensors.torch", "torch"),
    *("trio", "zeroconf.asyncio", "zstandard", "torch.utils.data"),
)
RESERVED = set('<>:"|?*')


class Absent:
    """Nobody finds these modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"no {name} here", name=name)


def held() -> set[str]:
    """Files that this process has open or mapped."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    with real_open("/proc/self/maps", encoding="utf-8") as maps:
        found |= {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/") > 1}
    return found


def forbidding(call: Callable[..., Any], files: slice) -> Callable[..., Any]:
    """``call``, unless one of the files that it is to move or remove is in use."""

    def checked(*args: Any, **given: Any) -> Any:
        if ("dir_fd" in given and given["dir_fd"] is not None) or given.get("src_dir_fd") is not None:
            return call(*args, **given)
        named = {os.path.realpath(one) for one in args[files] if isinstance(one, str | os.PathLike)}
        if used := named & held():
            raise PermissionError(13, f"in use, as on Windows: {used}")
        return call(*args, **given)

    return checked


def as_windows_can(event: str, args: tuple[Any, ...]) -> None:
    """Every file that is opened by its name, and every address of a socket: none is a file."""
    if event in ("socket.bind", "socket.connect") and isinstance(args[1], str | bytes):
        raise OSError(97, f"no unix sockets on Windows: {args[1]!r}")
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        name = os.fsdecode(args[0])
        if not name.startswith(("/proc", "/sys", "/dev")) and RESERVED & set(name):
            raise OSError(22, f"no name on Windows: {name}")


def no_folder(path: Any, flags: int, *more: Any, **given: Any) -> int:
    if isinstance(path, str | os.PathLike) and os.path.isdir(path) and given.get("dir_fd") is None:
        raise PermissionError(13, f"a folder, as on Windows: {path}")
    return real_os_open(path, flags, *more, **given)


def no_handlers(*_: Any) -> None:
    raise NotImplementedError


real_open, real_os_open, real_find = open, os.open, importlib.util.find_spec


def become_windows() -> None:
    """Other packages choose by the system when they are loaded, so they are loaded before."""
    for name in OTHERS:
        importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent())
    importlib.util.find_spec = lambda name, *more: None if name in MODULES else real_find(name, *more)
    for place, names in ((os, CALLS), (signal, SIGNALS)):
        for name in names:
            if hasattr(place, name):
                delattr(place, name)
    os.replace, os.rename = forbidding(os.replace, slice(0, 2)), forbidding(os.rename, slice(0, 2))
    os.remove = forbidding(os.remove, slice(0, 1))
    os.unlink = forbidding(os.unlink, slice(0, 1))
    os.open = no_folder
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it opens folders where that can be done
    asyncio.SelectorEventLoop.add_signal_handler = no_handlers
    sys.addaudithook(as_windows_can)


if __name__ == "__main__":
    become_windows()
    pathlib.WindowsPath = pathlib.PosixPath  # type: ignore[misc,assignment]  # what Path makes by the system's name
    os.name = "nt"
    from decentral.cli import main

    main(sys.argv[1:])
