"""A node that receives a run's anchors and contributes nothing: for evaluation, serving, RL rollouts, late comers.

It is no member of any epoch, never asks to be one, never votes, and is in no quorum and no divisor. It begins as a
newcomer does, with a verified snapshot, and stays up to date as a peer does that slept: it asks for the commits after
its head and replays their frames, or fetches a snapshot where that is less. What it has it gives to others, as every
peer does that is in step. In gossip there is no common anchor before the end: it takes the replica of one peer, anew
when that has moved on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import psutil
import torch
from torch import Tensor

from decentral.compressors import parse_feedback
from decentral.consensus.chain import Head, moves_anchor
from decentral.errors import DecentralError, DeviceError, DiskError, ManifestMismatch
from decentral.manifest import Manifest, check_methods
from decentral.node.folder import read_terms
from decentral.node.node import Node, Start
from decentral.optimizers import make_outer
from decentral.parameters import Schema, in_dtype_of, split
from decentral.rounds.local_state import CommittedUpdate, Ledger
from decentral.state.checkpoint import load_newest, save
from decentral.state.snapshot import Layout
from decentral.tensors.memory import fresh_zeros
from decentral.wire.keys import PeerId, peer_name

LOOK_EVERY = 0.25  # s between looks whether somebody is ahead
ASK_AGAIN = 2.0  # s until another peer is asked for what the one before did not bring
GOSSIP_EVERY = 15.0  # s between looks how far the followed peer is: its answer hashes a whole replica

NOTHING_KEPT = Ledger(lambda commit, frames: None, lambda blob: None)  # who promises nothing needs no journal


@dataclass(frozen=True, slots=True)
class Anchor:
    """The model that the run has agreed on after ``round`` outer steps; in gossip that of one peer."""

    round: int
    digest: str  # hex, over all fragments: equal on all peers of a synchronous run
    final: bool  # the run is over
    peer: str  # whose replica it is, in gossip; "" where all peers have the same
    head: Head
    shared: Mapping[str, Tensor]  # anchor, outer state and buffers as peers share them; not to be written to
    named: Mapping[str, Tensor]  # views of it under the model's names; not to be written to

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the trained parameters, float32, and of the buffers that peers share, by their names in the model.

        Parameters that are not trained were never sent: ``model.load_state_dict(..., strict=False)`` leaves them.
        """
        return {name: tensor.clone() for name, tensor in self.named.items()}


