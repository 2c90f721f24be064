"""The go-libp2p daemon as a child process: found, told how it takes part, tied to this process, watched,
ended.

Start-up takes about 0.1 s. Its control sockets live in a folder only this user may enter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import anyio
import anyio.abc

from decentral.errors import ConfigError, ListenError, TransportError
from decentral.plugins import to_install
from decentral.wire.keys import PeerId

_READY = b"Peer ID:"
_TAIL = 1 << 13  # bytes of the daemon's last words kept for messages
_GRACE = 3.0  # s between asking the daemon to end and killing it
_LONGEST_TEMPORARY = 50  # characters; unix socket paths end at 104 on macOS and 108 on Linux
# One thread at a time runs the daemon's code: on two cores it started as a relay of 128 KiB a connection in 9 of 10
# starts (two of its tasks race for the limits, probably), like this in none of 22, and moved 112 MB/s between two
# processes instead of 78. GOMAXPROCS in the environment overrules it.
_THREADS = {"GOMAXPROCS": "1"}
_TETHER = Path(__file__).with_name("die_with_parent.py")


def package_folder() -> Path:
    """Return where hivemind is installed, found without importing it; ConfigError when it is not."""
    spec = importlib.util.find_spec("hivemind")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return Path(folder)
    raise ConfigError(f"hivemind, which brings the libp2p daemon, is not installed: {to_install('daemon')}")


def find_daemon() -> Path:
    """Return the p2pd inside the hivemind wheel."""
    path = package_folder() / "hivemind_cli" / "p2pd"
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path}: missing or not executable; reinstall it: pip install --force-reinstall hivemind")
    return path


def tether(command: Sequence[str], mode: str = "exec") -> list[str]:
    """Return ``command``, its program by its path, tied to the thread that starts it (Linux; die_with_parent.py)."""
    return [sys.executable, "-I", "-S", str(_TETHER), mode, str(os.getpid()), *command]


class DaemonProcess:
    """A started daemon and what it last said."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self._process = process
        self._said = b""
        self._settled = anyio.Event()

    @property
    def pid(self) -> int:
        """The operating system's number of the daemon (of its watcher where there is one)."""
        return self._process.pid

    async def wait(self) -> int:
        """Until it ends; returns its exit code, negative for a signal."""
        return await self._process.wait()

    async def listen_to(self) -> None:
        """Take what it prints, so that it never blocks on a full pipe, until it ends."""
        assert self._process.stdout is not None, "started with a pipe"
        try:
            async for chunk in self._process.stdout:
                self._said = (self._said + chunk)[-_TAIL:]
                if _READY in self._said:
                    self._settled.set()
        except anyio.BrokenResourceError:
            pass
        self._settled.set()

    async def until_ready(self, timeout: float) -> None:
        """Until it answers; else ListenError or TransportError with its last line."""
        with anyio.move_on_after(timeout) as scope:
            await self._settled.wait()
        if scope.cancelled_caught:
            raise TransportError(f"the libp2p daemon said nothing for {timeout:g} s; is the machine overloaded?")
        if _READY not in self._said:
            raise self._failure()

    def kill(self) -> None:
        """End it at once."""
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)

    async def end(self) -> None:
        """Ask it to end, and kill it when it does not."""
        if self._process.returncode is None:
            assert self._process.stdin is not None, "started with a pipe"
            await self._process.stdin.aclose()
            self._signal(signal.SIGTERM)
            with anyio.move_on_after(_GRACE):
                await self._process.wait()
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)
        await self._process.aclose()

    def _signal(self, number: signal.Signals) -> None:
        # Not Process.terminate(): it reaps a child that has just ended, and asyncio then complains that it is gone.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _failure(self) -> TransportError:
        lines = self._said.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        last = lines[-1][:500]
        if "failed to listen" in last:
            return ListenError(f"cannot listen: {last}; end what holds the address or listen on another")
        return TransportError(f"the libp2p daemon ended at its start: {last}")


@asynccontextmanager
async def launch(
    arguments: Sequence[str], group: anyio.abc.TaskGroup, *, timeout: float, watcher: bool | None = None
) -> AsyncIterator[DaemonProcess]:
    """A daemon that answers; ended when left. It never outlives this thread, however this process ends.

    ``watcher`` keeps a process between that ends the daemon with this one; None: only where the kernel cannot.
    """
    mode = "exec" if (sys.platform == "linux" if watcher is None else not watcher) else "watch"
    process = await anyio.open_process(
        tether([str(find_daemon()), *arguments], mode),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**_THREADS, **os.environ, "GOLOG_LOG_LEVEL": "error", "GOLOG_LOG_FMT": "json"},
        start_new_session=True,  # Ctrl-C at the terminal is for this process; it ends the daemon when it is done
    )
    child = DaemonProcess(process)
    try:
        group.start_soon(child.listen_to)
        await child.until_ready(timeout)
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.end()


@contextmanager
def private_folder() -> Iterator[Path]:
    """A fresh folder for sockets, mode 0700, removed when left; those of killed processes are removed, too."""
    import fcntl  # not on Windows, where there is no daemon either

    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_TEMPORARY:
        base = Path("/tmp")
    _sweep(base)
    making = Path(tempfile.mkdtemp(prefix=".decentral-", dir=base))
    with open(making / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it, however this process ends
        folder = making.rename(base / making.name.removeprefix("."))  # locked before a sweep can see it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    import fcntl

    for folder in base.glob("decentral-????????"):
        try:
            with open(folder / "lock", "rb+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or another user's


# ---- how it takes part, and as whom ----


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How the daemon takes part in the network: what it is told when it is started."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # one address per relay that may carry this peer's streams
    reachability: Literal["public", "private"] | None = None  # None: found out by asking others
    nat_port_map: bool = False  # ask the router to open a port (UPnP, NAT-PMP)
    dial_timeout: float = 10.0  # s, for open, connect and every request to the daemon
    start_timeout: float = 60.0  # s; 0.1 s is usual, a laden machine may take a hundred times that
    watcher: bool | None = None  # see ``launch``

    @property
    def wants_a_place(self) -> bool:
        """Tell whether nobody can dial this peer but through a relay."""
        return bool(self.relays) and self.reachability == "private"

    def flags(self) -> list[str]:
        """Return the daemon's command line, but for key, addresses and socket."""
        flags = ["-dhtServer=1", "-connManager=1", "-autonat=1", "-relay=1", "-relayDiscovery=0", "-tls=1"]
        flags.append(f"-natPortMap={int(self.nat_port_map)}")
        if self.reachability is not None:
            flags.append(f"-forceReachability{self.reachability.capitalize()}=1")
        if self.announce:
            flags.append(f"-announceAddrs={','.join(self.announce)}")
        if self.relays:
            flags += ["-autoRelay=1", f"-trustedRelays={','.join(self.relays)}"]
        return flags


class KeyFile(Protocol):
    """A libp2p private key file and whose it is: ``decentral.swarm.identity.Identity`` is one."""

    @property
    def path(self) -> Path:
        """The file the daemon reads."""
        ...

    @property
    def peer(self) -> PeerId:
        """The Ed25519 public key in it."""
        ...
