"""What a peer gives to those that missed something: its commits after a place, and snapshots of its newest one.

Crosses the wire: a chain request is up to ``LOCATOR`` places of 40 bytes, its answer the round of the newest one known
here and commits with their lengths; an index request is empty, a state request names a chunk, and since version 2 the
forms in which it may come (`state/chunk_form`). Snapshots are immutable copies, so donors never wait.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import anyio

from decentral.consensus.chain import LOCATOR
from decentral.errors import PayloadError, TransportError
from decentral.rounds.catchup.layouts import Layouts
from decentral.rounds.local_state import LocalState
from decentral.state.chunk_form import to_form
from decentral.state.snapshot import Snapshot
from decentral.transport import Transport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId
from decentral.wire.messages import encode

CHAIN = "/decentral/chain/1"
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
        serve_requests(transport, INDEX, self._on_index, limit=0)
        serve_requests(transport, STATE, self._on_state, limit=CHUNK.size)
        serve_requests(transport, PACKED, self._on_packed, limit=ANY_FORM.size)

    @property
    def snapshots(self) -> tuple[bytes, ...]:
        """Those that are here, by their digests."""
        return tuple(self._snapshots)

    def _refuse_until_in_step(self) -> None:
        """A peer that is still joining has no chain to show: two newcomers must not make one of their own."""
        if not self.state.running:
            raise TransportError("still joining: ask a peer that is in step")

    async def _on_chain(self, peer: PeerId, data: bytes) -> bytes:
        """The newest of the asker's places that our chain went through, and our commits after it, oldest first.

        Empty when its branch is not known here; without commits when they are too long ago to be kept.
        """
        self._refuse_until_in_step()
        if not data or len(data) % WHERE.size:
            raise PayloadError(f"chain request of {len(data)} bytes, want {WHERE.size} per place; drop it")
        machine = self.state.machine
        shared = machine.state.history.newest_of(WHERE.iter_unpack(data))
        if shared is None:
            return b""
        answer = SHARED.pack(shared.round)
        for number in range(shared.round + 1, machine.head.round + 1):
            if number not in machine.state.recent:
                break
            body = encode(machine.state.recent[number])
            if len(answer) + len(body) + LENGTH.size > CHAIN_LIMIT:
                break
            answer += LENGTH.pack(len(body)) + body
        return answer

    async def _on_index(self, peer: PeerId, data: bytes) -> bytes:
        self._refuse_until_in_step()
        index = (await self._snapshot()).index
        self._asked_at[index.digest] = anyio.current_time()
        return index.to_bytes()

    async def _on_state(self, peer: PeerId, data: bytes) -> bytes:
        return await self._chunk(*_asked(CHUNK, data))

    async def _on_packed(self, peer: PeerId, data: bytes) -> bytes:
        name, number, forms = _asked(ANY_FORM, data)
        chunk = await self._chunk(name, number)
        return to_form(chunk, forms) if chunk else b""

    async def _chunk(self, name: bytes, number: int) -> bytes:
        """Empty when that snapshot is not here any more."""
        self._refuse_until_in_step()
        if name in self._snapshots:
            self._snapshots.move_to_end(name)  # whoever is fetching keeps it alive
            self._asked_at[name] = anyio.current_time()
        found = self._snapshots.get(name)
        if found is None and not any(s.index.digest == name for s in self._snapshots.values()):
            found = await self._snapshot()  # equal commits give equal snapshots
        return found.chunk(number) if found is not None and found.index.digest == name else b""

    async def _snapshot(self) -> Snapshot:
        """The snapshot of the newest commit, made once per commit. Tensors are never written to, so no copy races."""
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


def _asked(fields: struct.Struct, data: bytes) -> tuple[Any, ...]:  # Any: what a struct holds
    """The fields of a question. Raises PayloadError."""
    if len(data) != fields.size:
        raise PayloadError(f"chunk request of {len(data)} bytes, want {fields.size}; drop it")
    return fields.unpack(data)
