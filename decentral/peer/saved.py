"""Checkpoints of a peer, which outlive its process, and its state with other members, which outlives its disk."""

from __future__ import annotations

import functools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import ConfigError, ManifestMismatch, PayloadError
from decentral.flow.waiting import Offload, in_thread
from decentral.node.durable_store import DurableStore, Resumed
from decentral.node.node import Node
from decentral.parameters import Schema
from decentral.peer.given import Giving
from decentral.redundancy.giver import WayOut, pack_state, unpack_state
from decentral.redundancy.pieces import Seals
from decentral.redundancy.recovery import Recovered, Recovery, RedundancyService
from decentral.state.checkpoint import flatten, unflatten
from decentral.state.snapshot import live_buffer_name
from decentral.swarm.hello import model_difference
from decentral.training.clocks import StepCount
from decentral.training.inner_states import InnerStates
from decentral.training.live_model import LiveModel, description_of
from decentral.training.live_side import OWN
from decentral.training.schedule import SyncSchedule, memory_of, tensors_of
from decentral.training.swarm_side import SwarmThread
from decentral.wire.keys import PeerId, peer_name

LOOK_EVERY = 0.2  # s: Ctrl-C must get through to who waits, on every platform

Announce = Callable[[str, dict[str, object]], None]

# ---- checkpoints ----
#
# One peer writes down so much that a restart goes on as if nothing had happened.
#
# Anchor, outer state, shared buffers and debt (the replica); live model with its buffers, inner optimizer, scheduler
# and random generators (the training side); inner steps, gossip step and age of the run.


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint in memory: nothing changes it any more, so it is written while training goes on."""

    head: Head
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]  # Any: JSON
    swaps: int  # gossip steps that were begun before

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def outer_steps(self) -> int:
        """Outer steps that it has, which people call its round; in gossip this peer's own."""
        return int(self.meta.get("gossip_step") or self.head.outer_step)


class Checkpointer:
    """Takes, writes and restores the training side together with the replica."""

    def __init__(self, store: DurableStore, states: InnerStates) -> None:
        self._store, self._states = store, states

    @property
    def swaps(self) -> int:
        """Gossip steps that were begun so far."""
        return self._store.swaps

    def take(
        self, head: Head, replica: Mapping[str, Tensor], model: LiveModel, memory: Mapping[str, Any], swaps: int
    ) -> Taken:
        """Copy what training changes; the replica's tensors are replaced and never written to. ``swaps``: as before
        ``replica`` was looked at.
        """
        live = {live_name(f): one_N for f, one_N in enumerate(model.read_all())} | model.buffers.copies()
        # After the model was read: an optimizer that learns an average is then at it, and its state is of it.
        tensors, document = flatten(self._states.keep(), "training")
        meta = {**memory, "training": document, "schema": model.schema.digest.hex()}
        meta |= {"parameters": model.schema.to_json(), "model": description_of(model.bare, model.trained)}
        self._store.keep_frozen(model.schema.frozen, model.frozen_parts, model.whole_frozen)
        return Taken(head, {**replica, **live, **tensors}, meta, swaps)

    def write(self, taken: Taken) -> None:
        """Make it durable, on any thread. Raises DiskError; earlier checkpoints are as before."""
        self._store.save(taken.head, taken.tensors, taken.meta, swaps=taken.swaps)

    def restore(self, found: Resumed, model: LiveModel) -> dict[str, Any]:
        """Put the training side back; returns ``memory`` as it was saved. Raises ManifestMismatch for another model."""
        _check_model(found.meta, model)
        for fragment in range(len(model.schema.fragments)):
            model.write(fragment, found.tensors[live_name(fragment)])
        model.buffers.restore(found.tensors)
        self._states.restore(unflatten(found.meta["training"], found.tensors))
        return dict(found.meta)

    def restore_own(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], model: LiveModel) -> None:
        """Put back a peer's own. Raises ConfigError for another model or optimizer: all is as before then."""
        _check_model(meta, model)
        before = self._states.keep()
        try:
            self._states.restore(unflatten(meta["training"], tensors))
            if meta["buffers"] == "own":
                model.buffers.restore(tensors)
        except (ConfigError, ValueError, KeyError, TypeError, RuntimeError) as error:  # as torch says it, and we
            self._states.restore(before)
            raise ConfigError(f"it is of another inner optimizer or model ({error})") from error


