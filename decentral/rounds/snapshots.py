"""Snapshots of whole states: one peer's side that gives them, and the side that fetches them, checked."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import psutil
from torch import Tensor

from decentral.consensus.chain import LOCATOR, Head
from decentral.consensus.learner import find_oldest_head
from decentral.dissemination.pull import fetch_chunks, in_own_order
from decentral.errors import DecentralError, PayloadError, PeerUnreachable, TransportError
from decentral.replica.contents import sender_name
from decentral.replica.replica import Replica
from decentral.rounds.local_state import LocalState, SwarmAccess
from decentral.state.snapshot import (
    BY_PLANES,
    CHUNK_NBYTES,
    FORM_NBYTES,
    HASH_NBYTES,
    PLANES,
    Assembler,
    Layout,
    Snapshot,
    SnapshotIndex,
    from_form,
    to_form,
)
from decentral.transport import Transport
from decentral.transport.requests import request, serve_requests
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import encode

# ---- what a peer gives ----
#
# Peers that missed something get the commits after a place, and snapshots of the newest one. Snapshots are immutable
# copies, so donors never wait.
#
# Crosses the wire: a chain request is up to ``LOCATOR`` places of 40 bytes, its answer the round of the newest one
# known here and commits with their lengths; a request for the oldest is empty, its answer a head as JSON and commits,
# each with its length; an index request is empty, a state request names a chunk, and since version 2 the forms in which
# it may come (see `to_form`).

CHAIN = "/decentral/chain/1"
OLDEST = "/decentral/oldest/1"
INDEX = "/decentral/index/1"
STATE = "/decentral/state/1"  # what peers of version 0.1 serve and ask for
PACKED = "/decentral/state/2"
CHAIN_LIMIT = 1 << 23  # bytes of commits in one answer
KEPT = 4  # snapshots kept for joiners that are still fetching
IDLE = 300.0  # s after which nobody fetches one any more: each holds an anchor and a state that rounds have replaced
WHERE = struct.Struct("<Q32s")  # round, record hash; a request names up to LOCATOR places, newest first
SHARED = struct.Struct("<Q")  # an answer begins with the round of the newest place both know
LENGTH = struct.Struct("<I")  # of the commit that follows
CHUNK = struct.Struct("<32sI")  # snapshot, chunk number
ANY_FORM = struct.Struct("<32sIB")  # and the set of forms that the asker takes besides the plain one


class Donor:
    """The serving side of one peer's catch-up."""

    def __init__(self, state: LocalState, transport: Transport) -> None:
        self.state = state
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._asked_at: dict[bytes, float] = {}  # by snapshot, when something of it was asked for last
        self._making = anyio.Lock()
        serve_requests(transport, CHAIN, self._on_chain, limit=LOCATOR * WHERE.size)
        serve_requests(transport, OLDEST, self._on_oldest, limit=0)
        serve_requests(transport, INDEX, self._on_index, limit=0)
        serve_requests(transport, STATE, self._on_state, limit=CHUNK.size)
        serve_requests(transport, PACKED, self._on_packed, limit=ANY_FORM.size)

    @property
    def snapshots(self) -> tuple[bytes, ...]:
        """Return the digests of the snapshots that are here."""
        return tuple(self._snapshots)

    def _refuse_until_in_step(self) -> None:
        """Refuse while this peer is still joining and has no chain to show: two newcomers must not make one of their
        own.
        """
        if not self.state.running:
            raise TransportError("still joining: ask a peer that is in step")

    async def _on_chain(self, peer: PeerId, data: bytes) -> bytes:
        """Answer with the newest of the asker's places that our chain went through, and our commits after it, oldest
        first.

        Empty when its branch is not known here; without commits when they are too long ago to be kept.
        """
        self._refuse_until_in_step()
        if not data or len(data) % WHERE.size:
            raise PayloadError(f"chain request of {len(data)} bytes, want {WHERE.size} per place; drop it")
        shared = self.state.machine.state.history.newest_of(WHERE.iter_unpack(data))
        if shared is None:
            return b""
        return SHARED.pack(shared.round) + self._commits_after(shared.round, CHAIN_LIMIT - SHARED.size)

    async def _on_oldest(self, peer: PeerId, data: bytes) -> bytes:
        """Answer with the oldest head from which every commit is kept here, and those commits; our own head where none
        is.
        """
        self._refuse_until_in_step()
        oldest = find_oldest_head(self.state.machine.state)
        if oldest.anchor is None:
            raise PayloadError("a commit is being applied; ask again")
        head = json.dumps(oldest.to_dict()).encode()
        answer = LENGTH.pack(len(head)) + head
        return answer + self._commits_after(oldest.round, CHAIN_LIMIT - len(answer))

    def _commits_after(self, round_: int, room: int) -> bytes:
        """Return as many commits as are kept and fit into ``room`` bytes, each after its length."""
        state, found, nbytes = self.state.machine.state, list[bytes](), 0
        for number in range(round_ + 1, state.head.round + 1):
            if number not in state.recent:
                break
            body = encode(state.recent[number])
            nbytes += LENGTH.size + len(body)
            if nbytes > room:
                break
            found += [LENGTH.pack(len(body)), body]
        return b"".join(found)

    async def _on_index(self, peer: PeerId, data: bytes) -> bytes:
        self._refuse_until_in_step()
        index = (await self._snapshot()).index
        self._asked_at[index.digest] = anyio.current_time()
        return index.to_bytes()

    async def _on_state(self, peer: PeerId, data: bytes) -> bytes:
        return await self._chunk(*_read_question(CHUNK, data))

    async def _on_packed(self, peer: PeerId, data: bytes) -> bytes:
        name, number, forms = _read_question(ANY_FORM, data)
        chunk = await self._chunk(name, number)
        return to_form(chunk, forms) if chunk else b""

    async def _chunk(self, name: bytes, number: int) -> bytes:
        """Return a chunk; empty when that snapshot is not here any more."""
        self._refuse_until_in_step()
        if name in self._snapshots:
            self._snapshots.move_to_end(name)  # whoever is fetching keeps it alive
            self._asked_at[name] = anyio.current_time()
        found = self._snapshots.get(name)
        if found is None and not any(s.index.digest == name for s in self._snapshots.values()):
            found = await self._snapshot()  # equal commits give equal snapshots
        return found.chunk(number) if found is not None and found.index.digest == name else b""

    async def _snapshot(self) -> Snapshot:
        """Return the snapshot of the newest commit, made once. Tensors are never written to, so no copy races."""
        async with self._making:  # several chunks are asked for at once, and only one copy is wanted
            return await self._make_snapshot()

    async def _make_snapshot(self) -> Snapshot:
        head, replica, partners = self.state.head, self.state.replica, self.state.partners
        for kept in self._snapshots.values():
            if kept.index.meta["head"]["hash"] == head.hash.hex() and partners is None:
                return kept
        if head.anchor is None:
            raise PayloadError("a commit is being applied; ask again")
        meta: dict[str, Any] = {"head": head.to_dict(), **Layouts(replica).document(head.members)}  # Any: JSON
        if partners is not None:
            meta |= {"gossip_step": partners.step, "digest": replica.digest.hex()}
        made = await self.state.offload(Snapshot, replica.shared_tensors(), meta)
        self._snapshots[made.index.digest] = made
        self._asked_at[made.index.digest] = anyio.current_time()
        while len(self._snapshots) > KEPT:
            self._forget(next(iter(self._snapshots)))
        self.state.tasks.spawn(self._forget_when_idle, made.index.digest)
        return made

    async def _forget_when_idle(self, name: bytes) -> None:
        while (left := self._asked_at.get(name, 0.0) + IDLE - anyio.current_time()) > 0 and name in self._asked_at:
            await anyio.sleep(left)
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        self._snapshots.pop(name, None)
        self._asked_at.pop(name, None)


