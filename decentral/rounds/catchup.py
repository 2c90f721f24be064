"""How a peer gets to the head of the chain: replay the commits it missed, or adopt a snapshot.

Replay costs the frames of the missed rounds, a few per cent of the model. A snapshot costs the anchor and the
outer state, striped over the donors that stand at the same commit; every chunk is checked by its hash and the
whole by the anchor's digest before anything is touched. Donors serve immutable copies and never wait.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from torch import Tensor

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.exchange import gather
from decentral.parameters import combined_digest, digest
from decentral.rounds.chain import Head
from decentral.rounds.driver import Driver
from decentral.state.assembler import Assembler
from decentral.state.snapshot import CHUNK_NBYTES, Layout, Snapshot, SnapshotIndex, anchor_name
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, decode, encode

CHAIN = "/decentral/chain/1"
STATE = "/decentral/state/1"
CHAIN_LIMIT = 1 << 23  # bytes of commits in one answer
TIMEOUT = 30.0  # s for one answer; a chunk is 256 KiB, so 70 kbit/s is enough
ASKED = 4  # other peers asked for the missed commits before a snapshot is fetched
STRIPES = 4  # chunks fetched at once
KEPT = 4  # snapshots a donor keeps for joiners that are still fetching
_WHERE = struct.Struct("<Q32s")  # round, record hash
_CHUNK = struct.Struct("<32sI")  # snapshot, chunk number
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot that was verified."""

    head: Head
    tensors: dict[str, Tensor]
    gossip_step: int  # the donor's, when peers gossip


