"""One machine of a simulated swarm: a key and a disk that outlive processes, and a process that comes and goes.

What runs in a process is the real node on the real vault: rounds, exchange, directory, catch-up, codecs, journal,
checkpoints. A crash ends it between any two steps of its tasks: nothing it does afterwards reaches a disk or a peer.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import torch
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.partition import Grain
from decentral.errors import DecentralError, DiskError
from decentral.manifest import Manifest
from decentral.node.durable_store import DurableStore, Resumed
from decentral.node.node import Node, Start
from decentral.parameters import Schema
from decentral.rounds.driver import CommittedUpdate, Ledger
from decentral.simulate.learning.lessons import LessonName, lesson_named, toy_schema
from decentral.simulate.learning.student import beginning
from decentral.simulate.learning.training import FlatModel, Pace, Trainer
from decentral.simulate.machine.disk import RecordingDisk
from decentral.simulate.machine.weather import Weather, WeatheredTransport
from decentral.simulate.trace import Trace
from decentral.training.sync_schedule import make_rhythm
from decentral.transport.memory.transport import MemoryNetwork
from decentral.wire.keys import PeerId, Signer
from decentral.wire.messages import Commit, Record

CHECKPOINT_EVERY = 5  # commits
FINE = Grain(align=4, piece=12)  # so that every peer owns parts of the 96 values of a fragment, and some two
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Site:
    """What all hosts of one world share."""

    manifest: Manifest
    network: MemoryNetwork
    weather: Weather
    trace: Trace
    seed: int
    lesson: LessonName
    claims: Sequence[float] = ()  # bytes/s that hosts may say they were seen to send; empty: they say nothing
    grain: Grain = FINE


@dataclass(frozen=True, slots=True)
class Spent:
    """What a peer's processes cost and did."""

    sent: int = 0  # bytes, of what the small tensors stand for
    awake: float = 0.0  # s of virtual time from a process's first training step on
    busy: float = 0.0  # s of them in inner steps

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.sent + other.sent, self.awake + other.awake, self.busy + other.busy)


class Host:
    """A machine. ``live`` runs one process on it until that is crashed, leaves or fails."""

    def __init__(self, site: Site, number: int, folder: Path, pace: Pace, *, founder: bool) -> None:
        self.site, self.number, self.folder, self.pace, self.founder = site, number, folder, pace, founder
        folder.mkdir()
        self.disk = RecordingDisk(folder)
        self.identity = 0
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
        text = f"{self.site.seed}/{self.number}/{self.identity}".encode()
        return Signer(hashlib.blake2b(text, digest_size=32).digest())

    @property
    def peer(self) -> PeerId:
        """Whose key it is."""
        return self.signer.peer

    @property
    def spent(self) -> Spent:
        """Over all lives."""
        return self._past if self.process is None else self._past + self.process.spent

    async def live(self, bootstrap: tuple[str, ...]) -> None:
        """One process, from its start to its end."""
        self._past = self.spent
        self.task = anyio.get_current_task().id
        self.lives += 1
        self.up, self.ended = True, anyio.Event()
        self.process = SimulatedProcess(self, bootstrap)
        self.note("started", peer=self.peer)
        try:
            await self.process.run()
        except* DecentralError as errors:
            self.note("failed", why=sorted(type(error).__name__ for error in _leaves(errors)))
        finally:
            self.up = False
            self.num_steps = self.process.num_steps
            self.ended.set()

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


class _Dead(DiskError):
    """What a crashed process was about to write."""