def _read_question(fields: struct.Struct, data: bytes) -> tuple[Any, ...]:  # Any: what a struct holds
    """Read the fields of a question. Raises PayloadError."""
    if len(data) != fields.size:
        raise PayloadError(f"chunk request of {len(data)} bytes, want {fields.size}; drop it")
    return fields.unpack(data)


# ---- fetching a snapshot ----
#
# It comes from all who have it, and is checked: index, chunks, and whether the whole is what the chain commits to.
#
# What came of a snapshot that could not be finished is kept for the next attempt. A donor that sent something else than
# the index names is not asked again for a while.

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
        """Return the bytes that are here of the snapshot that is being fetched, and of the whole; nothing of none."""
        return (0, 0) if self._partial is None else self._partial.nbytes

    async def fetch(self, peer: PeerId) -> Fetched:
        """Fetch a verified snapshot. Raises TransportError, PayloadError or DiskError."""
        return await self.tensors(peer, *await self.index(peer))

    async def index(self, peer: PeerId) -> tuple[SnapshotIndex, Head]:
        """Ask what ``peer`` can serve, and where its chain stands there. Raises TransportError or PayloadError."""
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
        """Fetch the snapshot that ``peer`` gave ``index`` of, from all who have it. Raises as ``fetch`` does."""
        assembler = await self._begin(index)
        chunks = Chunks(self.transport, index, TIMEOUT)
        await fetch_chunks(assembler, chunks.ask, lambda: self._donors(peer, head), self._drop)
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
        """Begin with what is here of this snapshot: from an attempt before, or because our own tensors are alike."""
        if self._partial is None or self._partial.index.digest != index.digest:
            self._partial = Assembler(index, self.folder)
            await self.state.offload(self._reuse, self._partial)
        return self._partial

    def _drop(self, donor: PeerId, error: DecentralError) -> None:
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
        """Return the peers that stand at the same commit: their snapshots are equal, byte for byte, unless peers
        gossip.
        """
        if self.state.gossips:
            return [first]
        me = self.state.me
        same = [p for p, lease in self.directory.live().items() if lease.digest == head.hash and p != first]
        same.sort(key=lambda p: in_own_order(me, p))
        return [p for p in [first, *same] if self._trusts(p)][:DONORS]


