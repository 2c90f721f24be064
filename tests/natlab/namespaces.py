"""Network namespaces that cannot be left behind: each is a file descriptor of this process, and has no name.

The kernel removes a namespace, and every device and rule in it, with its last descriptor and process. So a crash, a
SIGKILL and Ctrl-C all clean up. One thread per lab travels from namespace to namespace; a socket or a process belongs
to the namespace in which it was made, wherever it is used, and processes die with that thread.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from decentral.errors import DecentralError
from decentral.transport.daemon import process

_CLONE_NEWNET = 0x40000000
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables", "gcc": "gcc"}
_TETHER = Path(process.__file__).with_name("die_with_parent.py")

T = TypeVar("T")


class LabError(DecentralError):
    """The lab could not be built, or was used against its rules."""


class Traveller:
    """The thread that enters namespaces; whatever it started ends with it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="natlab")
        self._opened: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.shutdown(cancel_futures=True)  # the kernel then kills the processes that it started
        while self._opened:
            os.close(self._opened.pop())

    def make(self, name: str) -> Namespace:
        """A fresh namespace with its loopback up. OSError where the kernel refuses."""
        descriptor = self._thread.submit(self._unshare).result()
        self._opened.append(descriptor)
        namespace = Namespace(self, name, descriptor)
        namespace.ip("link set lo up")
        # Addresses are chosen by the lab, so nobody has them yet: without this each takes a second to be usable.
        namespace.sysctl("net/ipv6/conf/default/accept_dad", 0)
        return namespace

    def go(self, descriptor: int, work: Callable[[], T]) -> T:
        """Do ``work`` in the namespace."""

        def there() -> T:
            self._call(self._libc.setns, descriptor, _CLONE_NEWNET)
            return work()

        return self._thread.submit(there).result()

    def _unshare(self) -> int:
        self._call(self._libc.unshare, _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @staticmethod
    def _call(function: Any, *arguments: int) -> None:  # Any: ctypes
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class Namespace:
    """One network: its interfaces, addresses, routes, rules and sockets."""

    def __init__(self, traveller: Traveller, name: str, descriptor: int) -> None:
        self.name, self.descriptor = name, descriptor
        self.traveller = traveller

    @property
    def path(self) -> str:
        """A file by which other processes may enter while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def do(self, work: Callable[[], T]) -> T:
        """Call ``work`` in here; what it opens stays in here."""
        return self.traveller.go(self.descriptor, work)

    def ip(self, *commands: str) -> None:
        """Commands of ip(8), all in one process."""
        self._feed(["ip", "-batch", "-"], "\n".join(commands))

    def tc(self, *commands: str) -> None:
        """Commands of tc(8)."""
        self._feed(["tc", "-batch", "-"], "\n".join(commands))

    def nft(self, rules: str) -> None:
        """A script of nft(8), taken whole or not at all."""
        self._feed(["nft", "-f", "-"], rules)

    def sysctl(self, name: str, value: int | str) -> None:
        """Set a kernel parameter, by its path below /proc/sys."""
        self.do(lambda: Path("/proc/sys", name).write_text(str(value)))

    def run(self, *command: str, timeout: float = 30.0) -> str:
        """What ``command`` prints; LabError when it fails."""
        return self._feed(command, "", timeout)

    def start(self, *command: str, **given: Any) -> subprocess.Popen[str]:  # Any: Popen's own keywords
        """Start a command that dies with the lab, however that ends."""
        given = {"stdin": subprocess.DEVNULL, "text": True} | given
        tether = [sys.executable, "-I", "-S", str(_TETHER), "exec", str(os.getpid())]
        found = shutil.which(command[0])
        if found is None:
            raise LabError(f"{command[0]}: no such command; install it, or give its path")
        return self.do(lambda: subprocess.Popen([*tether, found, *command[1:]], **given))

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_DGRAM, timeout: float = 5.0
    ) -> socket.socket:
        """A socket of this network, for use anywhere in this process."""
        made = self.do(lambda: socket.socket(family, kind))
        made.settimeout(timeout)
        return made

    def _feed(self, command: Sequence[str], text: str, timeout: float = 30.0) -> str:
        def feed() -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout, check=False)

        done = self.do(feed)
        if done.returncode:
            said = " | ".join((done.stderr or done.stdout).strip().splitlines()[:3])
            raise LabError(f"{self.name}: {' '.join(command)} failed: {said}; it was given: {text.strip()!r:.300}")
        return done.stdout


def why_impossible() -> str | None:
    """The one reason why there can be no lab on this machine; None where it can be."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}; run the lab in a Linux virtual machine"
    if os.geteuid() != 0:
        return "network namespaces need root: sudo make natlab"
    missing = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if missing:
        return f"the network lab needs more programs: apt-get install {' '.join(missing)}"
    if not Path("/dev/net/tun").exists():
        return "the network lab needs /dev/net/tun: modprobe tun, or give the container --device /dev/net/tun"
    try:
        with Traveller() as traveller:
            traveller.make("trial")
    except OSError as error:
        return f"the kernel refuses network namespaces ({error.strerror}); give the container --privileged"
    return None