class Follower(Node):
    """A follower's node. ``on_anchor`` gets the first anchor, every ``every``-th and the last, on the swarm's loop."""

    def __init__(self, start: Start, *, every: int, on_anchor: Callable[[Anchor], None], **given: Any) -> None:
        """``given``: what a Node takes, less ledger and on_update. Any: they are checked there."""
        super().__init__(start, ledger=NOTHING_KEPT, on_update=self._on_update, **given)
        self.every, self._on_anchor = every, on_anchor
        self.driver.membership.stopping = True  # it never asks to be let in
        self.has_met_others = False  # since this process began
        self.source: PeerId | None = None  # whose replica it has, in gossip
        self._told: Anchor | None = None
        self._asked: dict[PeerId, float] = {}  # who was asked for later commits, and when
        self._asked_at: tuple[bytes, float] = (b"", 0.0)  # after which head somebody was asked last, and when

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follow until cancelled. Raises ManifestMismatch, VersionError or NoPeersError before the first anchor."""
        async with anyio.create_task_group() as group:
            await group.start(super().run)
            self.driver.machine.leave()  # even if its key were a member's, it does not vote
            group.start_soon(self._keep_up)
            if self.gossip is not None:
                group.start_soon(self._keep_up_in_gossip)  # beside: the last commit does not wait for a replica
            task_status.started()

    async def see_others_to_the_end(self) -> None:
        """Nobody waits for a follower, and it waits for nobody."""

    async def leave(self) -> None:
        """Say goodbye; there is no vote to take back."""
        self.state = "leaving"
        await self.directory.goodbye()

    # ---- keeping up ----

    async def _keep_up(self) -> None:
        while True:
            head = self.driver.head
            if head.anchor is not None and (self.gossip is None or not head.final or self._has_the_end):
                self._tell(head)  # the first, what a snapshot brought, what all merged
            self._ask_ahead(head)
            await anyio.sleep(LOOK_EVERY)

    def _ask_ahead(self, head: Head) -> None:
        """Ask somebody for the commits after ours: who was asked longest ago, so that one that lies costs one turn."""
        now, live = anyio.current_time(), self.directory.live()
        self.has_met_others = self.has_met_others or bool(live)
        ahead = [peer for peer, lease in live.items() if lease.round > head.round]
        if not ahead or head.anchor is None or (self._asked_at[0] == head.hash and now - self._asked_at[1] < ASK_AGAIN):
            return
        self._asked = {peer: at for peer, at in self._asked.items() if peer in ahead}
        chosen = min(ahead, key=lambda peer: (self._asked.get(peer, 0.0), self._own_order(peer)))
        self._asked[chosen], self._asked_at = now, (head.hash, now)
        self.driver.state.catch_up.ask(chosen)

    def _own_order(self, peer: PeerId) -> bytes:
        """Every follower begins with another peer."""
        return hashlib.blake2b(self.driver.state.me + peer, digest_size=16).digest()

    def _on_update(self, update: CommittedUpdate) -> None:
        """Each commit, while none after it is applied: no N-th anchor is missed though many come at once."""
        if update.record is not None and moves_anchor(update.record):
            self._tell(replace(self.driver.head, anchor=update.anchor))

    def _tell(self, head: Head) -> None:
        """Give away the anchor as it is now, if it is due."""
        told, made = self._told, self.outer_steps
        anew = told is None or told.round // self.every != made // self.every or (head.final and not told.final)
        if anew or (told is not None and head.final and told.digest != self.replica.digest.hex()):
            self._told = self.anchor(head)
            self._on_anchor(self._told)

    def anchor(self, head: Head) -> Anchor:
        """The anchor as it is now. No copy: tensors of a replica are replaced, and never written to."""
        replica = self.replica
        whose = peer_name(self.source) if self.source is not None and self.gossip is not None and not head.final else ""
        named = name_tensors(replica.schema, replica.anchors, replica.buffers_B if replica.tail.numel else None)
        shared = replica.shared_tensors()
        return Anchor(self.outer_steps, replica.digest.hex(), head.final, whose, head, shared, named)

    # ---- gossip ----

    async def _sync_with(self, peer: PeerId) -> None:
        await super()._sync_with(peer)
        self.source = peer

    async def _keep_up_in_gossip(self) -> None:
        """The replica of a peer now and then; at the end what all merged, where its commit did not bring it."""
        while not self._has_the_end:
            if await self._take_replica():
                self._tell(self.driver.head)
            await anyio.sleep(ASK_AGAIN if self.driver.head.final else GOSSIP_EVERY)

    @property
    def _has_the_end(self) -> bool:
        head = self.driver.head
        return head.final and head.anchor == self.replica.digest

    async def _take_replica(self) -> bool:
        """Fetch a newer replica and tell whether one came: from the peer that is followed, or another if it is gone."""
        live = list(self.directory.live())
        for peer in sorted(live, key=lambda peer: (peer != self.source, self._own_order(peer))):
            try:
                return await self._take_replica_of(peer)
            except DecentralError as error:
                self.on_event("sync_failed", {"peer": peer_name(peer), "why": str(error)})
        return False

    async def _take_replica_of(self, peer: PeerId) -> bool:
        assert self.gossip is not None
        snapshots, before = self.catch_up.snapshots, self.driver.head
        index, head = await snapshots.index(peer)
        step = index.meta.get("gossip_step", 0)
        newer = isinstance(step, int) and step // self.every > self.gossip.step // self.every
        if not (newer or (before.final and head.final)):
            return False
        fetched = await snapshots.tensors(peer, index, head)
        loaded = await self.driver.state.offload(self.replica.read, fetched.tensors)
        if self.driver.head != before:
            return False  # a merge was committed here meanwhile: this is older
        self.replica.take_over(loaded)
        self.gossip.follow(max(self.gossip.step, fetched.gossip_step))
        self.source = peer
        return True


def name_tensors(schema: Schema, anchors: list[Tensor], buffers_B: Tensor | None) -> dict[str, Tensor]:
    """Fragments, and buffers where there are shared ones, as views by the model's names; whole numbers as int64."""
    named: dict[str, Tensor] = {}
    for fragment, flat in zip(schema.fragments, anchors, strict=True):
        names = (spec.name for spec in fragment.parameters)
        named |= dict(zip(names, split(flat, fragment), strict=True))
    if buffers_B is not None:
        pieces = split(buffers_B, [spec.shape for spec in schema.buffers])
        for spec, piece in zip(schema.buffers, pieces, strict=True):
            whole = torch.zeros(spec.shape, dtype=torch.int64, device="cpu")
            named[spec.name] = in_dtype_of(whole, piece) if spec.kind == "integer" else piece
    return named


