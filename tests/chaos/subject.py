"""One peer as its tormentor sees it: a folder, a fixed address, and the process that runs there now, if any."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from decentral.state.checkpoint import read_checkpoint
from decentral.state.tensor_file import DamagedFile
from decentral.swarm.identity import Identity
from tests.kit.processes import daemon_of, send

SMALL_DISK = 48  # MiB: logs of an hour take 8, three checkpoints 1


@dataclass(slots=True)
class Subject:
    """A peer that keeps its folder, key and port over all its incarnations."""

    number: int
    folder: Path
    identity: Identity
    port: int
    founder: bool
    small_disk: bool
    pid: int | None = None
    incarnation: int = 0
    expected: set[int] = field(default_factory=set)  # exit codes that the fault under way may lead to
    held: list[int] = field(default_factory=list)  # processes that are stopped now
    busy: bool = False  # a fault is under way that will start it again

    @property
    def name(self) -> str:
        return f"peer{self.number}"

    @property
    def listen(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}"

    @property
    def address(self) -> str:
        return f"{self.listen}/p2p/{self.identity.name}"

    @property
    def ballast(self) -> Path:
        return self.folder / "ballast"

    def daemon(self) -> int | None:
        return None if self.pid is None else daemon_of(self.pid)

    def kill(self) -> bool:
        """SIGKILL, as a power cut would; the kernel ends the daemon with it. False when nothing ran."""
        if self.pid is None:
            return False
        self.expected.add(-signal.SIGKILL)
        return send(self.pid, signal.SIGKILL)

    def hold(self, *pids: int | None) -> None:
        """SIGSTOP."""
        self.held = [pid for pid in pids if pid is not None and send(pid, signal.SIGSTOP)]

    def let_go(self) -> None:
        """SIGCONT whatever was stopped."""
        for pid in self.held:
            send(pid, signal.SIGCONT)
        self.held = []

    def disk_full(self) -> None:
        """Write until nothing more fits."""
        block = bytes(1 << 16)
        with self.ballast.open("wb", buffering=0) as file:
            try:
                while file.write(block) == len(block):
                    pass
                while file.write(block[:1]):
                    pass
            except OSError:
                return

    def corrupt_checkpoint(self) -> bool:
        """Flip one bit in the newest whole checkpoint if there is another whole one to fall back on.

        A peer that died before it wrote the next one was hit again, until none of its three was whole: then it asks
        its owner what to do, as it should.
        """
        whole = [folder for folder in sorted((self.folder / "checkpoints").glob("[0-9]*")) if _is_whole(folder)]
        if len(whole) < 2:
            return False
        path = whole[-1] / "tensors.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        return True

    def cut_journal(self, nbytes: int) -> bool:
        """Take the last bytes of the journal away: a commit or two that was durable is no more."""
        path = self.folder / "journal"
        if not path.exists() or path.stat().st_size <= nbytes:
            return False
        with path.open("rb+") as file:
            file.truncate(path.stat().st_size - nbytes)
        return True


def _is_whole(checkpoint: Path) -> bool:
    try:
        read_checkpoint(checkpoint)
    except DamagedFile:
        return False
    return True
