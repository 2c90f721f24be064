"""How a peer begins: resumed from its checkpoint or fresh, in step with a chain, its live model at the anchor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.compressors.base import is_sparse
from decentral.consensus.chain import Head
from decentral.errors import ConfigError, DiskError
from decentral.flow.waiting import in_thread, seconds_asleep_or_not
from decentral.manifest import Manifest
from decentral.manifest.presets import default_scale
from decentral.node.durable_store import Resumed
from decentral.node.folder import Addresses, keep_addresses, keep_terms, keep_token, read_addresses
from decentral.node.node import Node, Start, throttle
from decentral.node.upload import PAUSED
from decentral.observe.contributions import RoundMetrics
from decentral.observe.diagnostics import Look
from decentral.optimizers.base import State
from decentral.peer.given import Given
from decentral.peer.network_setup import NetworkSetup, enter
from decentral.peer.participation import Participation, PeerLimits, save_now
from decentral.peer.saved import Checkpointer, OwnState, OwnStateKept, Saver, recover_state, redundancy_of
from decentral.peer.status import StallWatch
from decentral.pipeline.group import GroupSide
from decentral.quantities import time_left
from decentral.rounds.local_state import CommittedUpdate
from decentral.state.snapshot import BUFFERS
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory, ways_back
from decentral.swarm.hello import check_version
from decentral.swarm.lan import Lan
from decentral.tensors.memory import offload_to
from decentral.training.clocks import StepCount
from decentral.training.inner import differences, differences_sentence
from decentral.training.live_side import LiveSide, Moments
from decentral.training.outer_loop import LoopControl, LoopParts, OuterLoop
from decentral.training.part import Needs, choose_part, find_room
from decentral.training.reporting import Looks
from decentral.training.schedule import SyncSchedule, make_schedule, note_replayed, recall_unadopted, resume, stand_at
from decentral.training.swarm_side import AcrossThreads, SwarmThread, run_blocking
from decentral.transport.memory import MemoryNetwork

_NOTED_EVERY = 1.0  # s between two looks at the addresses to keep: what a crash forgets

logger = logging.getLogger("decentral.peer")


@dataclass(slots=True)
class _Checkpoint:
    """A checkpoint that was found in the folder, and where its journal leads."""

    found: Resumed
    memory: dict[str, Any]  # Any: JSON
    head: Head  # that the journal leads to
    at_anchor: bool = False  # the live model is put to the anchor: its progress is in there, or of another chain
    anchors: list[Tensor] = field(default_factory=list)  # of that head
    states: list[State] = field(default_factory=list)  # the method's, beside them
    buffers_B: Tensor | None = None


class Startup:
    """Everything from the key file to the first inner step, done to a participation."""

    def __init__(
        self,
        part: Participation,
        control: LoopControl,
        count: StepCount,
        limits: PeerLimits,
        lan: Lan | None,
        stalls: StallWatch,
    ) -> None:
        self._stalls = stalls
        self._part, self._control, self._count = part, control, count
        self._settings, self._manifest, self._model = part.settings, part.settings.manifest, part.settings.model
        self._limits, self._daily_upload, self._lan = limits, limits.daily_upload, lan
        self._checkpointer = Checkpointer(part.store, part.settings.states)
        self._checkpoint: _Checkpoint | None = None
        self._invited_by = () if part.settings.invite is None else part.settings.invite.addresses
        self._before = read_addresses(part.settings.out)
        self._outer_steps = 0  # in the live model, when it begins
        self._trains: range | None = None  # fragments; None: all

    def begin(self) -> None:
        """Resume or start, find the swarm, and stand at a verified anchor. Raises what it cannot get over."""
        part = self._part
        if part.token is not None:
            keep_token(self._settings.out, part.token)
        self._use_files_if_short()
        start, kept_whole = self._resume_or_begin()
        part.network = self._enter()
        self._start_swarm(start)
        kept = self._checkpoint
        own = self._lost_state(start) if kept is None else None
        memory = kept.memory if kept is not None else {} if own is None else own.meta
        self._trains = self._choose_part(memory.get("progress", {}).get("part"))
        schedule, included = self._join_at_anchor(own) if kept is None else (self._go_on(kept), [])
        if (evaluate := self._settings.options["evaluate"]) is not None:
            part.looks = Looks(evaluate, self._model, self._note_look, failed=part.reporter.forget_held_out)
        part.loop = self._make_loop(schedule)
        run_blocking(part.loop.begin(included, afresh=kept is None and own is None, outer_steps=self._outer_steps))
        if part.looks is not None and not part.loop.done:
            part.looks.begin()
        if start.head is None or (part.was_over and not kept_whole):
            save_now(part)  # its votes count from now on, so it must be able to come back to where it stands
        keep_terms(self._settings.out, self._manifest)
        if self._control.paused:  # before there was a node that could tell the others
            part.swarm.tell(part.swarm.node.resting.begin, PAUSED)
        self._tell(resumed=start.head is not None)

    def _tell(self, *, resumed: bool) -> None:
        node = self._part.swarm.node
        where = {"at": node.driver.head.round, "record": node.driver.head.hash.hex(), "resumed": resumed}
        self._part.announce("joined", {"invite": self._part.invite_to_write, "round": node.outer_steps, **where})
        self._model.joined.warn_of_copies()
        if idle := self._manifest.idle:
            logging.getLogger("decentral").warning(
                "%s of the terms are for the built-in model and do nothing here: your script says what it does",
                " and ".join(idle),
            )
        is_here = not any(parameter.is_cuda for parameter in self._model.trained.values())
        if self._settings.memory is None and self._settings.options["offload"] is None and is_here:
            held = psutil.Process().memory_info().rss  # the model, and what rounds need of it, are there by now
            warn_of_memory(self._model.schema.sizes, psutil.virtual_memory().available + held)
        if not resumed and self._settings.invite is None:
            warn_of_size(self._manifest, self._model.schema.numel)
        found = differences(self._manifest.inner, self._settings.optimizers.parts)
        if found:  # after the checkpoint's were restored
            logging.getLogger("decentral").warning(differences_sentence(found))
            fields: dict[str, object] = {key: {"manifest": there, "loop": here} for key, there, here in found}
            self._part.announce("inner_differs", fields)

    def _note_look(self, look: Look) -> None:
        """Note what the user's function said around a commit."""
        losses = {"held_out_loss": look.after, "held_out_before": look.before}
        self._part.reporter.metrics(losses, self._count.value)
        self._part.judge(look)

    # ---- the folder ----

    def _resume_or_begin(self) -> tuple[Start, bool]:
        """Return where to start, and whether the folder holds a checkpoint of the run's last commit."""
        store, digest = self._part.store, self._manifest.digest
        found = store.load(digest)
        if found is None and self._settings.options["share"]:  # there is no room for two models, even for a moment
            self._model.train_only(range(0))
        common: dict[str, Any] = {
            "manifest": self._manifest,
            "schema": self._model.schema,
            "anchors": self._model.hand_over(),
            "buffers_B": self._model.read_buffers(),
            "folder": self._settings.out / "download",
            "join_timeout": time_left(self._settings.give_up_at),
            "acceptor": store.last_vote(digest),
        }
        if found is None:
            if self._settings.invite is None:
                check_terms(self._manifest, founding=True)
            return Start(founder=self._settings.invite is None, bootstrap=self._ways, **common), False
        if self._settings.invite is None:
            check_terms(self._manifest, founding=False)
        for name, why in found.passed_over:
            self._part.announce("checkpoint_passed_over", {"name": name, "why": why})
        memory = self._checkpointer.restore(found, self._model)
        self._count.recall(int(memory["inner_steps"]), memory.get("clock", ()))
        self._part.giving.before = Given.from_mapping(memory.get("given"))
        self._part.writes.recall(memory.get("written", ()))
        self._checkpoint = _Checkpoint(found, memory, found.head)
        kept_whole = found.head.final and not found.adopted and bool(memory.get("over"))
        ended = found.head.final and found.adopted
        self._part.was_over = kept_whole or ended or store.leads_to_the_end(found.head)
        common |= {"age": float(memory["age"]), "gossip_step": int(memory["gossip_step"]), "away": store.away()}
        return Start(founder=False, head=found.head, bootstrap=self._ways, **common), kept_whole

    # ---- the swarm ----

    @property
    def _ways(self) -> tuple[str, ...]:
        """The invite's addresses, and those of the peers that were there last: a first peer has no invite, and when it
        comes back at another address the others have only its old one.
        """
        return tuple(dict.fromkeys((*self._invited_by, *self._before.others)))

    def _enter(self) -> NetworkSetup:
        """Find the way to the others; a network with nobody in it where the run is over and nobody is served."""
        given, identity = self._settings.options, self._part.identity
        if self._part.is_offline:
            return NetworkSetup(MemoryNetwork().transport(identity.signer))
        return enter(
            given["transport"],
            identity,
            given["listen"],
            relays=given["relays"],
            invited_by=self._invited_by,
            before=self._before.listen,
        )

    def _start_swarm(self, start: Start) -> None:
        """Returns once the chain has a head here. Raises what the swarm's side cannot get over."""
        part, signer = self._part, self._part.identity.signer
        admission = Admission(part.token, self._manifest.digest, signer.peer) if part.token is not None else None
        transport = throttle(part.network.transport, self._limits.caps, self._daily_upload, admission)
        part.links = transport
        lan, stalls = self._lan, self._stalls  # what goes on beside the rounds must not hold the model
        resumed = start.head is not None

        def make_node(on_update: Callable[[CommittedUpdate], None]) -> Node:
            node = Node(
                start,
                signer=signer,
                transport=transport,
                ledger=part.store.ledger(),
                on_update=on_update,
                on_event=part.announce,
                observe=lambda replica: RoundMetrics(replica, part.announce, part.diagnostics.add_round),
                uplink=lambda: transport.uplink,
                daily_upload=self._daily_upload,
                private=part.network.is_private,
                admission=admission,
                clock=seconds_asleep_or_not,
                compiles_aside=True,
            )
            if (name := self._settings.options["name"]) is not None:
                node.directory.own.call(name)
            part.redundancy = redundancy_of(node)
            part.sharing = GroupSide(node) if self._settings.options["share"] else None
            self._take_up(start, node)
            return node

        out, before = self._settings.out, self._before

        async def beside(directory: Directory) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(note_addresses, directory, out, part.network, before)
                group.start_soon(stalls.watch, part)
                group.start_soon(part.network.watch.run, transport)
                if part.redundancy is not None:
                    group.start_soon(part.redundancy.run)
                if part.sharing is not None:
                    group.start_soon(part.sharing.run)
                if lan is not None:
                    group.start_soon(lan.run, directory)
                if resumed:
                    group.start_soon(check_version, directory, admission)

        part.swarm = SwarmThread(transport, make_node, None if part.is_offline else beside)
        part.swarm.start()

    def _take_up(self, start: Start, node: Node) -> None:
        """Load checkpoint and journal into a node that has not run yet."""
        store, kept = self._part.store, self._checkpoint
        if kept is not None:
            node.replica.load(kept.found.tensors)
        if kept is not None or start.founder:  # a founder's first checkpoint is the model as it is built
            head, named = store.replay(node.driver.head, node.replica, node.driver.state.me)
            node.driver.state.begin_at(head, start.acceptor, store.past(head, start.acceptor))
            if kept is not None:
                kept.head, kept.at_anchor = head, named or kept.found.adopted
                kept.anchors, kept.buffers_B = list(node.replica.anchors), node.replica.buffers_B
                kept.states = list(node.replica.states)

    def _lost_state(self, start: Start) -> OwnState | None:
        """Put back what others keep of this peer, if it was of this run before and its folder does not say so."""
        if start.founder or not self._part.was_here or self._part.redundancy is None:
            return None
        return recover_state(self._part.swarm, self._part.redundancy, self._restore_own, self._part.announce)

    def _restore_own(self, own: OwnState) -> None:
        self._checkpointer.restore_own(own.tensors, own.meta, self._model)
        self._count.recall(int(own.meta["inner_steps"]), own.meta.get("clock", ()))
        self._part.giving.before = Given.from_mapping(own.meta.get("given"))

    # ---- the live model ----

    def _join_at_anchor(self, own: OwnState | None) -> tuple[SyncSchedule, list[CommittedUpdate]]:
        """Put the live model to the anchor; returns the rounds that ended while joining, too: they are in there.

        With a state of its ``own`` that came back, it is as if the peer had slept and taken a snapshot.
        """
        head, anchors, buffers_B, included = self._part.swarm.call(_standing, self._part.swarm)
        if own is not None:
            if self._part.swarm.node.replica.tail.numel:
                self._model.buffers.write(buffers_B, whole=True)
            slept = Resumed(head, dict(own.tensors), dict(own.meta), (), adopted=True)
            return self._go_on(_Checkpoint(slept, slept.meta, head, True, anchors, buffers_B=buffers_B)), included
        schedule, self._outer_steps = self._make_schedule(head), head.outer_step
        for fragment, anchor_N in enumerate(anchors):
            schedule.put(self._model, fragment, anchor_N)
        self._model.buffers.write(buffers_B, whole=True)
        return schedule, included

    def _go_on(self, kept: _Checkpoint) -> SyncSchedule:
        """Carry the live model on to where the journal leads; commits since then are merged like any others.

        One of them may name what a previous incarnation sent: that is no progress any more.
        """
        schedule = self._make_schedule(kept.head)
        self._outer_steps = kept.head.outer_step
        memory = kept.memory.get("progress")
        replayed = range(0 if kept.found.adopted else kept.found.head.outer_step, kept.head.outer_step)
        if kept.at_anchor:
            stand_at(schedule, self._model, kept.anchors, kept.found.tensors)
            recall_unadopted(schedule, memory or {})
        else:
            resume(schedule, self._model, kept.found.tensors, memory, kept.anchors, len(replayed), kept.states)
        note_replayed(schedule, replayed)
        for fragment in set(range(schedule.num_fragments)).difference(schedule.part):
            if schedule.progress[fragment].behind:  # it was trained before this start
                schedule.restart(self._model, kept.anchors, [fragment])
            else:
                schedule.put(self._model, fragment, kept.anchors[fragment])
        if kept.buffers_B is not None and self._lost_its_buffers(kept, kept.buffers_B):
            self._model.write_buffers(kept.buffers_B)
        return schedule

    def _use_files_if_short(self) -> None:
        """Have what rounds need in files, where the memory that this peer may take does not hold it."""
        memory = self._settings.memory
        shares = self._settings.options["share"]  # what it trains is not known yet, and needs no more than that
        if shares or (memory is not None and memory < Needs().in_memory(self._model.schema.sizes)):
            offload_to(Path(self._settings.options["offload"] or self._settings.out))

    def _choose_part(self, before: Sequence[int] | None) -> range | None:
        """Return the fragments that fit this machine, and train no others; those of ``before`` where as many fit."""
        memory, swarm = self._settings.memory, self._part.swarm
        if self._settings.options["share"]:
            return self._train_only(range(0))
        if memory is None:
            return None
        sizes, peer = self._model.schema.sizes, self._part.identity.peer
        part = choose_part(sizes, memory, swarm.call(_parts_of_others, swarm.node), draw=peer)
        if before is not None and before[1] - before[0] == len(part):
            part = range(*before) if Needs().in_files(sizes, range(*before)) <= memory else part
        if len(part) == len(sizes):
            return None
        self._train_only(part)
        logging.getLogger("decentral").warning(
            "memory holds %d of the run's %d fragments, from %d on: those are trained here, the others come in as "
            "they are",
            len(part), len(sizes), part.start, extra={"plain": True},
        )  # fmt: skip
        self._part.announce("trains_part", {"first": part.start, "stop": part.stop, "of": len(sizes)})
        return part

    def _train_only(self, part: range) -> range:
        self._model.train_only(part)
        for optimizer in (
            self._settings.optimizers.parts if part else ()
        ):  # a checkpoint may have brought moments of all
            for parameter in self._model.untrained:  # and those of a stage may be its again
                optimizer.state.pop(parameter, None)
        self._part.reporter.part = part
        self._part.swarm.call(_tell_part, self._part.swarm.node, part)
        return part

    def _make_schedule(self, head: Head) -> SyncSchedule:
        return make_schedule(self._manifest, head.hash, self._live_side(), self._trains)

    def _live_side(self) -> LiveSide:
        moments = Moments(self._model, self._settings.optimizers.parts)
        return LiveSide(self._model, moments, self._part.identity.peer, self._model.schema)

    def _lost_its_buffers(self, kept: _Checkpoint, buffers_B: Tensor) -> bool:
        """Tell whether a resumed peer goes on with shared buffers, not its live ones; never where each has its own."""
        if not self._part.swarm.node.replica.tail.numel:
            return False
        return kept.at_anchor or not torch.equal(buffers_B, kept.found.tensors[BUFFERS])

    def _make_loop(self, schedule: SyncSchedule) -> OuterLoop:
        given, part = self._settings.options, self._part
        buffers = self._manifest.model.buffers or "average"
        told = part.reporter.counters.taking_seconds.append, part.announce, part.giving, part.writes
        saver = Saver(part.swarm, self._checkpointer, self._model, self._count, buffers, part.behind, *told)
        if part.redundancy is not None:
            saver = replace(saver, after=OwnStateKept(part.swarm, part.redundancy, part.announce).after)
        return OuterLoop(
            LoopParts(
                manifest=self._manifest,
                tokens_per_step=given["tokens_per_step"],
                checkpoint_every=given["checkpoint_every"],
                on_nan=given["on_nan"],
                model=self._model,
                schedule=schedule,
                swarm=AcrossThreads(part.swarm),
                events=part.reporter,
                control=self._control,
                clock=time.monotonic,
                save=saver.save,
                # Steps of pairs are in no journal: after a kill a replica would be as old as its checkpoint.
                may_save=part.writes.may_save if self._manifest.exchange.kind != "pair" else lambda: True,
                looks=part.looks,
                is_stage=given["share"],
            )
        )