class CatchUp:
    """The serving and the asking side of one peer."""

    def __init__(self, driver: Driver, transport: Transport, directory: Directory, folder: Path | None) -> None:
        self.driver, self.transport, self.directory, self.folder = driver, transport, directory, folder
        self.layout = Layout.of(driver.replica.shared_tensors())
        self.gossip_step: Callable[[], int] | None = None  # set when peers gossip: there is no anchor to compare then
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._wanted: PeerId | None = None
        self._asked = anyio.Event()
        driver.catch_up = self.ask
        serve_requests(transport, CHAIN, self._on_chain, limit=_WHERE.size)
        serve_requests(transport, STATE, self._on_state, limit=_CHUNK.size)

    def ask(self, peer: PeerId) -> None:
        """Catch up with ``peer`` soon; one at a time, the last asked wins."""
        self._wanted = peer
        self._asked.set()

    async def run(self) -> None:
        """Serve the wishes of ``ask`` until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = anyio.Event()
            peer, self._wanted = self._wanted, None
            if peer is None:
                continue
            try:
                await self._catch_up(peer)
            except DecentralError as error:
                self.driver.on_event("catch_up_failed", {"why": str(error)})

    # ---- asking ----

    async def _catch_up(self, peer: PeerId) -> None:
        head = self.driver.head
        if head.anchor is None:
            return
        where = _WHERE.pack(head.round, head.hash)
        others = [other for other in self.directory.live() if other != peer]
        for holder in (peer, *others[:ASKED]):  # one that joined later does not know the records before it
            commits = await self._commits_after(holder, where)
            for commit in commits:
                await self._replay(holder, commit)
            if commits:
                return
        await self._adopt_if_longer(peer)

    async def _commits_after(self, holder: PeerId, where: bytes) -> list[Commit]:
        try:
            return split_commits(
                await request(self.transport, holder, CHAIN, where, limit=CHAIN_LIMIT, timeout=TIMEOUT)
            )
        except TransportError:
            return []

    async def _replay(self, peer: PeerId, commit: Commit) -> None:
        """Fetch the frames that ``commit`` names, then let the machine decide on it as if it had just come."""
        driver = self.driver
        if commit.record.contributors:
            driver.inbox.expect(commit.record)
        others = [other for other in self.directory.live() if other != peer]
        for ref in commit.record.frames:
            if ref.frame in driver.store:
                continue
            data = await gather.fetch(self.transport, (peer, *others), ref.frame, driver.frame_limit, TIMEOUT)
            if data is None:
                raise PayloadError(f"nobody holds a frame of round {commit.record.round} any more; trying a snapshot")
            await driver.take(data, ref.frame)
        await driver.feed(peer, commit)

    async def _adopt_if_longer(self, peer: PeerId) -> None:
        snapshot = await self.fetch_snapshot(peer)
        head, ours = snapshot.head, self.driver.head
        if (head.outer_step, head.round, head.hash) > (ours.outer_step, ours.round, ours.hash):
            await self.driver.adopt(head, {} if self.gossip_step is not None else snapshot.tensors)

    async def fetch_snapshot(self, peer: PeerId) -> Fetched:
        """A verified snapshot. Raises TransportError or PayloadError."""
        limit = SnapshotIndex.max_nbytes(self.layout)
        data = await request(self.transport, peer, STATE, b"", limit=limit, timeout=TIMEOUT)
        index = SnapshotIndex.from_bytes(data, self.layout)
        head = Head.from_dict(index.meta.get("head"))
        if head.run != self.driver.head.run:
            raise PayloadError("snapshot of another run; use another donor")
        assembler = Assembler(index, self.folder)
        await self.driver.offload(self._reuse, assembler)
        await self._fetch_chunks(assembler, self._donors(peer, head))
        tensors = await self.driver.offload(assembler.tensors)
        fragments = range(len(self.driver.replica.anchors))
        found = combined_digest([digest(tensors[anchor_name(f)]) for f in fragments])
        wanted = head.anchor if self.gossip_step is None else _digest_in(index)
        if found != wanted:
            raise PayloadError("snapshot's tensors do not have the digest that its chain commits to; drop the donor")
        step = index.meta.get("gossip_step", 0)
        return Fetched(head, tensors, step if isinstance(step, int) and 0 <= step < 2**48 else 0)

    def _reuse(self, assembler: Assembler) -> None:
        """Take the chunks that are here already: all of them when a peer begins with the run's first weights."""
        own = Snapshot(self.driver.replica.shared_tensors(), {})
        for number in assembler.missing():
            if own.index.hashes[number] == assembler.index.hashes[number]:
                assembler.add(number, own.chunk(number))

    def _donors(self, first: PeerId, head: Head) -> list[PeerId]:
        """Peers that stand at the same commit: their snapshots are equal, byte for byte."""
        same = [p for p, lease in self.directory.live().items() if lease.digest == head.hash and p != first]
        return [first, *same]

    async def _fetch_chunks(self, assembler: Assembler, donors: Sequence[PeerId]) -> None:
        todo = list(reversed(assembler.missing()))
        alive = list(donors)

        async def work(offset: int) -> None:
            while todo and alive:
                number = todo.pop()
                donor = alive[(number + offset) % len(alive)]
                ask = _CHUNK.pack(assembler.index.digest, number)
                try:
                    data = await request(self.transport, donor, STATE, ask, limit=CHUNK_NBYTES, timeout=TIMEOUT)
                    assembler.add(number, data)
                except (TransportError, PayloadError):
                    todo.append(number)
                    if donor in alive:
                        alive.remove(donor)

        async with anyio.create_task_group() as group:
            for offset in range(STRIPES):
                group.start_soon(work, offset)
        if assembler.missing():
            raise TransportError(f"{len(assembler.missing())} chunks of a snapshot are missing and no donor is left")

    # ---- serving ----

    def _refuse_until_in_step(self) -> None:
        """A peer that is still joining has no chain to show: two newcomers must not make one of their own."""
        if not self.driver.running:
            raise TransportError("still joining: ask a peer that is in step")

    async def _on_chain(self, peer: PeerId, data: bytes) -> bytes:
        """The commits after the asker's, oldest first; empty when its branch or its round is not known here."""
        self._refuse_until_in_step()
        if len(data) != _WHERE.size:
            raise PayloadError(f"chain request of {len(data)} bytes, want {_WHERE.size}; drop it")
        round_, hash_ = _WHERE.unpack(data)
        recent = self.driver.machine.recent
        first = recent.get(round_ + 1)
        if first is None or first.record.previous != hash_:
            return b""
        answer = b""
        for number in range(round_ + 1, self.driver.head.round + 1):
            body = encode(recent[number])
            if len(answer) + len(body) + _LENGTH.size > CHAIN_LIMIT:
                break
            answer += _LENGTH.pack(len(body)) + body
        return answer

    async def _on_state(self, peer: PeerId, data: bytes) -> bytes:
        self._refuse_until_in_step()
        if not data:
            return (await self._snapshot()).index.to_bytes()
        if len(data) != _CHUNK.size:
            raise PayloadError(f"chunk request of {len(data)} bytes, want {_CHUNK.size}; drop it")
        name, number = _CHUNK.unpack(data)
        if name in self._snapshots:
            self._snapshots.move_to_end(name)  # whoever is fetching keeps it alive
        found = self._snapshots.get(name)
        if found is None and not any(s.index.digest == name for s in self._snapshots.values()):
            found = await self._snapshot()  # equal commits give equal snapshots
        return found.chunk(number) if found is not None and found.index.digest == name else b""

    async def _snapshot(self) -> Snapshot:
        """The snapshot of the newest commit, made once per commit. Tensors are never written to, so no copy races."""
        head = self.driver.head
        for kept in self._snapshots.values():
            if kept.index.meta["head"]["hash"] == head.hash.hex() and self.gossip_step is None:
                return kept
        if head.anchor is None:
            raise PayloadError("a commit is being applied; ask again")
        replica = self.driver.replica
        meta: dict[str, Any] = {"head": head.to_dict()}  # Any: a JSON document
        if self.gossip_step is not None:
            meta |= {"gossip_step": self.gossip_step(), "digest": replica.digest.hex()}
        made = await self.driver.offload(Snapshot, replica.shared_tensors(), meta)
        self._snapshots[made.index.digest] = made
        while len(self._snapshots) > KEPT:
            self._snapshots.popitem(last=False)
        return made


def _digest_in(index: SnapshotIndex) -> bytes:
    """The digest a gossiping donor claims for its own parameters. Raises PayloadError."""
    claimed = index.meta.get("digest")
    if not isinstance(claimed, str) or len(claimed) != 64 or not set(claimed) <= set("0123456789abcdef"):
        raise PayloadError("snapshot of a gossiping peer without a digest; drop the donor")
    return bytes.fromhex(claimed)


def split_commits(answer: bytes) -> list[Commit]:
    """The commits of a chain answer. Raises PayloadError."""
    commits, at = [], 0
    while at < len(answer):
        if at + _LENGTH.size > len(answer):
            raise PayloadError("chain answer ends inside a length; drop its sender")
        (nbytes,) = _LENGTH.unpack_from(answer, at)
        at += _LENGTH.size
        if nbytes > len(answer) - at:
            raise PayloadError("chain answer ends inside a commit; drop its sender")
        message = decode(answer[at : at + nbytes])
        if not isinstance(message, Commit):
            raise PayloadError(f"chain answer holds a {type(message).__name__}; drop its sender")
        commits.append(message)
        at += nbytes
    return commits
