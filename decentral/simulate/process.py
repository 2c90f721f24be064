"""A simulated machine, and the process on it: the real node and the real outer loop on the real store.

Rounds, exchange, directory, catch-up, codecs, journal and checkpoints are those of a peer. A crash ends the process
between any two steps of its tasks: nothing it does afterwards reaches a disk or a peer.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
from torch import Tensor

from decentral.consensus.chain import VOTING, Head, Voting
from decentral.errors import DecentralError, DiskError
from decentral.manifest import Manifest
from decentral.node.durable_store import DurableStore, Resumed
from decentral.node.node import Node, Start
from decentral.observe.contributions import RoundMetrics
from decentral.optimizers import make_outer
from decentral.pipeline.group import GroupSide
from decentral.replica.contents import Readings
from decentral.rounds.local_state import CommittedUpdate, Ledger
from decentral.rounds.reduce import Grain
from decentral.simulate.disk import RecordingDisk
from decentral.simulate.lessons import LessonName, first_anchors, lesson_named, toy_schema
from decentral.simulate.trace import Trace
from decentral.simulate.training import FlatModel, Note, StageTrainer, StepPace, Trainer
from decentral.simulate.weather import Weather, WeatheredTransport
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule, make_schedule, memory_of, resume, stand_at, tensors_of
from decentral.training.swarm_side import SameLoop, Updates
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import PeerId, Signer
from decentral.wire.messages import Commit, Record

FINE = Grain(align=4, piece=12)  # so that every peer owns parts of the 96 values of a fragment, and some two
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Site:
    """Things that all hosts of one world share."""

    manifest: Manifest
    network: MemoryNetwork
    weather: Weather
    trace: Trace
    seed: int
    lesson: LessonName
    claims: Sequence[float] = ()  # bytes/s that hosts may say they were seen to send; empty: they say nothing
    grain: Grain = FINE
    voting: Voting = VOTING
    readings: Readings = field(default_factory=Readings)


@dataclass(frozen=True, slots=True)
class Spent:
    """Bytes and seconds that a peer's processes took."""

    sent: int = 0  # bytes, of what the small tensors stand for
    awake: float = 0.0  # s of virtual time from a process's first training step on
    busy: float = 0.0  # s of them in inner steps

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.sent + other.sent, self.awake + other.awake, self.busy + other.busy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that starts a process, as the process finds it."""

    site: Site
    signer: Signer
    folder: Path
    disk: RecordingDisk
    pace: StepPace
    part: range | None  # fragments that it trains; None: all
    shares_with: int | None  # machines of the replica that it shares, itself included; None: it shares none
    may_found: bool  # with an empty disk: it is the run's first peer
    claim: float | None  # bytes/s that it may say it was seen to send
    num_steps: int  # inner steps of earlier lives
    away: float  # s since the last of them
    note: Note


class _Dead(DiskError):
    """The error that a crashed process gets when it goes on to write."""


class SimulatedProcess:
    """A life of a host."""

    def __init__(self, machine: Machine, bootstrap: tuple[str, ...]) -> None:
        site = machine.site
        self.machine, self.site, self.note, self.bootstrap = machine, site, machine.note, bootstrap
        self.dead = self.leaving = False
        self.store = DurableStore(machine.folder, disk=machine.disk)
        schema = toy_schema(site.lesson, site.manifest.outer.fragments)
        outer, inner, fragments = site.manifest.outer, site.manifest.inner, len(schema.fragments)
        averages = bool(make_outer(outer.method, outer.hyper).inner)
        self.lesson = lesson_named(site.lesson, fragments, machine.pace.generator, inner, averages=averages)
        found = self.store.load(site.manifest.digest)
        self.model = FlatModel(self._live(found, first_anchors(site.lesson, len(schema.fragments))))
        self.transport = WeatheredTransport(site.network.transport(machine.signer), site.weather)
        start = Start(
            manifest=site.manifest,
            schema=schema,
            anchors=self.model.fragments,
            founder=machine.may_found and found is None,
            bootstrap=bootstrap,
            head=None if found is None else found.head,
            acceptor=self.store.last_vote(site.manifest.digest),
            age=0.0 if found is None else float(found.meta["age"]),
            away=0.0 if found is None else machine.away,
            gossip_step=0 if found is None else int(found.meta["gossip_step"]),
        )
        self.node = Node(
            start,
            signer=machine.signer,
            transport=self.transport,
            ledger=Ledger(self._append, self._save_acceptor, self._keep, self._adopt, self._swap_begins),
            on_update=self._on_update,
            on_event=self._on_event,
            observe=lambda replica: RoundMetrics(replica, self._on_event, offload=_interleave),
            offload=_interleave,
            uplink=lambda: machine.claim,
            grain=site.grain,
            voting=site.voting,
            readings=site.readings,
        )
        live = LiveSide(self.model, self.lesson.inner, machine.signer.peer, schema)
        shares = machine.shares_with is not None
        self.side = GroupSide(self.node) if shares else None
        part = range(0) if shares else machine.part
        self.schedule = make_schedule(site.manifest, bytes(32), live, part)
        self.node.directory.own.train(part)
        if found is not None:
            self._resume(found)
        self.scope = anyio.CancelScope()
        self.num_steps = machine.num_steps
        self.trainer: Trainer | None = None
        self._woke = self._ended = 0.0  # s, on the loop's clock
        self._updates = Updates()

    async def run(self) -> None:
        """Until crashed."""
        with self.scope:
            try:
                async with self.transport, anyio.create_task_group() as group:
                    await group.start(self.node.run)
                    self.trainer = await self._trainer(SameLoop(self.node, self._updates, group))
                    self._woke = anyio.current_time()
                    self.note("resumed", self.trainer.uncommitted(), round=self.node.driver.head.round)
                    self._save(self.schedule)
                    if self.schedule.method.inner:  # the moments of a life before are gone with it
                        await self.trainer.loop.begin((), afresh=True)
                    await self.trainer.run()
            finally:
                self.num_steps = self.trainer.num_steps if self.trainer is not None else self.num_steps
                self._ended = anyio.current_time()
                self.store.close()

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
        self.site.network.kill(self.machine.signer.peer)
        self.scope.cancel()

    async def leave(self) -> None:
        """Save and say goodbye."""
        if self.trainer is not None:
            if await self.trainer.stop():
                self._save(self.schedule)
            await self.node.leave()

    # ---- beginning ----

    @staticmethod
    def _live(found: Resumed | None, fresh: Sequence[Tensor]) -> list[Tensor]:
        return list(fresh) if found is None else [found.tensors[f"live/{f}"] for f in range(len(fresh))]

    def _resume(self, found: Resumed) -> None:
        node = self.node
        node.replica.load(found.tensors)
        head, named = self.store.replay(found.head, node.replica, node.driver.state.me)
        node.driver.state.begin_at(head, node.start.acceptor, self.store.past(head, node.start.acceptor))
        self.schedule.seen = head.hash
        if named or found.adopted:
            stand_at(self.schedule, self.model, node.replica.anchors, found.tensors)
            return
        outer_steps = head.outer_step - found.head.outer_step
        memory = found.meta["progress"]
        replica = node.replica
        resume(self.schedule, self.model, found.tensors, memory, replica.anchors, outer_steps, replica.states)

    def _stand_at_anchors(self) -> None:
        for fragment, anchor_N in enumerate(self.node.replica.anchors):
            self.model.write(fragment, anchor_N)

    async def _trainer(self, side: SameLoop) -> Trainer:
        if self.node.start.head is None:
            self._updates.drain()  # those are in the anchors already
            self.schedule.seen = self.node.driver.head.hash
            self._stand_at_anchors()
        machine = self.machine
        given = side, self.model, self.schedule, machine.pace, self.lesson, self.note, self._save
        if self.side is not None and machine.shares_with is not None:
            side.begin(self.side.run)
            trainer: Trainer = StageTrainer(*given, side=self.side, swarm=side, stages=machine.shares_with)
        else:
            trainer = Trainer(*given)
        trainer.num_steps = self.num_steps
        return trainer

    # ---- what the node writes and says ----

    def _append(self, commit: Commit, frames: Sequence[bytes]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.store.append(commit, frames)
        record = commit.record
        self.note("logged", round=record.round, hash=record.hash, voters=[peer for peer, _ in commit.certificate.votes])
        self.site.trace.keep(commit, frames)

    def _save_acceptor(self, blob: bytes) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.store.acceptor.write(blob)

    def _keep(self, record: Record, frames: Sequence[bytes]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.store.frames.keep(record, frames)

    def _adopt(self, head: Head, tensors: Mapping[str, Tensor]) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.store.adopt(head, tensors)

    def _swap_begins(self) -> None:
        if self.dead:
            raise _Dead("this process has crashed")
        self.store.swap_begins()
        self.note("swap_begins")

    def _on_event(self, event: str, fields: dict[str, object]) -> None:
        self.note(f"node_{event}", None, **fields)

    def _on_update(self, update: CommittedUpdate) -> None:
        record, head = update.record, self.node.driver.head
        self.note(
            "applied" if record is not None else "adopted",
            self.node.replica.outer_tensors(),
            round=head.round if record is None else record.round,
            hash=update.head,
            digest=self.node.replica.digest,
            mine=update.contribution is not None,
            loss=self.lesson.loss(self.node.replica.anchors),
        )
        self._updates.put(update)

    def _save(self, schedule: SyncSchedule) -> bool:
        """A checkpoint; False while live model and chain are not in step."""
        node, head = self.node, self.node.driver.head
        if self.dead or self.trainer is None or (node.gossip is not None and node.gossip.is_swapping):
            return False
        if head.anchor is None or (head.hash != schedule.seen and node.gossip is None):
            return False
        live = {f"live/{f}": tensor.clone() for f, tensor in enumerate(self.model.fragments)} | tensors_of(schedule)
        step = node.gossip.step if node.gossip is not None else 0
        meta = {"age": node.age, "gossip_step": step, "progress": memory_of(schedule)}
        self.store.save(head, {**node.replica.shared_tensors(), **node.replica.own_tensors(), **live}, meta)
        self.note("saved", {**self.trainer.uncommitted(), **self.trainer.without_debts()}, round=head.round)
        return True


async def _interleave(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Work of a thread: others run before it begins and after it has ended."""
    await anyio.lowlevel.checkpoint()
    result = work(*args)
    await anyio.lowlevel.checkpoint()
    return result


# ---- the machine ----
#
# A key and a disk that outlive processes, and a process that comes and goes.


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
        self.part: range | None = None  # fragments that it trains; None: all
        self.shares_with: int | None = None  # machines of the replica that it shares; None: it shares none
        self.up = False
        self.num_steps = 0  # inner steps over all lives, so that no two leave the same mark
        self._past = Spent()  # by the lives before this one
        self._ended_at = 0.0  # when the last of them did, on the loop's clock
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
        """Run one process from its start to its end; do nothing where another start came first in the same moment."""
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
            self.note("failed", why=sorted(type(error).__name__ for error in _single_errors(errors)))
        finally:
            self.up = False
            self._ended_at = anyio.current_time()
            self.num_steps = self.process.num_steps
            self.ended.set()

    def _machine(self) -> Machine:
        return Machine(
            site=self.site,
            signer=self.signer,
            folder=self.folder,
            disk=self.disk,
            pace=self.pace,
            part=self.part,
            shares_with=self.shares_with,
            may_found=self.founder,
            claim=self.claim,
            num_steps=self.num_steps,
            away=anyio.current_time() - self._ended_at,
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


def _single_errors(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_single_errors(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]