# ---- state over a restart ----
#
# A follower keeps one anchor with its outer state, and where the chain stood.
#
# With it the missed commits are replayed where that is less than a snapshot. A journal is not needed, as a follower
# promises nothing; what a crash loses the others have.

STATE_FOLDER = "following"


@dataclass(frozen=True, slots=True)
class FollowerState:
    """All that is known of the run before its peers are met: from the folder, or from the first that answered."""

    manifest: Manifest
    schema: Schema
    head: Head | None = None  # and where an earlier process stood
    tensors: dict[str, Tensor] | None = None
    gossip_step: int = 0
    ways: tuple[str, ...] = ()  # addresses of peers that were there then


def read_state(out: Path, run: bytes) -> FollowerState | None:
    """Where an earlier process stood; None where there is nothing, or nothing whole. Raises ManifestMismatch."""
    manifest = read_terms(out, run, "those of the invite")
    try:
        found = load_newest(out / STATE_FOLDER)
    except DiskError:
        return None
    if found is None or manifest is None:
        return None
    head = Head.from_dict(found.meta["head"])
    if head.run != run:
        raise ManifestMismatch(f"{out / STATE_FOLDER} is of another run ({head.run.hex()[:12]}); choose another --out")
    check_methods(manifest)
    schema = Schema.from_json(str(found.meta["parameters"]))
    return FollowerState(
        manifest, schema, head, found.tensors, int(found.meta["gossip_step"]), tuple(found.meta["ways"])
    )


def keep_state(out: Path, anchor: Anchor, schema: Schema, ways: Sequence[str]) -> None:
    """Replace the state that is kept; for a moment there are two. Raises DiskError.

    ``ways`` lead to others of the run: who wrote the invite may be gone when this follower comes back.
    """
    meta = {"head": anchor.head.to_dict(), "gossip_step": anchor.round, "parameters": schema.to_json()}
    meta["ways"] = list(ways)
    save(out / STATE_FOLDER, f"round-{anchor.round:06d}", anchor.shared, meta, keep=1)


def check_size(known: FollowerState, max_disk: int | None, kept_files: int) -> None:
    """Refuse a model that cannot be held, before a byte of it is asked for: its sizes are a stranger's word.

    ``kept_files``: anchors that are kept beside the state. Raises DeviceError, DiskError.
    """
    outer = make_outer(known.manifest.outer.method, known.manifest.outer.hyper)
    state = Layout.from_schema(known.schema, tuple(outer.init(fresh_zeros(1)))).nbytes + _of_senders(known)
    model = 4 * (known.schema.numel + known.schema.buffer_numel)
    memory = psutil.virtual_memory().total
    if 2 * state > memory:  # as it is, and as it comes
        raise DeviceError(
            f"the run's model and outer state take {state / 1e9:.1f} GB twice, this machine has {memory / 1e9:.1f} GB "
            "of memory; follow it on a larger one"
        )
    disk = 3 * state + (kept_files + 1 if kept_files else 0) * model  # one, the next, and what is on its way
    if max_disk is not None and disk > max_disk:
        raise DiskError(
            f"following this run takes up to {disk / 1e9:.2f} GB of disk, {max_disk / 1e9:.2f} GB are allowed; allow "
            "more with --max-disk, or keep fewer anchors"
        )


def _of_senders(known: FollowerState) -> int:
    """Bytes of what receivers keep of the known members; a first snapshot is held against memory by itself."""
    kept = len(parse_feedback(known.manifest.compressor.feedback).receiver)
    return 4 * known.schema.numel * kept * (0 if known.head is None else len(known.head.members))
