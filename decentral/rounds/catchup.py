"""How a peer gets to the head of the chain: replay the commits it missed, or adopt a snapshot.

Replay costs the frames of the missed rounds: with 64 of 4096 values kept 0.46 % of a snapshot per round and
contributor; a snapshot is fetched when that may come to more. It costs the anchor and the outer state, striped over the
donors that stand at the same commit; every chunk is checked by its hash and the whole by the anchor's digest before
anything is touched. Donors serve immutable copies and never wait.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.exchange import gather
from decentral.rounds.driver import Driver
from decentral.rounds.fetching import CHUNK, STATE, TIMEOUT, SnapshotFetch
from decentral.state.snapshot import Snapshot
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.transport.requests import request, serve_requests
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, decode, encode

CHAIN = "/decentral/chain/1"
CHAIN_LIMIT = 1 << 23  # bytes of commits in one answer
ASKED = 4  # other peers asked for the missed commits before a snapshot is fetched
KEPT = 4  # snapshots a donor keeps for joiners that are still fetching
_WHERE = struct.Struct("<Q32s")  # round, record hash
_LENGTH = struct.Struct("<I")


class CatchUp:
    """The serving and the asking side of one peer."""

    def __init__(self, driver: Driver, transport: Transport, directory: Directory, folder: Path | None) -> None:
        self.driver, self.transport, self.directory = driver, transport, directory
        self.snapshots = SnapshotFetch(driver, transport, directory, folder)
        self.gossip_step: Callable[[], int] | None = None  # set when peers gossip: there is no anchor to compare then
        self._made: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._making = anyio.Lock()
        self._wanted: PeerId | None = None
        self._asked = anyio.Event()
        driver.catch_up = self.ask
        serve_requests(transport, CHAIN, self._on_chain, limit=_WHERE.size)
        serve_requests(transport, STATE, self._on_state, limit=CHUNK.size)

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
            if self._is_cheap(commits) and await self._replay_all(holder, commits):
                self._wanted = None  # asked meanwhile: whoever is ahead of us still is asked again at the next tick
                return
            if commits:
                break
        await self._adopt_if_longer(peer)

    def _is_cheap(self, commits: Sequence[Commit]) -> bool:
        """Whether the missed frames surely take fewer bytes than a snapshot."""
        replica, nbytes = self.driver.replica, 0
        for record in (commit.record for commit in commits):
            missing = sum(ref.frame not in self.driver.store for ref in record.frames)
            whole = HEADER_NBYTES + replica.codec.max_body_nbytes(replica.shapes(record.fragment))
            nbytes += missing * whole // max(1, len(record.partition))
        return nbytes <= self.snapshots.layout.nbytes

    async def _commits_after(self, holder: PeerId, where: bytes) -> list[Commit]:
        try:
            return split_commits(
                await request(self.transport, holder, CHAIN, where, limit=CHAIN_LIMIT, timeout=TIMEOUT)
            )
        except TransportError:
            return []

    async def _replay_all(self, holder: PeerId, commits: Sequence[Commit]) -> bool:
        """Apply the commits in order; False when there are none, or a frame of one is nowhere any more."""
        for commit in commits:
            if not await self._fetch_frames(holder, commit):
                return False
            await self.driver.feed(holder, commit)
        return bool(commits)

    async def _fetch_frames(self, holder: PeerId, commit: Commit) -> bool:
        """Get the frames that ``commit`` names, from all who have it at once. Whether all are here.

        The machine then decides on the commit as if it had just come.
        """
        driver, record = self.driver, commit.record
        if record.contributors:
            driver.inbox.expect(record)
        ahead = [p for p, lease in self.directory.live().items() if lease.round >= record.round and p != holder]
        holders = (holder, *ahead)
        missing = [ref.frame for ref in record.frames if ref.frame not in driver.store]

        async def fetch(turn: int, frame: bytes) -> None:
            order = holders[turn % len(holders) :] + holders[: turn % len(holders)]
            data = await gather.fetch(self.transport, order, frame, driver.frame_limit, TIMEOUT)
            try:
                if data is not None:
                    await driver.take(data, frame)
            except DecentralError as error:
                driver.on_event("catch_up_failed", {"why": str(error)})

        async with anyio.create_task_group() as group:
            for turn, frame in enumerate(missing):
                group.start_soon(fetch, turn, frame)
        return all(ref.frame in driver.store for ref in record.frames)

    async def _adopt_if_longer(self, peer: PeerId) -> None:
        index, head = await self.snapshots.index(peer)
        ours = self.driver.head
        if (head.outer_step, head.round, head.hash) > (ours.outer_step, ours.round, ours.hash):
            fetched = await self.snapshots.tensors(peer, index, head)
            await self.driver.adopt(head, {} if self.gossip_step is not None else fetched.tensors)

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
        if len(data) != CHUNK.size:
            raise PayloadError(f"chunk request of {len(data)} bytes, want {CHUNK.size}; drop it")
        name, number = CHUNK.unpack(data)
        if name in self._made:
            self._made.move_to_end(name)  # whoever is fetching keeps it alive
        found = self._made.get(name)
        if found is None and not any(s.index.digest == name for s in self._made.values()):
            found = await self._snapshot()  # equal commits give equal snapshots
        return found.chunk(number) if found is not None and found.index.digest == name else b""

    async def _snapshot(self) -> Snapshot:
        """The snapshot of the newest commit, made once per commit. Tensors are never written to, so no copy races."""
        async with self._making:  # several chunks are asked for at once, and only one copy is wanted
            return await self._make_snapshot()

    async def _make_snapshot(self) -> Snapshot:
        head = self.driver.head
        for kept in self._made.values():
            if kept.index.meta["head"]["hash"] == head.hash.hex() and self.gossip_step is None:
                return kept
        if head.anchor is None:
            raise PayloadError("a commit is being applied; ask again")
        replica = self.driver.replica
        meta: dict[str, Any] = {"head": head.to_dict()}  # Any: a JSON document
        if self.gossip_step is not None:
            meta |= {"gossip_step": self.gossip_step(), "digest": replica.digest.hex()}
        made = await self.driver.offload(Snapshot, replica.shared_tensors(), meta)
        self._made[made.index.digest] = made
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return made


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