def check_terms(manifest: Manifest, *, founding: bool) -> None:
    """ConfigError for terms that ruin a run which nobody has begun yet; one that exists is warned of."""
    from decentral.trial.check import check_learns  # the laboratory, which most peers never need

    try:
        check_learns(manifest)
    except ConfigError as error:
        if founding:
            raise
        logging.getLogger("decentral").warning("%s; this run goes on, a new one would be refused", error)


def warn_of_memory(sizes: Sequence[int], free: int) -> None:
    """Warn where training all of the model takes more memory than there is, and say how to train a part of it."""
    verdict, sentence = find_room(sizes, free)
    if verdict != "ok":
        logging.getLogger("decentral").warning("%s", sentence)


def warn_of_size(terms: Manifest, numel: int) -> None:
    """Warn of dense frames for everybody that a usual line does not carry in time: init did not know the model."""
    scale = default_scale(parameters=numel)
    if terms.model.task != "custom" or terms.exchange.kind != "gather" or scale.carries_dense:
        return
    if is_sparse(parse_compressor(terms.compressor.chain)):
        return
    logging.getLogger("decentral").warning(
        "your model has %s parameters, and a round sends all of them to each of the others: on lines of %g Mbit/s "
        "with %d peers that is %.0f s; decentral init --task custom --model-size %dM writes terms for it",
        f"{numel:,}", 8e-6 * scale.rate, scale.peers, numel * (scale.peers - 1) / scale.rate, round(numel / 1e6),
    )  # fmt: skip


async def _standing(swarm: SwarmThread[Node]) -> tuple[Head, list[Tensor], Tensor, list[CommittedUpdate]]:
    """Return where the chain stands, its anchors and buffers, and the updates on their way that those include."""
    included = swarm.updates.drain()
    replica = swarm.node.replica
    return swarm.node.driver.head, list(replica.anchors), replica.buffers_B, included


async def _parts_of_others(node: Node) -> list[range]:
    """Return the parts of members that do not train all of the model."""
    return [part for peer, part in node.directory.parts().items() if peer in node.driver.head.members]


async def _tell_part(node: Node, part: range) -> None:
    """Have others know that this peer trains no more than that."""
    node.directory.own.train(part)


async def note_addresses(directory: Directory, out: Path, network: NetworkSetup, noted: Addresses) -> None:
    """Keep in ``out`` where this peer listens and where others are, for its next start; never raises.

    Once nobody is left, those who were there last stay: they may be restarted as well.
    """
    while True:
        now = Addresses(network.listen or noted.listen, ways_back(directory) or noted.others)
        if now != noted:
            try:
                await in_thread(keep_addresses, out, now)
                noted = now
            except DiskError as error:
                logger.debug("addresses: %s", error)
        await anyio.sleep(_NOTED_EVERY)
