"""How a peer gets to the head of the chain: replay the commits it missed, or adopt a snapshot of a heavier branch.

Replay costs the frames of the missed rounds, a few per cent of the model. A snapshot costs the anchor and the
outer state, striped over the donors that stand at the same commit; every chunk is checked by its hash and the
whole by the anchor's digest before anything is touched. ``donor`` is the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from torch import Tensor

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.exchange import gather
from decentral.parameters import combined_digest, digest
from decentral.rounds.chain import Head
from decentral.rounds.donor import CHAIN, CHAIN_LIMIT, CHUNK, LENGTH, SHARED, STATE, WHERE, Donor
from decentral.rounds.driver import Driver
from decentral.rounds.history import Branch, Place, checked_branch
from decentral.state.assembler import Assembler
from decentral.state.snapshot import CHUNK_NBYTES, Layout, Snapshot, SnapshotIndex, anchor_name
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, decode

TIMEOUT = 30.0  # s until an answer begins: a donor may have to hash its whole state first
ASKED = 4  # other peers asked for the missed commits before a snapshot is fetched
STRIPES = 4  # chunks fetched at once


@dataclass(frozen=True, slots=True)
class Answer:
    """What a holder says of our chain: where it last was the same as its own, and its commits after that."""

    shared: Head | None = None  # None: it knows none of the places that we named
    commits: tuple[Commit, ...] = ()  # as many as it still has and fit


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot that was verified."""

    head: Head
    tensors: dict[str, Tensor]
    gossip_step: int  # the donor's, when peers gossip


class CatchUp:
    """The asking side of one peer; ``donor`` is its serving side."""

    def __init__(self, driver: Driver, transport: Transport, directory: Directory, folder: Path | None) -> None:
        self.driver, self.transport, self.directory, self.folder = driver, transport, directory, folder
        self.layout = Layout.of(driver.replica.shared_tensors())
        self.gossip_step: Callable[[], int] | None = None  # set when peers gossip: there is no anchor to compare then
        self._wanted: PeerId | None = None
        self._asked = anyio.Event()
        driver.catch_up = self.ask
        self.donor = Donor(driver, transport, lambda: self.gossip_step)

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
        others = [other for other in self.directory.live() if other != peer]
        for holder in (peer, *others[:ASKED]):  # one that joined later does not know the records before it
            answer = await self._ask_chain(holder)
            if answer.commits and answer.shared is not None and answer.shared.hash == head.hash:
                if await self._replayed(holder, answer.commits):
                    return
                break
        await self._adopt_if_heavier(peer)

    async def _ask_chain(self, holder: PeerId, places: Sequence[Place] = ()) -> Answer:
        """Where ``holder``'s chain leaves ours (or ``places``), and what it committed since. Raises PayloadError."""
        places = places or self.driver.machine.history.locator()
        body = b"".join(WHERE.pack(*place) for place in places)
        try:
            data = await request(self.transport, holder, CHAIN, body, limit=CHAIN_LIMIT, timeout=TIMEOUT)
        except TransportError:
            return Answer()
        if len(data) < SHARED.size:
            return Answer()
        (round_,) = SHARED.unpack_from(data)
        shared = self.driver.machine.history.newest_of(place for place in places if place[0] == round_)
        return Answer(shared, tuple(split_commits(data[SHARED.size :])))

    async def _replayed(self, holder: PeerId, commits: Sequence[Commit]) -> bool:
        """Replay what was missed; False when its frames are nowhere to be had any more."""
        try:
            for commit in commits:
                await self._replay(holder, commit)
        except PayloadError as error:
            self.driver.on_event("replay_failed", {"why": str(error)})
            return False
        return True

    async def _replay(self, peer: PeerId, commit: Commit) -> None:
        """Fetch the frames that ``commit`` names, then let the machine decide on it as if it had just come."""
        driver = self.driver
        if commit.record.contributors:
            driver.inbox.expect(commit.record)
        others = [other for other in self.directory.live() if other != peer]
        for ref in commit.record.frames:
            if ref.frame in driver.store:
                continue
            data = await gather.fetch(self.transport, (peer, *others), ref.frame, driver.frame_limit)
            if data is None:
                raise PayloadError(f"nobody holds a frame of round {commit.record.round} any more; trying a snapshot")
            await driver.take(data, ref.frame)
        await driver.feed(peer, commit)

    async def _adopt_if_heavier(self, peer: PeerId) -> None:
        """Compare before a byte of state is fetched; adopt what is heavier and hangs together."""
        index, head = await self._index_of(peer)
        if head.weight <= self.driver.head.weight:
            return
        branch = await self._branch_to(peer, head)
        fetched = await self._fetch(peer, index, head)
        await self.driver.adopt(head, {} if self.gossip_step is not None else fetched.tensors, branch)

    async def _branch_to(self, peer: PeerId, claimed: Head) -> Branch:
        """The way from our chain to ``claimed``, checked. Unknown when it left ours longer ago than peers remember."""
        answer = await self._ask_chain(peer)
        if answer.shared is None or not answer.commits:
            return Branch(None)
        commits, more = list(answer.commits), True
        while more and commits[-1].record.round < claimed.round:  # an answer holds only so many bytes
            last = commits[-1].record
            following = await self._ask_chain(peer, [(last.round, last.hash)])
            more = bool(following.commits) and following.commits[-1].record.round > last.round
            commits += following.commits
        return checked_branch(self.driver.machine.history, answer.shared, commits, claimed)

    async def fetch_snapshot(self, peer: PeerId) -> Fetched:
        """A verified snapshot. Raises TransportError or PayloadError."""
        index, head = await self._index_of(peer)
        return await self._fetch(peer, index, head)

    async def _index_of(self, peer: PeerId) -> tuple[SnapshotIndex, Head]:
        """What a donor's snapshot consists of, and the head that it claims."""
        limit = SnapshotIndex.max_nbytes(self.layout)
        data = await request(self.transport, peer, STATE, b"", limit=limit, timeout=TIMEOUT)
        index = SnapshotIndex.from_bytes(data, self.layout)
        head = Head.from_dict(index.meta.get("head"))
        if head.run != self.driver.head.run:
            raise PayloadError("snapshot of another run; use another donor")
        return index, head

    async def _fetch(self, peer: PeerId, index: SnapshotIndex, head: Head) -> Fetched:
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
                ask = CHUNK.pack(assembler.index.digest, number)
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
        if at + LENGTH.size > len(answer):
            raise PayloadError("chain answer ends inside a length; drop its sender")
        (nbytes,) = LENGTH.unpack_from(answer, at)
        at += LENGTH.size
        if nbytes > len(answer) - at:
            raise PayloadError("chain answer ends inside a commit; drop its sender")
        message = decode(answer[at : at + nbytes])
        if not isinstance(message, Commit):
            raise PayloadError(f"chain answer holds a {type(message).__name__}; drop its sender")
        commits.append(message)
        at += nbytes
    return commits
