"""One machine of a simulated swarm: a key and a disk that outlive processes, and a process that comes and goes."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import anyio
from torch import Tensor

from decentral.errors import DecentralError
from decentral.simulate.learning.training import StepPace
from decentral.simulate.machine.disk import RecordingDisk
from decentral.simulate.machine.process import Machine, SimulatedProcess, Site, Spent
from decentral.wire.keys import PeerId, Signer


class Host:
    """A machine. ``live`` runs one process on it until that is crashed, leaves or fails."""

    def __init__(self, site: Site, number: int, folder: Path, pace: StepPace, *, founder: bool) -> None:
        self.site, self.number, self.folder, self.pace, self.founder = site, number, folder, pace, founder
        folder.mkdir()
        self.disk = RecordingDisk(folder)
        self.identity = 0
        self._signer: Signer | None = None
        self.lives = 0
        self._damaged = False
        self.claim: float | None = (
            random.Random(f"claim {site.seed} {number}").choice(site.claims) if site.claims else None
        )
        self.up = False
        self.num_steps = 0  # inner steps over all lives, so that no two leave the same mark
        self._past = Spent()  # by the lives before this one
        self.process: SimulatedProcess | None = None
        self.ended = anyio.Event()
        self.task: int | None = None  # id of the one in which all of the process runs

    @property
    def signer(self) -> Signer:
        """The key on this machine's disk."""
        if self._signer is None:
            text = f"{self.site.seed}/{self.number}/{self.identity}".encode()
            self._signer = Signer(hashlib.blake2b(text, digest_size=32).digest())
        return self._signer

    @property
    def peer(self) -> PeerId:
        """Whose key it is."""
        return self.signer.peer

    @property
    def spent(self) -> Spent:
        """Over all lives."""
        return self._past if self.process is None else self._past + self.process.spent

    async def live(self, bootstrap: tuple[str, ...]) -> None:
        """One process, from its start to its end; nothing where another start came first in the same moment."""
        if self.up:
            return
        self._past = self.spent
        self.task = anyio.get_current_task().id
        self.lives += 1
        self.up, self.ended = True, anyio.Event()
        self.process = SimulatedProcess(self._machine(), bootstrap)
        self.note("started", peer=self.peer)
        try:
            await self.process.run()
        except* DecentralError as errors:
            self.note("failed", why=sorted(type(error).__name__ for error in _leaves(errors)))
        finally:
            self.up = False
            self.num_steps = self.process.num_steps
            self.ended.set()

    def _machine(self) -> Machine:
        return Machine(
            site=self.site,
            signer=self.signer,
            folder=self.folder,
            disk=self.disk,
            pace=self.pace,
            may_found=self.founder,
            claim=self.claim,
            num_steps=self.num_steps,
            note=self.note,
        )

    def crash(self, power: random.Random | None = None) -> None:
        """End the process as SIGKILL would; with ``power``, a cut: the disk keeps what was synced."""
        assert self.process is not None
        self.note("crashed", power=power is not None)
        self.process.crash()
        if power is not None:
            self.disk.crash(power)

    async def leave(self) -> None:
        """End the process as Ctrl-C does."""
        assert self.process is not None
        self.note("left")
        self.process.leaving = True
        with anyio.CancelScope(shield=True), anyio.move_on_after(10.0):
            await self.process.leave()
        self.note("gone")
        self.process.crash()

    def forget(self) -> None:
        """A new key and an empty disk: to the others a stranger."""
        self.identity += 1
        self._signer = None
        self.founder = False
        self._put_in(None)
        self.note("forgot")

    def keep_copy(self) -> None:
        """Remember the disk as it is now, for ``go_back``."""
        copy = self.folder.with_suffix(".old")
        shutil.rmtree(copy, ignore_errors=True)
        if self.folder.exists():
            shutil.copytree(self.folder, copy)

    def go_back(self) -> None:
        """The disk of some time before, as after restoring a backup."""
        copy = self.folder.with_suffix(".old")
        if copy.exists():
            self._put_in(copy)
            self.note("went_back")

    def damage(self, generator: random.Random) -> None:
        """Flip a byte of the newest checkpoint, once in the life of this machine: all of them would be ``forget``."""
        found = sorted((self.folder / "checkpoints").glob("*/tensors.safetensors"))
        if len(found) > 1 and not self._damaged:
            self._damaged = True
            data = bytearray(found[-1].read_bytes())
            data[generator.randrange(len(data))] ^= 0xFF
            found[-1].write_bytes(bytes(data))
            self.disk = RecordingDisk(self.folder)
            self.note("damaged")

    def _put_in(self, other: Path | None) -> None:
        """Another disk: an empty one, or a copy of ``other``."""
        shutil.rmtree(self.folder)
        if other is None:
            self.folder.mkdir()
        else:
            shutil.copytree(other, self.folder)
        self.disk = RecordingDisk(self.folder)

    def note(self, event: str, tensors: dict[str, Tensor] | None = None, **fields: Any) -> None:
        """Add to the trace."""
        self.site.trace.note(self.number, self.lives, event, tensors, **fields)


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