def _digest_in(index: SnapshotIndex) -> bytes:
    """Return the digest a gossiping donor claims for its own parameters. Raises PayloadError."""
    claimed = index.meta.get("digest")
    if not isinstance(claimed, str) or len(claimed) != 64 or not set(claimed) <= set("0123456789abcdef"):
        raise PayloadError("snapshot of a gossiping peer without a digest; drop the donor")
    return bytes.fromhex(claimed)


# ---- one chunk from one donor ----
#
# It comes packed while that gains time, and as it is from donors of before that could be asked for.
#
# Crosses the wire: 37 bytes for a chunk in one of several forms (see `to_form`). A donor that does not serve that is
# asked once more, with the 36 bytes of the protocol before it, and only so from then on.


class Chunks:
    """The requests for the chunks of one snapshot."""

    def __init__(self, transport: Transport, index: SnapshotIndex, timeout: float) -> None:
        self.transport, self.index, self.timeout = transport, index, timeout
        self.gain = Gain()
        self._packs: dict[PeerId, bool] = {}  # peers that have answered, and whether in any form

    async def ask(self, donor: PeerId, number: int) -> bytes:
        """Ask for a chunk; return its plain bytes. Raises TransportError, also when it has that snapshot no more, or
        PayloadError.
        """
        if self._packs.get(donor, True):
            try:
                chunk = await self._in_a_form(donor, number)
                self._packs[donor] = True
                return chunk
            except PeerUnreachable:
                if donor in self._packs:
                    raise
        chunk = await self._as_it_is(donor, number)
        self._packs[donor] = False
        return chunk

    async def _in_a_form(self, donor: PeerId, number: int) -> bytes:
        nbytes = self.index.layout.chunk_nbytes(number)
        packed = self.gain.packed
        ask = ANY_FORM.pack(self.index.digest, number, BY_PLANES if packed else 0)
        answer = self._there(donor, await self._request(donor, PACKED, ask, nbytes + FORM_NBYTES))
        chunk = self._plain(answer, nbytes)
        self.gain.came(nbytes, anyio.current_time(), packed=packed)
        return chunk

    def _plain(self, answer: bytes, nbytes: int) -> bytes:
        began = anyio.current_time()
        chunk = from_form(answer, nbytes)
        if answer[0] == PLANES:
            self.gain.unpacked(len(answer), nbytes, anyio.current_time() - began)
        return chunk

    async def _as_it_is(self, donor: PeerId, number: int) -> bytes:
        ask = CHUNK.pack(self.index.digest, number)
        return self._there(donor, await self._request(donor, STATE, ask, self.index.layout.chunk_nbytes(number)))

    async def _request(self, donor: PeerId, protocol: str, ask: bytes, limit: int) -> bytes:
        return await request(self.transport, donor, protocol, ask, limit=limit, timeout=self.timeout)

    def _there(self, donor: PeerId, answer: bytes) -> bytes:
        if not answer:
            raise TransportError(f"{peer_name(donor)}: it does not have that snapshot any more; ask another")
        return answer


