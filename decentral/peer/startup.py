"""How a peer begins: resumed from its checkpoint or fresh, in step with a chain, its live model at the anchor."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.node.daily_upload import DailyUpload
from decentral.node.durable_store import DurableStore
from decentral.node.folder import keep_terms, keep_token
from decentral.node.links import throttled
from decentral.node.node import Node, Start
from decentral.observe.events import EventLog
from decentral.peer.checkpointing import Checkpointer
from decentral.peer.network_setup import NetworkSetup, enter
from decentral.peer.settings import Settings
from decentral.rounds.driver import CommittedUpdate
from decentral.state.snapshot import BUFFERS
from decentral.swarm.admission import Admission
from decentral.swarm.identity import Identity
from decentral.swarm.lan.discovery import Lan
from decentral.swarm.patience import time_left
from decentral.tasks.shards import seed_of
from decentral.training.inner_terms import differences, warning
from decentral.training.outer_loop import OuterLoop
from decentral.training.reporting import Reporter
from decentral.training.swarm_thread import SwarmThread
from decentral.training.sync_schedule import make_rhythm
from decentral.transport.memory.transport import MemoryNetwork
from decentral.wire.keys import Signer, peer_name


class Startup(OuterLoop):
    """Everything from the key file to the first inner step; ``Peer`` adds what a loop sees, and the end."""

    settings: Settings
    out: Path
    inner_steps: int
    _lan: Lan | None
    _daily_upload: DailyUpload | None
    _swarm: SwarmThread | None
    _name: str  # this peer's, as events tell it
    _seed: int
    _token: str | None
    was_over: bool  # the folder held the run's last commit when this peer began: nothing is trained
    _kept_whole: bool  # and a checkpoint of it

    @property
    def is_offline(self) -> bool:
        """Whether this peer, for whom the run is over, gets in touch with nobody."""
        return self.was_over and not self.settings.keep_serving

    @property
    @abstractmethod
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it."""

    @property
    @abstractmethod
    def invite(self) -> str:
        """The line that lets others join."""

    @abstractmethod
    def _emit(self, event: str, fields: dict[str, object]) -> None:
        """Tell the log and the observer."""

    def _begin(self) -> None:
        """Resume or start, find the swarm, and stand at a verified anchor."""
        given = self.settings
        identity = Identity.load_or_create(given.identity_path)
        self._name, self._seed = peer_name(identity.peer), seed_of(self.manifest.digest, identity.peer)
        if self._token is not None:
            keep_token(self.out, self._token)
        self._events = EventLog(self.out)
        self._vault = DurableStore(self.out)
        self._reporter = Reporter(self._emit, identity.peer)
        self._checkpointer = Checkpointer(self._vault, given.optimizers, given.schedulers)
        start = self._resumed_or_fresh()
        self._start_swarm(identity, start)
        self._stand_at_anchor(resumed=start.head is not None)
        self._end_if_over()
        if start.head is None or (self.was_over and not self._kept_whole):
            self._save()  # its votes count from now on, so it must be able to come back to where it stands
        keep_terms(self.out, self.manifest)
        head = self.swarm.node.driver.head
        where = {"at": head.round, "record": head.hash.hex(), "resumed": start.head is not None}
        self._emit("joined", {"invite": self.invite, "round": self.round, **where})
        self._compare_inner()

    def _compare_inner(self) -> None:
        """Warn, once, of settings that are not the run's: after the checkpoint's were restored."""
        found = differences(self.manifest.inner, self.settings.optimizers.parts)
        if found:
            logging.getLogger("decentral").warning(warning(found))
            fields: dict[str, object] = {key: {"manifest": there, "loop": here} for key, there, here in found}
            self._emit("inner_differs", fields)

    @property
    def _invited_by(self) -> tuple[str, ...]:
        """Addresses in the invite; none for who was not invited."""
        return self.settings.invite.addresses if self.settings.invite is not None else ()

    def _resumed_or_fresh(self) -> Start:
        found = self._vault.load(self.manifest.digest)
        self._adopted = found is not None and found.adopted
        self.was_over = self._kept_whole = False
        common: dict[str, Any] = {
            "manifest": self.manifest,
            "schema": self._model.schema,
            "anchors": self._model.read_all(),
            "buffers_B": self._model.read_buffers(),
            "bootstrap": self._invited_by,
            "folder": self.out / "download",
            "join_timeout": time_left(self.settings.give_up_at),
            "acceptor": self._vault.last_vote(self.manifest.digest),
        }
        if found is None:
            return Start(founder=self.settings.invite is None, **common)
        for name, why in found.passed_over:
            self._emit("checkpoint_passed_over", {"name": name, "why": why})
        self._resumed_tensors = found.tensors
        memory = self._checkpointer.restore(found, self._model)
        self.inner_steps = int(memory["inner_steps"])
        self._resumed_progress, self._resumed_at = memory.get("progress"), found.head.outer_step
        self._kept_whole = found.head.final and not found.adopted and bool(memory.get("over"))
        self.was_over = (
            self._kept_whole or (found.head.final and found.adopted) or self._vault.leads_to_the_end(found.head)
        )
        return Start(
            founder=False,
            head=found.head,
            age=float(memory["age"]),
            gossip_step=int(memory["gossip_step"]),
            **common,
        )

    def _enter(self, identity: Identity) -> NetworkSetup:
        """The way to the others; a network with nobody in it for whom the run is over, and who serves nobody."""
        given = self.settings
        if self.is_offline:
            return NetworkSetup(MemoryNetwork().transport(identity.signer))
        return enter(given.transport, identity, given.listen, relays=given.relays, invited_by=self._invited_by)

    def _start_swarm(self, identity: Identity, start: Start) -> None:
        """Returns once the chain has a head here. Raises what the swarm's side cannot get over; all is closed then."""
        try:
            self.entrance = self._enter(identity)
            self._run_swarm(identity.signer, start)
        except BaseException:
            if self._swarm is not None:
                self._swarm.stop(politely=False)
            self._vault.close()
            self._events.close()
            raise

    def _run_swarm(self, signer: Signer, start: Start) -> None:
        token, run = self._token, self.manifest.digest
        admission = Admission(token, run, signer.peer) if token is not None else None
        transport = throttled(self.entrance.transport, self.settings.caps, self._daily_upload, admission)

        def make_node(on_advance: Callable[[CommittedUpdate], None]) -> Node:
            node = Node(
                start,
                signer=signer,
                transport=transport,
                ledger=self._vault.ledger(),
                on_advance=on_advance,
                on_event=self._emit,
                uplink=lambda: transport.uplink,
                daily_upload=self._daily_upload,
                private=self.entrance.is_private,
                admission=admission,
            )
            self._take_up(start, node)
            return node

        self._restart_at_anchor = False
        beside = None if self._lan is None or self.is_offline else self._lan.run
        self._swarm = SwarmThread(transport, make_node, beside)
        self._swarm.start()

    def _take_up(self, start: Start, node: Node) -> None:
        """What the checkpoint and the journal say, into a node that has not run yet."""
        if start.head is not None:
            node.replica.load(self._resumed_tensors)
        if start.head is not None or start.founder:  # a founder's first checkpoint is the model as it is built
            head, named = self._vault.replay(node.driver.head, node.replica, node.driver.me)
            self._restart_at_anchor = named or self._adopted
            node.driver.begin_at(head, start.acceptor, self._vault.past(head, start.acceptor))

    def _stand_at_anchor(self, *, resumed: bool) -> None:
        """Bring the live model to the anchor: whole when joining, by what the journal added when resuming."""
        head, anchors, buffers_B, included = self.swarm.call(_standing, self.swarm)
        self._rhythm = make_rhythm(self.manifest, head.hash)
        for advance in included:  # rounds that ended between joining and now: in the anchors already
            self._note(advance)
        if not resumed or self._restart_at_anchor:
            for fragment, anchor_N in enumerate(anchors):
                self._rhythm.put(self._model, fragment, anchor_N)
        else:
            outer_steps = head.outer_step - self._resumed_at
            self._rhythm.resume(self._model, self._resumed_tensors, self._resumed_progress, anchors, outer_steps)
        if not resumed or self._lost_its_buffers(buffers_B):
            self._model.write_buffers(buffers_B)

    def _lost_its_buffers(self, buffers_B: Tensor) -> bool:
        """Whether a resumed peer goes on with the shared buffers, not its live ones; never where each has its own."""
        if not self.swarm.node.replica.tail.numel:
            return False
        return self._restart_at_anchor or not torch.equal(buffers_B, self._resumed_tensors[BUFFERS])


async def _standing(swarm: SwarmThread) -> tuple[Head, list[Tensor], Tensor, list[CommittedUpdate]]:
    """Where the chain stands, its anchors and buffers, and the advances on their way that those include."""
    included = []
    while not swarm.advances.empty():
        included.append(swarm.advances.get())
    replica = swarm.node.replica
    return swarm.node.driver.head, list(replica.anchors), replica.buffers_B, included
