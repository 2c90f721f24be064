"""Who is here: every peer tells every other, or who tells that one, so nobody depends on one that keeps the list.

Crosses the wire: one lease (about 400 bytes) to each live peer per third of its life, and at most every sixth
when it changed; beyond 21 peers to the row of ``circles``, and that row's leases to the column; the leases of all,
asked from one peer in turn per third. Per peer and second that is about N * 4 kB / ttl, both ways: 0.2 MB/s for 1,024
peers and 20 s.

Finding nobody is a state (``looking``), never an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import anyio
import anyio.abc

from decentral.errors import PayloadError, TransportError
from decentral.flow.changes import Changes
from decentral.swarm.bootstrap import Bootstrap
from decentral.swarm.circles import circles
from decentral.swarm.contacts import Contacts
from decentral.swarm.dht.hivemind import share
from decentral.swarm.invite import MAX_ADDRESSES
from decentral.swarm.leases import (
    MAX_LEASE_NBYTES,
    MAX_LEASES_NBYTES,
    MAX_LIST_NBYTES,
    LeaseTable,
    packed,
    read_lease,
    read_leases,
    write_leases,
)
from decentral.swarm.own_lease import OwnLease
from decentral.transport import Transport
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Digest, PeerId, Signer, peer_name
from decentral.wire.lease import PRIVATE, Lease
from decentral.wire.messages import MAX_PEERS, Goodbye, decode, encode

LEASE = "/decentral/lease/1"
LEASES = "/decentral/leases/1"  # a lease, for all that the other knows
LEASE_LIST = "/decentral/lease-list/1"  # one's own, and those of a row
_RECALLED = 4  # silent peers tried again per renewal
_OTHER_WAYS = 3  # peers beside this one that an invite leads to
_PARTING = 3.0  # s that saying goodbye may take

logger = logging.getLogger("decentral.swarm")


class Directory:
    """The live peers of one run, as this peer knows them. ``run`` it in a task while the transport is entered."""

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        run: Digest,
        ttl: float,
        *,
        capacity: int = MAX_PEERS,
        dht: bool = True,
    ) -> None:
        self.transport, self.signer, self.run_digest, self.ttl = transport, signer, run, ttl
        self._table = LeaseTable(signer.peer, run, ttl, capacity)
        self._own = OwnLease(signer, run, ttl, transport.addresses)
        self._contacts = Contacts()
        self._bootstrap = Bootstrap(signer.peer, self._contacts, self._visit, self._is_live, ttl / 3)
        self._dht = dht  # look in hivemind's DHT, too, where the transport has one
        self._turn, self._patience = 0, min(10.0, max(1.0, ttl / 3))
        self._left = False
        self.answered_in: dict[PeerId, float] = {}  # s that the last renewal took, there and back
        self._changed = Changes()
        serve_requests(transport, LEASE, self._on_lease, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASES, self._on_leases, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASE_LIST, self._on_list, limit=MAX_LIST_NBYTES)

    @property
    def peer(self) -> PeerId:
        """This peer; it is not in ``live``."""
        return self.signer.peer

    @property
    def looking(self) -> bool:
        """Whether nobody else is here."""
        return not self.live()

    @property
    def state(self) -> str:
        """``looking`` while nobody else is here, else ``connected``."""
        return "looking" if self.looking else "connected"

    def live(self) -> Mapping[PeerId, Lease]:
        """The other peers that are here, in the order of their ids, and what each said last."""
        return self._table.live(anyio.current_time())

    def ways_in(self) -> tuple[str, ...]:
        """Addresses for an invite: this peer's, and one of each of a few others, so that it outlives who wrote it.

        Empty while this peer has none.
        """
        own = self.transport.addresses()
        others = self.ways_to_others() if own else ()
        return (*own[: MAX_ADDRESSES - len(others)], *others)

    def ways_to_others(self) -> tuple[str, ...]:
        """One address of each of a few others that can be dialled, here now or lately."""
        known = [lease.addresses[0] for lease in self._table.known() if lease.addresses and not lease.state & PRIVATE]
        return tuple(known[:_OTHER_WAYS])

    def expired_for(self, peer: PeerId) -> float:
        """Seconds since the lease of ``peer`` ended: 0 while it is live, infinity when it was never here."""
        return self._table.silent_for(peer, anyio.current_time())

    def heard(self, peer: PeerId) -> float | None:
        """Seconds since ``peer`` last said that it is here; None: it never did."""
        return self._table.heard(peer, anyio.current_time())

    def said_goodbye(self, peer: PeerId) -> bool:
        """Whether a peer that is not here any more left in good order."""
        return self._table.said_goodbye(peer)

    async def until_changed(self) -> None:
        """Wait until somebody came, went, or said something new."""
        await self._changed.next()

    def update(
        self,
        *,
        epoch: int | None = None,
        round: int | None = None,
        digest: Digest | None = None,
        state: int | None = None,
        uplink: int | None = None,
    ) -> None:
        """Say something new of this peer; ``digest`` is the anchor's, ``uplink`` in bit/s. Others hear it soon."""
        self._own.update({"epoch": epoch, "round": round, "digest": digest, "state": state, "uplink": uplink})

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Dial the peers at these addresses (each ends in ``/p2p/<name>``) in the background, until they answer."""
        self._bootstrap.add(addresses)

    def hint(self, lease: Lease) -> None:
        """Somebody passed on where a peer may be: look whether it is there, unless it is known to be."""
        if lease.run == self.run_digest and lease.peer != self.peer and not self._is_live(lease.peer):
            self._meet(lease)

    def look_for(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Somebody said, without proof, where a peer may be: look there once, unless it is known to be here."""

        if peer != self.peer and not self._is_live(peer):
            self._contacts.spawn("look", peer, partial(self._visit, addresses=addresses))

    def greet(self, peers: Iterable[PeerId]) -> None:
        """Tell those that are not known to be here that this peer is; who hears it answers with its own lease."""
        for peer in peers:
            if peer != self.peer and not self._is_live(peer):
                self._contacts.spawn("greet", peer, self._tell)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Renew, ask, dial and expire until cancelled."""
        async with anyio.create_task_group() as group:
            self._contacts.group = group
            self._bootstrap.start()
            group.start_soon(self._expire_forever)
            host = self.transport.dht_host
            if self._dht and host is not None:
                group.start_soon(share, host, self)
            task_status.started()
            try:
                await self._renew_forever()
            finally:
                self._contacts.group = None

    async def goodbye(self) -> None:
        """Tell everybody that this peer leaves, and renew no more. Takes 3 s at most."""
        self._left = True
        self._contacts.end()
        with anyio.move_on_after(_PARTING):
            async with anyio.create_task_group() as group:
                for peer in self.live():
                    group.start_soon(self._part_from, peer)

    def own(self) -> Lease:
        """What this peer says of itself now, signed."""
        return self._own.sealed()

    def draft(self) -> Lease:
        """The same, not signed."""
        return self._own.draft()

    # ---- telling ----

    async def _renew_forever(self) -> None:
        while True:
            self._own.renew()
            live = list(self.live())
            if not self._left:
                self._ask_around(live)
            await anyio.sleep(self.ttl / 6)
            with anyio.move_on_after(self.ttl / 6):
                await self._own.until_news()

    def _ask_around(self, live: list[PeerId]) -> None:
        self._turn += 1
        if live:
            asked, around = live[self._turn % len(live)], circles(self.peer, live)
            for peer in around.told:
                self._contacts.spawn("tell", peer, self._ask if peer == asked else self._tell)
            for peer in around.passed_to:
                self._contacts.spawn("tell", peer, partial(self._pass_on, row=frozenset(around.row)))
            self._contacts.spawn("ask", asked, self._ask) if asked not in around.told else None
        missed = self._table.missed()
        for n in range(min(_RECALLED, len(missed))):
            self._meet(missed[(_RECALLED * self._turn + n) % len(missed)])

    async def _tell(self, peer: PeerId) -> None:
        """Our lease to one peer; it answers with its own to a newcomer, or with a newer one of ours."""
        began = anyio.current_time()
        answer = await self._request(peer, LEASE, MAX_LEASE_NBYTES)
        self.answered_in[peer] = anyio.current_time() - began
        if answer:
            self._heard_from(peer, read_lease(answer))

    async def _ask(self, peer: PeerId) -> None:
        """Our lease to one peer, for all it knows."""
        for remaining, lease in read_leases(await self._request(peer, LEASES, MAX_LEASES_NBYTES)):
            if lease.peer in (peer, self.peer):
                self._heard_from(peer, lease)
            else:
                self._heard_of(lease, remaining)

    async def _pass_on(self, peer: PeerId, row: frozenset[PeerId]) -> None:
        """Our lease and those of our row to one peer; it answers as to ``_tell``."""
        others = [entry for entry in self._table.entries(anyio.current_time()) if entry[1].peer in row]
        body = write_leases([(self.ttl, self.own()), *others])
        if answer := await self._request(peer, LEASE_LIST, MAX_LEASE_NBYTES, body):
            self._heard_from(peer, read_lease(answer))

    async def _request(self, peer: PeerId, protocol: str, limit: int, body: bytes | None = None) -> bytes:
        body = packed(self.own()) if body is None else body
        return await request(self.transport, peer, protocol, body, limit=limit, timeout=self._patience)

    async def _part_from(self, peer: PeerId) -> None:
        try:
            await notify(self.transport, peer, LEASE, encode(Goodbye()), _PARTING)
        except TransportError as error:
            logger.debug("goodbye: %s", error)

    # ---- hearing ----

    async def _on_lease(self, peer: PeerId, body: bytes) -> bytes:
        message = decode(body)
        if isinstance(message, Goodbye):
            if self._table.goodbye(peer, anyio.current_time()):
                self._changed.tell()
            return b""
        return self._answer(peer, read_lease(body))

    async def _on_list(self, peer: PeerId, body: bytes) -> bytes:
        answer = b""
        for remaining, lease in read_leases(body):
            if lease.peer == peer:
                answer = self._answer(peer, lease)
            elif lease.peer != self.peer:
                self._heard_of(lease, remaining)
        return answer

    def _answer(self, peer: PeerId, lease: Lease) -> bytes:
        """Book a peer's own lease; a newcomer is told ours, one that has said more already what that was."""
        newcomer = not self._is_live(peer)
        newer = self._welcome(peer, lease)
        if newer is not None:
            return packed(newer)
        return packed(self.own()) if newcomer and not self._left else b""

    async def _on_leases(self, peer: PeerId, body: bytes) -> bytes:
        newer = self._welcome(peer, read_lease(body))
        entries = [] if self._left else [(self.ttl, self.own())]
        if newer is not None:
            entries.append((0.0, newer))
        return write_leases(entries + self._table.entries(anyio.current_time()))

    def _welcome(self, peer: PeerId, lease: Lease) -> Lease | None:
        """Book a peer's own lease; returns what is known newer of it.

        A peer that was started anew counts from 1: told what it said last, it goes on above that.
        """
        known = self._table.newest(peer)
        self._heard_from(peer, lease)
        return known if known is not None and known.sequence > lease.sequence else None

    def _heard_from(self, peer: PeerId, lease: Lease) -> None:
        """A lease from its own peer, or our own come back to us."""
        self._table.check(lease)
        if lease.peer == self.peer:
            self._own.came_back(lease)
            return
        if lease.peer != peer:
            raise PayloadError(f"{peer_name(peer)}: sends a lease of {peer_name(lease.peer)} as its own; drop it")
        known = self._table.newest(peer)
        if self._table.take(lease, anyio.current_time()):
            self._changed.tell()
            if known is None or known.addresses != lease.addresses:
                self._contacts.spawn("dial", peer, self._dial)

    def _heard_of(self, lease: Lease, remaining: float) -> None:
        """A lease that another peer passed on."""
        known = self._is_live(lease.peer)
        if self._table.take(lease, anyio.current_time(), remaining):
            self._changed.tell()
            if not known:
                self._meet(lease)

    # ---- dialling ----

    async def _dial(self, peer: PeerId) -> None:
        """Have the transport know where a peer is, though it is connected now."""
        lease = self._table.newest(peer)
        if lease is not None and lease.addresses:
            await self.transport.connect(peer, lease.addresses)

    def _meet(self, lease: Lease) -> None:
        async def meet(peer: PeerId) -> None:
            await self.transport.connect(peer, lease.addresses)
            await self._tell(peer)

        self._contacts.spawn("dial", lease.peer, meet)

    async def _visit(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See whether a peer is there, and ask it for all it knows."""
        await self.transport.connect(peer, addresses)
        await self._ask(peer)

    # ---- forgetting ----

    async def _expire_forever(self) -> None:
        while True:
            if self._table.expire(anyio.current_time()):
                self._changed.tell()
                live = self.live()
                self.answered_in = {peer: took for peer, took in self.answered_in.items() if peer in live}
            with anyio.CancelScope(deadline=self._table.next_end()):
                await self._changed.next()

    def _is_live(self, peer: PeerId) -> bool:
        return self._table.is_live(peer, anyio.current_time())