# ---- packed, or as they are ----
#
# No rate alone can tell in which form chunks come sooner, so both are timed.
#
# A packed chunk is a sixth shorter, and packing and unpacking take turns from the streams. That gains where the way is
# the narrow part, and loses where a processor is, at either end; from here both are only bytes that come slowly. So the
# two forms are timed against each other, a few chunks each, and the sooner one is asked for; now and then the other is
# tried again. Where a way is so slow that packing takes a small part of what it saves, nothing is tried.
#
# Measured (experiments/LOG.md): a rule that compared the time saved at the rate seen with the quickest unpacking gave
# packing up at 400 Mbit/s, where it gains 17 %.

_TURN = 8  # chunks that are timed before the forms are compared
_TRIALS = 0.01  # of the time may go to trying the slower form
_SURELY = 40  # times unpacking: both ends take four of it, and a busy processor would have to be ten times slower
_MARGIN = 0.03  # the other form has to be that much sooner: turns of one form differ so
_FIRST_STAY, _LONGEST_STAY = 6, 24  # turns; the first comparison falls into the time in which windows grow
_KEPT_SHARE = 7 / 8  # of what is known of a form when its next chunk comes
_NEVER = float("inf")


@dataclass(slots=True)
class LinkPace:
    """The seconds that a byte takes in one form, of late."""

    seconds: float = 0.0
    nbytes: float = 0.0

    def add(self, seconds: float, nbytes: int) -> None:
        """Note that a chunk of ``nbytes`` came so long after the one before it."""
        self.seconds = _KEPT_SHARE * self.seconds + seconds
        self.nbytes = _KEPT_SHARE * self.nbytes + nbytes

    @property
    def per_byte(self) -> float:
        """Return the seconds for a byte; none is known before something came."""
        return self.seconds / self.nbytes if self.nbytes else _NEVER


@dataclass(slots=True)
class Gain:
    """The choice of the form to ask for. Pure: the times come in."""

    packed: bool = True  # the form to ask for now
    better: bool = True  # the form that came sooner; the other one while that is tried
    paces: tuple[LinkPace, LinkPace] = field(default_factory=lambda: (LinkPace(), LinkPace()))  # as they are, packed
    saved: float = 0.0  # of a byte, by the last chunk that came packed
    unpacking: float = _NEVER  # s for a byte, the quickest: a busy machine makes one slow, nothing makes one fast
    _left: int = _TURN  # chunks until the next decision
    _longest: int = _FIRST_STAY
    _last: tuple[bool, float] | None = None  # the form in which the last chunk was asked for, and when it came

    def unpacked(self, nbytes: int, chunk_nbytes: int, seconds: float) -> None:
        """Note that a chunk that came as ``nbytes`` was unpacked in so many seconds."""
        self.saved = 1 - nbytes / chunk_nbytes
        self.unpacking = min(self.unpacking, seconds / chunk_nbytes)

    def came(self, chunk_nbytes: int, now: float, *, packed: bool) -> None:
        """Note that a chunk that was asked for in this form is here. Only one after another in the same form tells its
        pace.
        """
        before, self._last = self._last, (packed, now)
        if before is None or before[0] != packed:
            return
        self.paces[packed].add(now - before[1], chunk_nbytes)
        if packed == self.packed:
            self._left -= 1
            if self._left <= 0:
                self._decide()

    def _decide(self) -> None:
        if self.packed != self.better:
            self._compare()
        elif self._is_sure():
            self._left = _TURN
        else:
            self.packed, self._left = not self.better, _TURN

    def _is_sure(self) -> bool:
        """Tell whether the way is so slow that packing pays whatever the processors do."""
        saved = self.saved * self.paces[True].per_byte
        return self.better and self.saved > 0 and saved >= _SURELY * self.unpacking

    def _compare(self) -> None:
        here, other = self.paces[self.better].per_byte, self.paces[not self.better].per_byte
        if other < (1 - _MARGIN) * here:
            self.better = not self.better
        self.packed = self.better
        loss = max(here, other) / min(here, other) - 1 if min(here, other) else 0.0
        self._left = _TURN * max(1, min(self._longest, round(loss / _TRIALS)))
        self._longest = _LONGEST_STAY


