"""Contacts with other peers in the background, and the leases that are told, asked for and passed on in them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio
import anyio.abc

from decentral.errors import PayloadError, TransportError
from decentral.flow.waiting import Changes
from decentral.swarm.leases import (
    MAX_LEASE_NBYTES,
    MAX_LEASES_NBYTES,
    MAX_LIST_NBYTES,
    LeaseTable,
    OwnLease,
    lease_bytes,
    read_lease,
    read_leases,
    write_leases,
)
from decentral.transport import Transport
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Goodbye, Lease, decode, encode

logger = logging.getLogger("decentral.swarm")


# ---- contacts in the background ----
#
# Of each kind of contact there is one with a peer at a time, and few with all peers together. A contact that fails is
# no error: the peer is tried again when its turn comes.

_AT_ONCE = 32  # peers contacted at the same time

Contact = Callable[[PeerId], Awaitable[None]]


class Contacts:
    """The contacts of one directory."""

    def __init__(self) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that they run in; None: none are begun
        self._ended = False
        self._busy: set[tuple[str, PeerId]] = set()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)

    def end(self) -> None:
        """Make no new ones from now on."""
        self._ended = True

    def spawn(self, kind: str, peer: PeerId, contact: Contact) -> None:
        """Contact a peer in the background, unless a contact of that kind is under way."""

        async def work() -> None:
            try:
                await self.make(peer, contact)
            finally:
                self._busy.discard((kind, peer))

        if self.group is not None and (kind, peer) not in self._busy:
            self._busy.add((kind, peer))
            self.group.start_soon(work)

    async def make(self, peer: PeerId, contact: Contact) -> None:
        """Contact a peer when it is its turn; returns also when that failed."""
        try:
            async with self._limiter:
                if not self._ended:
                    await contact(peer)
        except (TransportError, PayloadError) as error:
            logger.debug("%s", error)
        except Exception:  # of what a peer answered, say: as in every handler, it must not end this one
            logger.exception("a contact with %s failed, and this is a bug: please report it", peer_name(peer))


# ---- leases on the wire ----
#
# A lease is about 400 bytes. Whatever comes is signed by whom it is of; what another peer passes on counts less than a
# peer's own word (``LeaseTable``).

LEASE = "/decentral/lease/1"
LEASES = "/decentral/leases/1"  # a lease, for all that the other knows
LEASE_LIST = "/decentral/lease-list/1"  # one's own, and those of a row
PARTING = 3.0  # s that saying goodbye may take


class LeaseMessages:
    """What one peer says and hears about who is here; books it in ``table``, and has others dialled by ``contacts``."""

    def __init__(self, transport: Transport, table: LeaseTable, own: OwnLease, contacts: Contacts) -> None:
        self.transport, self.table, self.own, self.contacts = transport, table, own, contacts
        self.left = False  # said goodbye: nobody is told any more that this peer is here
        self.changed = Changes()  # somebody came, went, or said something new
        self.answered_in: dict[PeerId, float] = {}  # s that the last renewal took, there and back
        self._patience = min(10.0, max(1.0, table.ttl / 3))
        serve_requests(transport, LEASE, self._on_lease, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASES, self._on_leases, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASE_LIST, self._on_list, limit=MAX_LIST_NBYTES)

    # ---- telling ----

    async def tell(self, peer: PeerId) -> None:
        """Our lease to one peer; it answers with its own to a newcomer, or with a newer one of ours."""
        began = anyio.current_time()
        answer = await self._request(peer, LEASE, MAX_LEASE_NBYTES)
        self.answered_in[peer] = anyio.current_time() - began
        if answer:
            self.heard_from(peer, read_lease(answer))

    async def ask(self, peer: PeerId) -> None:
        """Our lease to one peer, for all it knows."""
        for remaining, lease in read_leases(await self._request(peer, LEASES, MAX_LEASES_NBYTES)):
            if lease.peer in (peer, self.table.me):
                self.heard_from(peer, lease)
            else:
                self._heard_of(lease, remaining)

    async def pass_on(self, peer: PeerId, row: frozenset[PeerId]) -> None:
        """Our lease and those of our row to one peer; it answers as to ``tell``."""
        others = [entry for entry in self.table.entries(anyio.current_time()) if entry[1].peer in row]
        body = write_leases([(self.table.ttl, self.own.sealed()), *others])
        if answer := await self._request(peer, LEASE_LIST, MAX_LEASE_NBYTES, body):
            self.heard_from(peer, read_lease(answer))

    async def part_from(self, peer: PeerId) -> None:
        """Tell one peer that this one leaves."""
        try:
            await notify(self.transport, peer, LEASE, encode(Goodbye()), PARTING)
        except TransportError as error:
            logger.debug("goodbye: %s", error)

    async def visit(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See whether a peer is there, and ask it for all it knows."""
        await self.transport.connect(peer, addresses)
        await self.ask(peer)

    def meet(self, lease: Lease) -> None:
        """Look in the background whether a peer is where its lease says."""

        async def dial(peer: PeerId) -> None:
            await self.transport.connect(peer, lease.addresses)
            await self.tell(peer)

        self.contacts.spawn("dial", lease.peer, dial)

    def is_live(self, peer: PeerId) -> bool:
        """Whether a peer is known to be here."""
        return self.table.is_live(peer, anyio.current_time())

    async def _request(self, peer: PeerId, protocol: str, limit: int, body: bytes | None = None) -> bytes:
        body = lease_bytes(self.own.sealed()) if body is None else body
        return await request(self.transport, peer, protocol, body, limit=limit, timeout=self._patience)

    # ---- hearing ----

    async def _on_lease(self, peer: PeerId, body: bytes) -> bytes:
        message = decode(body)
        if isinstance(message, Goodbye):
            if self.table.goodbye(peer, anyio.current_time()):
                self.changed.tell()
            return b""
        return self._answer(peer, read_lease(body))

    async def _on_list(self, peer: PeerId, body: bytes) -> bytes:
        answer = b""
        for remaining, lease in read_leases(body):
            if lease.peer == peer:
                answer = self._answer(peer, lease)
            elif lease.peer != self.table.me:
                self._heard_of(lease, remaining)
        return answer

    def _answer(self, peer: PeerId, lease: Lease) -> bytes:
        """Book a peer's own lease; a newcomer is told ours, one that has said more already what that was."""
        newcomer = not self.is_live(peer)
        newer = self._welcome(peer, lease)
        if newer is not None:
            return lease_bytes(newer)
        return lease_bytes(self.own.sealed()) if newcomer and not self.left else b""

    async def _on_leases(self, peer: PeerId, body: bytes) -> bytes:
        newer = self._welcome(peer, read_lease(body))
        entries = [] if self.left else [(self.table.ttl, self.own.sealed())]
        if newer is not None:
            entries.append((0.0, newer))
        return write_leases(entries + self.table.entries(anyio.current_time()))

    def _welcome(self, peer: PeerId, lease: Lease) -> Lease | None:
        """Book a peer's own lease; returns what is known newer of it, or as new with other addresses.

        A peer that was started anew counts from 1: told what it said last, it goes on above that. Of two processes with
        one key each is told what the other said (``OwnLease.came_back``).
        """
        known = self.table.newest(peer)
        self.heard_from(peer, lease)
        if known is None:
            return None
        differs = known.sequence == lease.sequence and known.addresses != lease.addresses
        return known if differs or known.sequence > lease.sequence else None

    def heard_from(self, peer: PeerId, lease: Lease) -> None:
        """A lease from its own peer, or our own come back to us."""
        self.table.check(lease)
        if lease.peer == self.table.me:
            self.own.came_back(lease)
            return
        if lease.peer != peer:
            raise PayloadError(f"{peer_name(peer)}: sends a lease of {peer_name(lease.peer)} as its own; drop it")
        known = self.table.newest(peer)
        if self.table.take(lease, anyio.current_time()):
            self.changed.tell()
            if known is None or known.addresses != lease.addresses:
                self.contacts.spawn("dial", peer, self._dial)

    def _heard_of(self, lease: Lease, remaining: float) -> None:
        """A lease that another peer passed on."""
        known = self.is_live(lease.peer)
        if self.table.take(lease, anyio.current_time(), remaining):
            self.changed.tell()
            if not known:
                self.meet(lease)

    async def _dial(self, peer: PeerId) -> None:
        """Have the transport know where a peer is, though it is connected now."""
        lease = self.table.newest(peer)
        if lease is not None and lease.addresses:
            await self.transport.connect(peer, lease.addresses)