@dataclass(frozen=True, slots=True)
class Saver:
    """Takes a checkpoint where live model and chain are in step, and has it written while training goes on."""

    swarm: SwarmThread[Node]
    checkpointer: Checkpointer
    model: LiveModel
    count: StepCount
    buffers: str  # what the run makes of them, for the export
    behind: WriteBehind
    told: Callable[[float], None]  # s that taking one held the training thread
    announce: Announce
    giving: Giving
    writes: WriteBudget
    after: Callable[[Taken], None] = lambda taken: None  # once it is durable, on the thread that wrote it
    clock: Callable[[], float] = time.monotonic

    def save(self, schedule: SyncSchedule) -> bool:
        """False while a commit arrives, or the last one is being written: it is left to the next boundary. Raises what
        ended the last one (DiskError).
        """
        if self.behind.busy:
            return False
        began = self.clock()
        taken = self._take(schedule)
        if taken is None:
            return False
        held = self.clock() - began
        self.told(held)
        self.behind.begin(lambda: self._write(taken, held))
        return True

    def _take(self, schedule: SyncSchedule) -> Taken | None:
        node, swaps = self.swarm.node, self.checkpointer.swaps
        if node.gossip is not None and node.gossip.is_swapping:
            return None  # the partner may have stepped already
        head, tensors, memory = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != schedule.seen and node.gossip is None):
            return None
        memory |= {"inner_steps": self.count.value, "clock": self.count.memory()}
        memory |= {"progress": memory_of(schedule), "buffers": self.buffers}
        memory |= {"given": self.giving.memory(), "written": self.writes.memory()}
        return self.checkpointer.take(head, {**tensors, **tensors_of(schedule)}, self.model, memory, swaps)

    def _write(self, taken: Taken, held: float) -> None:
        began = self.clock()
        self.checkpointer.write(taken)
        self.writes.note_save(taken.nbytes)
        nbytes, seconds = taken.nbytes, round(self.clock() - began, 3)
        at = {"round": taken.head.round, "outer_step": taken.outer_steps}
        self.announce("checkpoint", {**at, "bytes": nbytes, "held": round(held, 4), "seconds": seconds})
        self.after(taken)


def _check_model(meta: Mapping[str, Any], model: LiveModel) -> None:
    if meta.get("schema") != model.schema.digest.hex():
        kept = Schema.from_json(str(meta.get("parameters")))
        raise ManifestMismatch(
            f"the checkpoint is of another model: {model_difference(model.schema, kept)}; "
            "build the same one, or choose another run directory"
        )


async def _consistent_state(node: Node) -> tuple[Head, dict[str, Tensor], dict[str, Any]]:
    """Head, tensors and memory of one moment: read on the loop, where nothing else can change them meanwhile."""
    replica, head = node.replica, node.driver.head
    step = node.gossip.step if node.gossip is not None else 0
    is_the_last = head.final and head.anchor == replica.digest
    memory = {"gossip_step": step, "age": node.age, "over": is_the_last}
    return head, {**replica.shared_tensors(), **replica.own_tensors()}, memory


def live_name(fragment: int) -> str:
    """Name of a fragment of the live model in a checkpoint."""
    return f"live/{fragment}"


# ---- how often: the writes of a day ----
#
# A checkpoint of a small model every ten commits can be most of what a peer writes: 1.5 MB/s where rounds take a
# second, and a disk bears so many bytes in its life. So checkpoints wait while the process has written more than its
# share of the day's bound. Votes, commits and their frames are written whatever the bound is: by them a process that
# was lost replays to the last commit. What waits is this peer's own: a crash takes the inner steps, and the inner
# optimizer back, to the newest checkpoint. Nor does any wait for longer than ``LONGEST``, or while frames pile up that
# only a checkpoint makes unnecessary.

LONGEST = 3600.0  # s between two checkpoints, whatever the bound is
MOST_FRAMES = 1 << 28  # bytes written since the last one, before the next is due whatever the bound is
AT_ONCE = 0.05  # of the bound: it may be written ahead of its time
DAY = 86_400.0  # s


@functools.cache
def _this_process() -> psutil.Process:
    return psutil.Process()  # looks at the clock of its start, and at its parent's: each second is too often


def count_written() -> int | None:
    """Return the bytes that this process had the disk write; None where the system does not tell."""
    try:
        return int(_this_process().io_counters().write_bytes)
    except (AttributeError, RuntimeError, ValueError, psutil.Error, OSError):  # macOS, and containers that hide it
        return None