class SimulatedProcess:
    """One life of a host."""

    def __init__(self, host: Host, bootstrap: tuple[str, ...]) -> None:
        site = host.site
        self.host, self.site, self.note, self.bootstrap = host, site, host.note, bootstrap
        self.dead = self.leaving = False
        self.vault = DurableStore(host.folder, disk=host.disk)
        schema = toy_schema(site.lesson, site.manifest.outer.fragments)
        self.lesson = lesson_named(site.lesson, len(schema.fragments), host.pace.generator)
        found = self.vault.load(site.manifest.digest)
        self.model = FlatModel(self._live(found, self._fresh(schema)))
        self.transport = WeatheredTransport(site.network.transport(host.signer), site.weather)
        start = Start(
            manifest=site.manifest,
            schema=schema,
            anchors=self.model.fragments,
            founder=host.founder and found is None,
            bootstrap=bootstrap,
            head=None if found is None else found.head,
            acceptor=self.vault.last_vote(site.manifest.digest),
            age=0.0 if found is None else float(found.meta["age"]),
            gossip_step=0 if found is None else int(found.meta["gossip_step"]),
        )
        self.node = Node(
            start,
            signer=host.signer,
            transport=self.transport,
            ledger=Ledger(self._append, self._save_acceptor, self._keep, self._adopt, self._swap_begins),
            on_advance=self._on_advance,
            on_event=self._on_event,
            offload=_interleaved,
            uplink=lambda: host.claim,
            grain=site.grain,
        )
        self.named = False
        self.rhythm = make_rhythm(site.manifest, bytes(32))
        if found is not None:
            self._resume(found)
        self.scope = anyio.CancelScope()
        self.num_steps = host.num_steps
        self.trainer: Trainer | None = None
        self._woke = self._ended = 0.0  # s, on the loop's clock
        self._early: list[CommittedUpdate] = []
        self._num_merged = 0
        self._adopted = False  # a snapshot was taken over since the last checkpoint

    async def run(self) -> None:
        """Until crashed."""
        with self.scope:
            try:
                async with self.transport, anyio.create_task_group() as group:
                    await group.start(self.node.run)
                    self.trainer = self._trainer()
                    self._woke = anyio.current_time()
                    self.note("resumed", self.trainer.carried(), round=self.node.driver.head.round)
                    self._save()
                    await self.trainer.run()
            finally:
                self.num_steps = self.trainer.num_steps if self.trainer is not None else self.num_steps
                self._ended = anyio.current_time()
                self.vault.close()

    @property
    def spent(self) -> Spent:
        """Until now, or until its end."""
        sent = self.transport.traffic.total.sent
        if self.trainer is None:
            return Spent(sent)
        return Spent(sent, (self._ended or anyio.current_time()) - self._woke, self.trainer.busy_seconds)

    def crash(self) -> None:
        """Nothing that happens from here on counts."""
        self.dead = True
        self.site.network.kill(self.host.peer)
        self.scope.cancel()

    async def leave(self) -> None:
        """Say goodbye and save."""
        if self.trainer is not None:
            self.trainer.idle = True
            await self.node.leave()
            self._save()

    # ---- beginning ----

    def _fresh(self, schema: Schema) -> list[Tensor]:
        if self.site.lesson == "learn":
            return beginning(len(schema.fragments))
        return [torch.zeros(fragment.numel) for fragment in schema.fragments]

    @staticmethod
    def _live(found: Resumed | None, fresh: Sequence[Tensor]) -> list[Tensor]:
        return list(fresh) if found is None else [found.tensors[f"live/{f}"] for f in range(len(fresh))]

    def _resume(self, found: Resumed) -> None:
        node = self.node
        node.replica.load(found.tensors)
        head, named = self.vault.replay(found.head, node.replica, node.driver.me)
        self.named = named or found.adopted
        node.driver.begin_at(head, node.start.acceptor, self.vault.past(head, node.start.acceptor))
        if not self.named:
            outer_steps = head.outer_step - found.head.outer_step
            memory = found.meta["progress"]
            self.rhythm.resume(self.model, found.tensors, memory, node.replica.anchors, outer_steps)
            return
        for fragment, anchor_N in enumerate(node.replica.anchors):
            self.model.write(fragment, anchor_N)

    def _trainer(self) -> Trainer:
        node = self.node
        if node.start.head is None:
            for fragment, anchor_N in enumerate(node.replica.anchors):
                self.model.write(fragment, anchor_N)
        self.rhythm.seen = node.driver.head.hash
        trainer = Trainer(
            node,
            self.model,
            self.rhythm,
            self.host.pace,
            self.lesson,
            self.note,
            num_steps=self.num_steps,
            on_merged=self._merged,
        )
        for advance in self._early:
            trainer.take(advance)
        return trainer

    # ---- what the node writes and says ----

    def _append(self, commit: Commit, frames: Sequence[bytes]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.vault.append(commit, frames)
        record = commit.record
        self.note("logged", round=record.round, hash=record.hash, voters=[peer for peer, _ in commit.certificate.votes])
        self.site.trace.keep(commit, frames)

    def _save_acceptor(self, blob: bytes) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.vault.acceptor.write(blob)

    def _keep(self, record: Record, frames: Sequence[bytes]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.vault.keep(record, frames)

    def _adopt(self, head: Head, tensors: Mapping[str, Tensor]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.vault.adopt(head, tensors)

    def _swap_begins(self) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.vault.swap_begins()

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        self.note(f"node_{event}", None, **fields)

    def _on_advance(self, advance: CommittedUpdate) -> None:
        record, head = advance.record, self.node.driver.head
        self.note(
            "applied" if record is not None else "adopted",
            round=head.round if record is None else record.round,
            hash=advance.head,
            digest=self.node.replica.digest,
            mine=advance.contribution is not None,
            loss=self.lesson.loss(self.node.replica.anchors),
        )
        if self.trainer is None:
            self._early.append(advance)
            return
        self.trainer.take(advance)

    def _merged(self, advance: CommittedUpdate) -> None:
        """Every so many commits a checkpoint; one at once when a snapshot was adopted, which no journal tells of."""
        self._num_merged += 1
        self._adopted |= advance.record is None
        if (self._adopted or self._num_merged % CHECKPOINT_EVERY == 0) and self._save():
            self._adopted = False

    def _save(self) -> bool:
        """A checkpoint; False while live model and chain are not in step."""
        driver, trainer = self.node.driver, self.trainer
        if self.dead or trainer is None or driver.head.anchor is None or driver.head.hash != trainer.rhythm.seen:
            return False
        replica = self.node.replica
        live = {f"live/{f}": tensor.clone() for f, tensor in enumerate(self.model.fragments)}
        step = self.node.gossip.step if self.node.gossip is not None else 0
        meta = {"age": self.node.age, "gossip_step": step, "progress": trainer.rhythm.memory()}
        self.vault.save(driver.head, {**replica.shared_tensors(), **replica.own_tensors(), **live}, meta)
        self.note("saved", trainer.carried(), round=driver.head.round)
        return True


async def _interleaved(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Work of a thread: others run before it begins and after it has ended."""
    await anyio.lowlevel.checkpoint()
    result = work(*args)
    await anyio.lowlevel.checkpoint()
    return result


def _leaves(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