# ---- tensors and size of a snapshot ----
#
# They follow from this peer's own model, and from the donor's word on senders: what receivers keep of each sender is in
# a snapshot, and who has sent is not the same in every round.
#
# The index says it beside the head: for each fragment a bit for each of the head's members, as hexadecimal digits, the
# first member lowest. All names and sizes follow from that and the local schema. Members are a stranger's word here,
# and each one that is claimed takes a copy of the model, so a snapshot that this machine cannot hold is refused before
# room is made for it.

SENT = "senders"  # its name in the document of an index
_COPIES = 2  # as it comes, and as tensors


class Layouts:
    """The layouts of the snapshots of one run."""

    def __init__(self, replica: Replica) -> None:
        self._senders = replica.senders
        own = replica.senders.tensors()
        self.least = Layout.of({name: one for name, one in replica.shared_tensors().items() if name not in own})

    @property
    def nbytes(self) -> int:
        """Return the bytes of a snapshot, as far as this peer knows which peers have sent."""
        return self.least.nbytes + self._senders.nbytes

    @property
    def longest_index(self) -> int:
        """Return the bytes that an index may have: the bound to read with."""
        most = SnapshotIndex.max_nbytes(self.least)
        return most + HASH_NBYTES * (_room() // CHUNK_NBYTES) if self._senders.names else most

    def of(self, meta: dict[str, Any], head: Head) -> Layout:  # Any: a JSON document
        """Return the layout of a snapshot with this document. Raises PayloadError."""
        if not self._senders.names:
            return self.least
        told = meta.get(SENT)
        if not isinstance(told, list) or len(told) != len(self._senders.sizes):
            raise PayloadError("snapshot that does not say, by fragment, of whom something is kept; use another donor")
        names, sizes = self._senders.names, self._senders.sizes
        entries = [
            (sender_name(f, peer, name), sizes[f])
            for f, digits in enumerate(told)
            for peer in _peers_of(digits, head.members)
            for name in names
        ]
        layout = Layout(tuple(sorted([*self.least.entries, *entries])))
        if layout.nbytes > _room():
            raise PayloadError(
                f"snapshot of {layout.nbytes / 1e9:.1f} GB, for it keeps what up to {len(head.members)} members sent; "
                f"this machine cannot hold {_COPIES} copies: use another donor, or a machine with more memory"
            )
        return layout

    def document(self, members: Sequence[PeerId]) -> dict[str, Any]:  # Any: a JSON document
        """Write what a donor's index says of senders."""
        if not self._senders.names:
            return {}
        fragments = range(len(self._senders.sizes))
        bits = [sum(1 << i for i, peer in enumerate(members) if self._senders.of(f, peer)) for f in fragments]
        return {SENT: [f"{number:x}" for number in bits]}


def _room() -> int:
    return int(psutil.virtual_memory().total) // _COPIES


def _peers_of(digits: object, members: Sequence[PeerId]) -> list[PeerId]:
    """Return the members whose bits are set, in one spelling only. Raises PayloadError."""
    known = isinstance(digits, str) and 0 < len(digits) <= len(members) and set(digits) <= set("0123456789abcdef")
    number = int(str(digits), 16) if known else -1
    if number < 0 or number >> len(members) or f"{number:x}" != digits:
        raise PayloadError("snapshot that keeps something of peers that are no members; use another donor")
    return [peer for i, peer in enumerate(members) if number >> i & 1]