def count_free(folder: Path) -> int | None:
    """Return the bytes that may still be written to the disk of ``folder``; None where the system does not tell."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


class WriteBudget:
    """At most ``limit`` bytes a day, as far as checkpoints can wait; None: no limit. Any thread may ask it.

    ``frames``: bytes of frames that this process wrote. ``written``: bytes of all that it wrote; where that is None
    checkpoints alone are counted.
    """

    def __init__(
        self,
        limit: int | None,
        frames: Callable[[], int],
        written: Callable[[], int | None] = count_written,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.limit: int | None = None  # until `hold_to`, below
        self._frames, self._written, self._clock, self._wall = frames, written, clock, wall
        self._of_checkpoints, self._looking = 0, threading.Lock()
        self._seen, self._seen_at, self._day, self._today = self._count(), clock(), self._now(), 0
        self._ahead = 0.0  # bytes that may be written now; below 0: too many were
        self._saved_at, self._frames_saved = clock(), 0
        self.newest: int | None = None  # bytes of the newest checkpoint; None: this process wrote none
        self.hold_to(limit)

    @property
    def today(self) -> int:
        """Bytes written since midnight UTC, by this process and those before it in this folder."""
        self._look()
        return self._today

    def hold_to(self, limit: int | None) -> None:
        """Have another limit from now on, with what of it the day has left: a debt was the old one's."""
        today = self.today
        if limit != self.limit:
            with self._looking:
                self.limit, self._ahead = limit, 0.0 if limit is None else min(AT_ONCE * limit, limit - today)

    def may_save(self) -> bool:
        """Tell whether a checkpoint may be written now."""
        self._look()
        must = self._clock() - self._saved_at >= LONGEST or self._frames() - self._frames_saved >= MOST_FRAMES
        return self.limit is None or self._ahead > 0 or must

    def note_save(self, nbytes: int) -> None:
        """Count a checkpoint that is written."""
        self._of_checkpoints += nbytes
        self.newest = nbytes
        self._saved_at, self._frames_saved = self._clock(), self._frames()

    def memory(self) -> list[int]:
        """Write down the day, and the bytes of it, for the next process."""
        return [self._day, self.today]

    def recall(self, memory: Sequence[int]) -> None:
        """Go on from there; empty in a checkpoint that has none."""
        day, nbytes = memory or (self._day, 0)
        if day == self._day:
            self._today += nbytes
            if self.limit is not None:
                self._ahead = min(self._ahead, self.limit - nbytes)

    def _look(self) -> None:
        with self._looking:
            new, now, day = self._count(), self._clock(), self._now()
            passed, wrote = now - self._seen_at, max(0, new - self._seen)
            self._seen, self._seen_at = new, now
            self._today = wrote + (self._today if day == self._day else 0)
            self._day = day
            if self.limit is not None:
                ahead = self._ahead + self.limit * passed / DAY - wrote
                self._ahead = max(-float(self.limit), min(AT_ONCE * self.limit, ahead))

    def _count(self) -> int:
        told = self._written()
        return self._of_checkpoints if told is None else told

    def _now(self) -> int:
        return int(self._wall() // DAY)


# ---- a thread that writes ----
#
# One thing at a time, while training goes on: a slow disk holds nobody.


class WriteBehind:
    """Its methods are called on the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """True while the last write goes on."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], object]) -> None:
        """Start it; nothing may be in progress."""
        assert not self.busy, "one write at a time"
        self.check()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the last write, once."""
        if not self.busy and self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when it is written. Raises what ended it."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
        self.check()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked for it
            self._error = error


# ---- a peer's own state, kept by others ----
#
# It comes out of its checkpoints, is given to members to keep, and had back once the disk is lost.
#
# That is the inner optimizer, the scheduler, random generators, the method's own, the count of inner steps, and buffers
# where each peer has its own. The anchor, the outer state and shared buffers the swarm has. The debt and the live
# model's lead stay behind: commits since then may have taken from them, and what was taken must not be sent again. So a
# peer that lost its disk goes on as one that slept through rounds, and its live model begins at the anchor.

OWN_KEYS = (
    "inner_steps",
    "clock",
    "training",
    "progress",
    "buffers",
    "given",
    "schema",
    "parameters",
)  # of a checkpoint's document

logger = logging.getLogger("decentral.peer")


@dataclass(frozen=True, slots=True)
class OwnState:
    """Tensors and document as a checkpoint has them, without what is not the peer's alone."""

    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]  # Any: JSON

    @classmethod
    def of(cls, taken: Taken) -> OwnState:
        """That of a checkpoint."""
        kinds = ("training/", OWN, *([live_buffer_name("")] if taken.meta["buffers"] == "own" else []))
        tensors = {name: tensor for name, tensor in taken.tensors.items() if name.startswith(kinds)}
        return cls(tensors, {key: taken.meta[key] for key in OWN_KEYS})


