"""join(): hooks the inner optimizer and runs rounds beside the training loop.

    with decentral.join("run.toml", model, optimizer, accelerator=accelerator) as peer:
        for batch in loader: ...  # your loop, unchanged; stop when peer.done

Every H-th ``optimizer.step`` offers a round. With ``overlap = 0`` the step returns once the round is committed (or
passed by); otherwise training goes on and the commit is merged at a later step boundary. The inner optimizer's
state is never touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from decentral.errors import DecentralError
from decentral.manifest import Manifest
from decentral.observe.events import EventLog
from decentral.observe.status import Status
from decentral.peer.boundary import Boundary
from decentral.peer.checkpointing import Checkpointer
from decentral.peer.daily_upload import DailyUpload
from decentral.peer.entrance import check_relays, enter
from decentral.peer.invitation import fetch, terms_of
from decentral.peer.links import throttled
from decentral.peer.live_model import LiveModel
from decentral.peer.node import Node, Start
from decentral.peer.reporting import Reporter
from decentral.peer.resting import PAUSED
from decentral.peer.rhythm import Rhythm
from decentral.peer.swarm_thread import SwarmThread
from decentral.peer.vault import Vault
from decentral.rounds.chain import Head
from decentral.rounds.driver import Advance
from decentral.swarm.identity import Identity
from decentral.swarm.invite import Invite
from decentral.swarm.lan import Lan
from decentral.transport import Transport
from decentral.transport.throttle import Caps

Observer = Callable[[dict[str, Any]], None]


def join(
    run: str | Path | Manifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accelerator: Any | None = None,  # Any: accelerate is untyped
    out: str | Path | None = None,
    listen: Sequence[str] | None = None,
    scheduler: Any | None = None,  # Any: torch's schedulers share no public base with state_dict
    require_peers: int = 0,
    join_timeout: float | None = None,
    observer: Observer | None = None,
    identity_path: str | Path | None = None,
    checkpoint_every: int = 10,
    tokens_per_step: int = 0,
    max_upload: float | None = None,
    max_download: float | None = None,
    daily_upload: int | None = None,
    transport: Transport | str | None = None,
    relays: Sequence[str] = (),
    lan: bool = True,
) -> Peer:
    """Make this process a peer of ``run``: a manifest (its first peer, or a restart in ``out``) or an invite.

    Args:
        run: path of a ``run.toml``, a loaded Manifest, or an invite line.
        model: as it is trained; wrapped by accelerate or not.
        optimizer: the inner optimizer; its ``step`` is hooked, its state never touched.
        out: run directory; ``decentral-NAME`` when not given. A checkpoint of this run found there is resumed.
        listen: multiaddrs; all interfaces, any port, when not given.
        scheduler: saved and resumed with the checkpoint.
        require_peers: wait until this many members are there; NoPeersError after ``join_timeout`` seconds.
        observer: called with every event, on whatever thread it happens.
        checkpoint_every: commits between two checkpoints.
        tokens_per_step: training tokens behind one inner step, told to the swarm.
        max_upload: bytes per second that this peer sends at most, over everything; ``max_download`` that it receives.
        daily_upload: bytes that it sends at most per day (UTC); then it trains on without contributing.
        relays: multiaddrs of relays, as ``decentral relay`` prints them: who is behind a NAT is reached through them.
        lan: announce this peer on its local networks by multicast DNS, and look for others of the run there.
        transport: ``daemon``, ``native``, or one of your own; the daemon where this system has it when not given.

    Raises ConfigError and its kin when the terms cannot work; nothing is started then.

    """
    manifest, invite, out_path = terms_of(run, out, transport if isinstance(transport, str) else None, lan=lan)
    return Peer(
        manifest=manifest,
        invite=invite,
        model=LiveModel(model, manifest.outer.fragments, accelerator),
        optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate's wrapper has no step hooks
        scheduler=getattr(scheduler, "scheduler", scheduler),
        out=out_path,
        listen=listen,
        require_peers=require_peers,
        join_timeout=join_timeout,
        observer=observer,
        identity_path=Path(identity_path) if identity_path is not None else out_path / "identity.key",
        checkpoint_every=checkpoint_every,
        tokens_per_step=tokens_per_step,
        caps=Caps(up=max_upload, down=max_download),
        daily_upload=daily_upload,
        transport=transport,
        relays=relays,
        lan=lan,
    )


class Peer(Boundary):
    """One participant of a run, while its ``with`` block lasts."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        invite: Invite | None,
        model: LiveModel,
        optimizer: torch.optim.Optimizer,
        scheduler: Any | None,
        out: Path,
        listen: Sequence[str] | None,
        require_peers: int,
        join_timeout: float | None,
        observer: Observer | None,
        identity_path: Path,
        checkpoint_every: int,
        tokens_per_step: int,
        caps: Caps,
        daily_upload: int | None,
        transport: Transport | str | None,
        relays: Sequence[str] = (),
        lan: bool = True,
    ) -> None:
        self.manifest, self.out = manifest, out
        self.inner_steps = 0
        self.done = False
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._invited_by, self._listen, self._identity_path = invite, listen, identity_path
        self._require_peers, self._join_timeout = require_peers, join_timeout
        self._observer, self._checkpoint_every = observer, checkpoint_every
        self._tokens_per_step, self._transport, self._relays = tokens_per_step, transport, tuple(relays)
        check_relays(self._relays)
        self._lan = Lan(self._emit) if lan else None
        self.caps = caps
        self._daily_upload = None if daily_upload is None else DailyUpload(out, daily_upload)
        self._paused = False
        self._leaving = False
        self._must_save = False
        self._left_at = time.monotonic()
        self._swarm: SwarmThread | None = None
        self._gossips = manifest.exchange.kind == "pair"
        self._last_status = Status(run=manifest.run.name, run_id=manifest.digest.hex())

    @property
    def round(self) -> int:
        """Outer steps that this peer's anchor has behind it."""
        if self._swarm is None:
            return 0
        node = self._swarm.node
        return node.gossip.step if node.gossip is not None else node.driver.head.outer_step

    @property
    def invite(self) -> str:
        """The line that lets others join, by way of this peer or of up to three more; empty while nobody could reach
        this one: before its transport listens, and on processes that do not talk to the swarm.
        """
        addresses = self._swarm.node.directory.ways_in() if self._swarm is not None else ()
        return str(Invite(self.manifest.digest, addresses, None)) if addresses else ""

    @property
    def anchor_digest(self) -> str:
        """Digest of the newest committed anchor, in hex: equal on all peers of a synchronous run."""
        return self._swarm.node.replica.digest.hex() if self._swarm is not None else ""

    def anchor(self) -> list[Tensor]:
        """The newest committed anchor, fragment by fragment: flat float32, shared and not to be written to."""
        return list(self._swarm.node.replica.anchors) if self._swarm is not None else self._model.read_all()

    def log(self, **metrics: float | Tensor) -> None:
        """Remember a training metric, such as ``loss``, for the status and the observer."""
        if self._swarm is not None:
            self._reporter.metrics({name: _plain(value) for name, value in metrics.items()})

    def status(self) -> Status:
        """What this peer is doing now; what it did last, once its swarm side has ended."""
        if self._swarm is not None and self._swarm.alive:
            with suppress(RuntimeError, CancelledError):  # the loop ended between the question and the answer
                self._last_status = self._swarm.call(self._ask_reporter)
        return self._last_status

    async def _ask_reporter(self) -> Status:
        return self._reporter.status(self)

    def leave(self) -> None:
        """End at the next step boundary: ``done`` becomes true."""
        self._leaving = True

    def pause(self) -> None:
        """Train on without contributing until ``resume``; the others do not wait for this peer meanwhile."""
        self._paused = True
        if self._swarm is not None:
            self._swarm.begin(self._swarm.node.resting.begin, PAUSED)

    def resume(self) -> None:
        """Contribute again, from the anchor that the others have reached meanwhile."""
        self._paused = False
        if self._swarm is not None:
            self._swarm.begin(self._swarm.node.resting.end, PAUSED)

    @property
    def in_flight(self) -> bool:
        """Whether a contribution of this peer waits for its commit while training goes on."""
        return self._swarm is not None and self._rhythm.sent_at is not None

    @property
    def paused(self) -> bool:
        """Whether contributions are held back."""
        return self._paused

    def __enter__(self) -> Self:
        if self._model.is_main:
            self._begin()
        self._model.share(range(len(self._model.schema.fragments)), False)
        self._hook = self._optimizer.register_step_post_hook(self._after_inner_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        if self._swarm is None:
            return
        try:
            if kind is None or kind is KeyboardInterrupt:
                self._save()
        finally:
            self._swarm.stop(politely=True)
            self._vault.close()
            self._events.close()

    def _begin(self) -> None:
        """Resume or start, find the swarm, and stand at a verified anchor."""
        self.out.mkdir(parents=True, exist_ok=True)
        identity = Identity.load_or_create(self._identity_path)
        invited_by = self._invited_by.addresses if self._invited_by is not None else ()
        self.entrance = enter(self._transport, identity, self._listen, relays=self._relays, invited_by=invited_by)
        self._events = EventLog(self.out)
        self._vault = Vault(self.out)
        self._reporter = Reporter(self._emit)
        self._checkpointer = Checkpointer(self._vault, self._optimizer, self._scheduler)
        start = self._resumed_or_fresh()
        transport = throttled(self.entrance.transport, self.caps, self._daily_upload)

        def make_node(on_advance: Callable[[Advance], None]) -> Node:
            node = Node(
                start,
                signer=identity.signer,
                transport=transport,
                ledger=self._vault.ledger(),
                on_advance=on_advance,
                on_event=self._emit,
                uplink=lambda: transport.uplink,
                daily_upload=self._daily_upload,
                private=self.entrance.is_private,
            )
            if start.head is not None:
                node.replica.load(self._resumed_tensors)
            if start.head is not None or start.founder:  # a founder's first checkpoint is the model as it is built
                head, named = self._vault.replay(node.driver.head, node.replica, node.driver.me)
                self._restart_at_anchor = named or self._adopted
                node.driver.begin_at(head, start.acceptor, self._vault.past(head, start.acceptor))
            return node

        self._restart_at_anchor = False
        self._swarm = SwarmThread(transport, make_node, self._lan.run if self._lan is not None else None)
        try:
            self._swarm.start()
        except BaseException:
            self._swarm.stop(politely=False)
            self._vault.close()
            self._events.close()
            raise
        self._stand_at_anchor(resumed=start.head is not None)
        if start.head is None:
            self._save()  # its votes count from now on, so it must be able to come back to where it stands
        head = self._swarm.node.driver.head
        where = {"at": head.round, "record": head.hash.hex(), "resumed": start.head is not None}
        self._emit("joined", {"invite": self.invite, "round": self.round, **where})

    def _resumed_or_fresh(self) -> Start:
        found = self._vault.load(self.manifest.digest)
        self._adopted = found is not None and found.adopted
        common: dict[str, Any] = {
            "manifest": self.manifest,
            "schema": self._model.schema,
            "anchors": self._model.read_all(),
            "bootstrap": self._invited_by.addresses if self._invited_by is not None else (),
            "folder": self.out / "download",
            "require_peers": self._require_peers,
            "join_timeout": self._join_timeout,
            "acceptor": self._vault.last_vote(self.manifest.digest),
        }
        if found is None:
            return Start(founder=self._invited_by is None, **common)
        for name, why in found.passed_over:
            self._emit("checkpoint_passed_over", {"name": name, "why": why})
        self._resumed_tensors = found.tensors
        memory = self._checkpointer.restore(found, self._model)
        self.inner_steps = int(memory["inner_steps"])
        return Start(
            founder=False,
            head=found.head,
            age=float(memory["age"]),
            gossip_step=int(memory["gossip_step"]),
            **common,
        )

    def _stand_at_anchor(self, *, resumed: bool) -> None:
        """Bring the live model to the anchor: whole when joining, by what the journal added when resuming."""
        outer, inner = self.manifest.outer, self.manifest.inner
        head, anchors, included = self.swarm.call(_standing, self.swarm)
        self._rhythm = Rhythm(inner.steps // outer.fragments, outer.overlap, self._alpha(), head.hash)
        for advance in included:  # rounds that ended between joining and now: in the anchors already
            self._note(advance)
        if not resumed or self._restart_at_anchor:
            for fragment, anchor_N in enumerate(anchors):
                self._model.write(fragment, anchor_N)
        elif resumed:
            for fragment, anchor_N in enumerate(anchors):
                live_N = self._model.read(fragment)
                self._model.write(fragment, live_N + (anchor_N - self._resumed_tensors[f"anchor/{fragment}"]))

    def _alpha(self) -> float | None:
        """Streaming DiLoCo mixes; every other method carries its progress on. NoLoCo's alpha is its momentum."""
        return self.manifest.outer.alpha if self.manifest.outer.method == "streaming" else None

    @property
    def swarm(self) -> SwarmThread:
        """The swarm side; only the main process has one."""
        assert self._swarm is not None
        return self._swarm

    def _after_inner_step(self, *_: object) -> None:
        """Runs inside ``optimizer.step`` on every process of the peer."""
        self.inner_steps += 1
        changed: set[int] = set()
        if self._model.is_main:
            self._rhythm.stepped()
            self._reporter.stepped()
            changed = self._gossip_boundary() if self._gossips else self._boundary()
            if not self.swarm.alive and not self.done:
                raise self.swarm.error or DecentralError("the swarm's thread ended; see events.jsonl, then restart")
        ended = self.done or self._leaving
        self.done = self._model.share(changed, ended)

    def _save(self) -> bool:
        """Write a checkpoint if live model and chain are in step; while a commit arrives, leave it to the next."""
        node = self.swarm.node
        head, shared, own, step, age = self.swarm.call(_consistent_state, node)
        if head.anchor is None or (head.hash != self._rhythm.seen and not self._gossips):
            return False
        memory = {"inner_steps": self.inner_steps, "gossip_step": step, "age": age}
        self._checkpointer.save(head, {**shared, **own}, self._model, memory)
        self._must_save = False
        return True

    def _emit(self, event: str, fields: dict[str, object]) -> None:
        self._events(event, **fields)
        if self._observer is not None:
            self._observer({"event": event, **fields})


def _plain(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


async def _standing(swarm: SwarmThread) -> tuple[Head, list[Tensor], list[Advance]]:
    """Where the chain stands, its anchors, and the advances on their way that those anchors include."""
    included = []
    while not swarm.advances.empty():
        included.append(swarm.advances.get())
    return swarm.node.driver.head, list(swarm.node.replica.anchors), included


async def _consistent_state(node: Node) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], int, float]:
    """Head and tensors of one moment: read on the loop, where nothing else can change them meanwhile."""
    step = node.gossip.step if node.gossip is not None else 0
    replica = node.replica
    return node.driver.head, replica.shared_tensors(), replica.own_tensors(), step, node.age


def fetch_manifest(
    invite: str,
    out: str | Path,
    *,
    listen: Sequence[str] | None = None,
    join_timeout: float | None = None,
    transport: str | None = None,
    lan: bool = True,
) -> Manifest:
    """The manifest of the run that ``invite`` names, from any of its peers; kept as ``run.toml`` in ``out``.

    Looks until a peer answers, or ``join_timeout`` seconds; with ``lan`` on the local network, too. ``transport`` is
    ``daemon`` or ``native``; None: the daemon where this system has it. Raises NoPeersError, InviteError,
    ManifestMismatch.
    """
    return fetch(Invite.parse(invite), Path(out), listen, join_timeout, transport, lan=lan)
