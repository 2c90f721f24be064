"""A snapshot from all who have it, checked: index, chunks, and whether the whole is what the chain commits to.

What came of a snapshot that could not be finished is kept for the next attempt. A donor that sent something else than
the index names is not asked again for a while.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import anyio
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination.stripes import fetch_chunks
from decentral.errors import DecentralError, PayloadError
from decentral.rounds.catchup.chunks import Chunks
from decentral.rounds.catchup.donor import INDEX
from decentral.rounds.catchup.layouts import Layouts
from decentral.rounds.local_state import LocalState, SwarmAccess
from decentral.state.assembler import Assembler
from decentral.state.snapshot import Snapshot, SnapshotIndex
from decentral.transport.requests import request
from decentral.wire.keys import PeerId, peer_name

TIMEOUT = 30.0  # s until an answer begins: a donor may have to hash its whole state first
DONORS = 16  # peers that serve one snapshot
MOST = 1 << 60  # of what a head counts: what grows from there on still fits into a checkpoint
MOST_STEPS = 1 << 48  # of gossip
DISTRUST = 600.0  # s in which a peer that sent wrong chunks is not asked for any; memory errs, too, so not for ever
DISTRUSTED = 1024  # peers remembered so


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot that was verified."""

    head: Head
    tensors: dict[str, Tensor]
    gossip_step: int  # the donor's, when peers gossip


class SnapshotFetch:
    """The asking side of one peer."""

    def __init__(self, state: LocalState, swarm: SwarmAccess, folder: Path | None) -> None:
        self.state, self.folder = state, folder
        self.transport, self.directory = swarm.transport, swarm.directory
        self.layouts = Layouts(state.replica)
        self._partial: Assembler | None = None  # what came of the last snapshot that could not be finished
        self._distrusted: dict[PeerId, float] = {}  # until when

    @property
    def under_way(self) -> tuple[int, int]:
        """Bytes that are here of the snapshot that is being fetched, and of the whole; nothing of none."""
        return (0, 0) if self._partial is None else self._partial.nbytes

    async def fetch(self, peer: PeerId) -> Fetched:
        """A verified snapshot. Raises TransportError, PayloadError or DiskError."""
        return await self.tensors(peer, *await self.index(peer))

    async def index(self, peer: PeerId) -> tuple[SnapshotIndex, Head]:
        """What ``peer`` can serve, and where its chain stands there. Raises TransportError or PayloadError."""
        if not self._trusts(peer):
            raise PayloadError("it sent chunks that are not what they should be; use another donor")
        limit = self.layouts.longest_index
        data = await request(self.transport, peer, INDEX, b"", limit=limit, timeout=TIMEOUT)
        meta = SnapshotIndex.document(data)
        head = Head.from_dict(meta.get("head"))
        index = SnapshotIndex.from_bytes(data, self.layouts.of(meta, head))
        if max(head.round, head.outer_step, head.epoch, head.tokens, head.contributions) >= MOST:
            raise PayloadError("snapshot of a head with numbers that no run reaches; use another donor")
        if head.run != self.state.head.run:
            raise PayloadError("snapshot of another run; use another donor")
        return index, head

    async def tensors(self, peer: PeerId, index: SnapshotIndex, head: Head) -> Fetched:
        """The snapshot that ``peer`` gave ``index`` of, from all who have it. Raises as ``fetch`` does."""
        assembler = await self._begin(index)
        chunks = Chunks(self.transport, index, TIMEOUT)
        await fetch_chunks(assembler, chunks.ask, lambda: self._donors(peer, head), self._dropped)
        self._partial = None
        tensors = await self.state.offload(assembler.tensors)
        found = await self.state.offload(self.state.replica.digest_of, tensors)
        wanted = head.anchor if not self.state.gossips else _digest_in(index)
        if found != wanted:
            self._distrust(peer)
            raise PayloadError("snapshot's tensors do not have the digest that its chain commits to; drop the donor")
        step = index.meta.get("gossip_step", 0)
        return Fetched(head, tensors, step if isinstance(step, int) and 0 <= step < MOST_STEPS else 0)

    async def _begin(self, index: SnapshotIndex) -> Assembler:
        """With what is here of this snapshot: from an attempt before, or because our own tensors are alike."""
        if self._partial is None or self._partial.index.digest != index.digest:
            self._partial = Assembler(index, self.folder)
            await self.state.offload(self._reuse, self._partial)
        return self._partial

    def _dropped(self, donor: PeerId, error: DecentralError) -> None:
        if isinstance(error, PayloadError):
            self._distrust(donor)
        self.state.on_event("donor_dropped", {"peer": peer_name(donor), "why": str(error)})

    def _distrust(self, peer: PeerId) -> None:
        self._distrusted.pop(peer, None)
        self._distrusted[peer] = anyio.current_time() + DISTRUST
        while len(self._distrusted) > DISTRUSTED:
            del self._distrusted[next(iter(self._distrusted))]

    def _trusts(self, peer: PeerId) -> bool:
        return self._distrusted.get(peer, 0.0) <= anyio.current_time()

    def _reuse(self, assembler: Assembler) -> None:
        """Take the chunks that are here already: all of them when a peer begins with the run's first weights."""
        own = Snapshot(self.state.replica.shared_tensors(), {})
        common = len(own.index.hashes)  # whoever has sent since is behind what both have
        for number in assembler.missing():
            if number < common and own.index.hashes[number] == assembler.index.hashes[number]:
                assembler.add(number, own.chunk(number))

    def _donors(self, first: PeerId, head: Head) -> list[PeerId]:
        """Peers that stand at the same commit: their snapshots are equal, byte for byte, unless peers gossip.

        Every joiner has its own order, so that not all of them ask the same few.
        """
        if self.state.gossips:
            return [first]
        me = self.state.me
        same = [p for p, lease in self.directory.live().items() if lease.digest == head.hash and p != first]
        same.sort(key=lambda p: hashlib.blake2b(me + p, digest_size=16).digest())
        return [p for p in [first, *same] if self._trusts(p)][:DONORS]


def _digest_in(index: SnapshotIndex) -> bytes:
    """The digest a gossiping donor claims for its own parameters. Raises PayloadError."""
    claimed = index.meta.get("digest")
    if not isinstance(claimed, str) or len(claimed) != 64 or not set(claimed) <= set("0123456789abcdef"):
        raise PayloadError("snapshot of a gossiping peer without a digest; drop the donor")
    return bytes.fromhex(claimed)