class OwnStateKept:
    """Gives the state of a checkpoint to others, once in so many seconds."""

    def __init__(
        self,
        swarm: SwarmThread[Node],
        service: RedundancyService,
        announce: Announce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._swarm, self._service, self._announce, self._clock = swarm, service, announce, clock
        self._given_at = clock()  # a state that is just begun, or restored, is not worth the bytes

    def after(self, taken: Taken) -> None:
        """A checkpoint is durable; on the thread that wrote it."""
        service, now = self._service, self._clock()
        if service.giver.is_busy or now - self._given_at < service.terms.seconds:
            return
        self._given_at = now
        own = OwnState.of(taken)
        self._swarm.tell(self._give, pack_state(own.tensors, own.meta), taken.outer_steps)

    async def _give(self, state: bytes, round_: int) -> None:
        given = await self._service.giver.give(state, round_)
        if given is None:
            return
        at = {"round": round_, "outer_step": round_}
        if given.why:
            self._announce("state_not_given", {**at, "why": given.why})
            return
        names, seconds = [peer_name(peer) for peer in given.keepers], round(given.seconds, 3)
        self._announce("state_given", {**at, "peers": names, "bytes": given.nbytes, "seconds": seconds})


def redundancy_of(node: Node, offload: Offload = in_thread) -> RedundancyService | None:
    """Make what keeps the members' states for each other, before the transport of ``node`` is entered; None where the
    terms do not ask for it: then nothing of it is served, or sent.
    """
    if (terms := node.manifest.swarm.redundancy) is None:
        return None
    daily_upload, transport = node.daily_upload, node.transport

    def others() -> dict[PeerId, tuple[str, ...]]:
        members = node.driver.head.members
        return {peer: lease.addresses for peer, lease in node.directory.live().items() if peer in members}

    way_out = WayOut(
        transport=transport,
        others=others,
        may_send=lambda: daily_upload is None or not daily_upload.used_up,
        is_quiet=lambda: transport.meter.is_idle,
    )
    seals = Seals(node.signer, node.manifest.digest)
    members, live = lambda: node.driver.head.members, lambda: tuple(node.directory.live())
    return RedundancyService(terms, seals, way_out, members=members, live=live, offload=offload)


def recover_state(
    swarm: SwarmThread[Node], service: RedundancyService, restore: Callable[[OwnState], None], announce: Announce
) -> OwnState | None:
    """Return what members keep of this peer, once ``restore`` has put it back. Where that fails, None: all is as
    before.
    """
    began, recovery = time.monotonic(), service.recovery()
    found, why = _search(swarm, recovery), recovery.why
    try:
        if found is not None:
            own = OwnState(*unpack_state(found.state))
            restore(own)
            _tell(found, time.monotonic() - began, announce)
            return own
    except (PayloadError, ConfigError) as error:
        why = str(error)
    announce("state_not_restored", {"why": why})
    logger.warning("no checkpoint is here, and the inner optimizer's state did not come back: %s; it begins anew", why)
    return None


def _search(swarm: SwarmThread[Node], recovery: Recovery) -> Recovered | None:
    search = swarm.begin(recovery.run)
    while not wait([search], LOOK_EVERY).done:
        pass
    return search.result()


def _tell(found: Recovered, seconds: float, announce: Announce) -> None:
    names, nbytes = [peer_name(peer) for peer in found.keepers], len(found.state)
    at = {"round": found.round, "outer_step": found.round}
    announce("state_restored", {**at, "peers": names, "bytes": nbytes, "seconds": round(seconds, 3)})
    logger.warning(
        "no checkpoint is here; the inner optimizer's state of round %d came back from %d peers, %.1f MB in %.1f s",
        found.round,
        len(names),
        nbytes / 1e6,
        seconds,
    )
