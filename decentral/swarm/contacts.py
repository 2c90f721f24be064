"""Contacts with other peers in the background, and the leases that are told, asked for and passed on in them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.abc

from decentral.errors import PayloadError, TransportError
from decentral.flow.budget import Allowances
from decentral.flow.waiting import Changes
from decentral.swarm.leases import (
    MAX_LEASE_NBYTES,
    MAX_LEASES_NBYTES,
    MAX_LIST_NBYTES,
    LeaseTable,
    OwnLease,
    check_run,
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

    def spawn(self, kind: str, peer: PeerId, contact: Contact) -> bool:
        """Contact a peer in the background; False, and it is not done, while a contact of that kind is under way."""

        async def work() -> None:
            try:
                await self.make(peer, contact)
            finally:
                self._busy.discard((kind, peer))

        if self.group is None or (kind, peer) in self._busy:
            return False
        self._busy.add((kind, peer))
        self.group.start_soon(work)
        return True

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


# ---- dials that others cause ----
#
# Whoever passes a lease on has its addresses dialled. Of members and of those that a connection has shown to be there
# that is what leases are for; of anybody else it is a word, and 28 kB of made-up leases had 256 ports dialled. So a
# word about a stranger is tried at few addresses, few at a time, and few in a minute, of each who says it and of all
# together. Nobody's way in needs more: who comes says so itself, and is a member soon.

NAMED = 8  # strangers of one source that are looked for at a time
DIALS = 8  # addresses that one source has dialled in a minute
ALL_DIALS = 64  # the same of all sources together: keys cost nothing
_TRIED = 2  # addresses of a stranger, the first it names, and the last: a relay's stands there
_MINUTE = 60.0  # s
_ALL = b""


class Dials:
    """How many addresses may be dialled on whose word. Pure: the time comes in."""

    def __init__(self) -> None:
        self._of_one = Allowances(DIALS, DIALS / _MINUTE)
        self._of_all = Allowances(ALL_DIALS, ALL_DIALS / _MINUTE)
        self._looked_for: dict[PeerId, PeerId] = {}  # strangers, and who named them

    def allow(self, source: PeerId, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """Give those of ``addresses`` that may be dialled now because ``source`` says so, the first ones first."""
        chosen = tuple(addresses[: int(self._of_one.left(source, now))])
        self._of_one.spend(source, len(chosen), now)
        return chosen

    def begin(self, source: PeerId, stranger: PeerId, addresses: Sequence[str], now: float) -> tuple[str, ...]:
        """Return where to look for a stranger that ``source`` names; nowhere if it is looked for, or they are many."""
        named = sum(by == source for by in self._looked_for.values())
        if stranger in self._looked_for or named >= NAMED:
            return ()
        few = addresses if len(addresses) <= _TRIED else (*addresses[: _TRIED - 1], addresses[-1])
        chosen = self.allow(source, few[: int(self._of_all.left(_ALL, now))], now)
        self._of_all.spend(_ALL, len(chosen), now)
        if chosen:
            self._looked_for[stranger] = source
        return chosen

    def end(self, stranger: PeerId) -> None:
        """Forget a stranger that was found, or was not there."""
        self._looked_for.pop(stranger, None)


# ---- leases on the wire ----
#
# A lease is about 400 bytes. Whatever comes is signed by whom it is of; what another peer passes on counts less than a
# peer's own word (``LeaseTable``).

LEASE = "/decentral/lease/1"
LEASES = "/decentral/leases/1"  # a lease, for all that the other knows
LEASE_LIST = "/decentral/lease-list/1"  # one's own, and those of a row
PARTING = 3.0  # s that saying goodbye may take


class LeaseMessages:
    """The leases that one peer sends and gets: they are booked in ``table``, and has others dialled by ``contacts``."""

    def __init__(self, transport: Transport, table: LeaseTable, own: OwnLease, contacts: Contacts) -> None:
        self.transport, self.table, self.own, self.contacts = transport, table, own, contacts
        self.left = False  # said goodbye: nobody is told any more that this peer is here
        self.changed = Changes()  # somebody came, went, or said something new
        self.answer_seconds: dict[PeerId, float] = {}  # s that the last renewal took, there and back
        self.dials = Dials()
        self._patience = min(10.0, max(1.0, table.ttl / 3))
        serve_requests(transport, LEASE, self._on_lease, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASES, self._on_leases, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASE_LIST, self._on_list, limit=MAX_LIST_NBYTES)

    # ---- telling ----

    async def tell(self, peer: PeerId) -> None:
        """Send our lease to one peer; it answers with its own to a newcomer, or with a newer one of ours."""
        began = anyio.current_time()
        answer = await self._request(peer, LEASE, MAX_LEASE_NBYTES)
        self.answer_seconds[peer] = anyio.current_time() - began
        if answer:
            self.heard_from(peer, read_lease(answer))

    async def ask(self, peer: PeerId) -> None:
        """Send our lease to one peer, for all it knows."""
        for remaining, lease in read_leases(await self._request(peer, LEASES, MAX_LEASES_NBYTES)):
            if lease.peer in (peer, self.table.me):
                self.heard_from(peer, lease)
            else:
                self._heard_of(peer, lease, remaining)

    async def pass_on(self, peer: PeerId, row: frozenset[PeerId]) -> None:
        """Send our lease and those of our row to one peer; it answers as to ``tell``."""
        others = [entry for entry in self.table.entries(anyio.current_time()) if entry[1].peer in row]
        body = write_leases([(self.table.ttl, self.own.seal()), *others])
        if answer := await self._request(peer, LEASE_LIST, MAX_LEASE_NBYTES, body):
            self.heard_from(peer, read_lease(answer))

    async def part_from(self, peer: PeerId) -> None:
        """Tell one peer that this one leaves."""
        try:
            await notify(self.transport, peer, LEASE, encode(Goodbye()), PARTING)
        except TransportError as error:
            logger.debug("goodbye: %s", error)

    async def visit(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Look whether a peer is there, and ask it for all it knows."""
        await self.transport.connect(peer, addresses)
        await self.ask(peer)

    def meet(self, lease: Lease) -> None:
        """Look in the background whether a peer that is no stranger is where its lease says."""
        addresses: Sequence[str] = lease.addresses
        if self.table.is_outsider(lease.peer):
            addresses = self.dials.allow(lease.peer, addresses, anyio.current_time())
        if addresses or not lease.addresses:
            self.contacts.spawn("dial", lease.peer, partial(self._meet_at, addresses=addresses))

    def look_for(self, source: PeerId, lease: Lease, remaining: float) -> None:
        """``source`` names a stranger: see at few of its addresses whether it is there, and book it if it is."""
        began, stranger = anyio.current_time(), lease.peer
        addresses = self.dials.begin(source, stranger, lease.addresses, began)

        async def look(peer: PeerId) -> None:
            try:
                await self._meet_at(peer, addresses)
                now = anyio.current_time()
                if self.table.take(lease, now, remaining - (now - began), answered=True):
                    self.changed.tell()
            finally:
                self.dials.end(stranger)

        if addresses and not self.contacts.spawn("dial", stranger, look):
            self.dials.end(stranger)

    async def ask_for_lease(self, peer: PeerId) -> None:
        """Send our lease to one peer, for its own; what it says of others is not read."""
        for _, lease in read_leases(await self._request(peer, LEASES, MAX_LIST_NBYTES)):
            if lease.peer in (peer, self.table.me):
                self.heard_from(peer, lease)

    async def _meet_at(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self.transport.connect(peer, addresses)
        await self.tell(peer)

    def is_live(self, peer: PeerId) -> bool:
        """Tell whether a peer is known to be here."""
        return self.table.is_live(peer, anyio.current_time())

    async def _request(self, peer: PeerId, protocol: str, limit: int, body: bytes | None = None) -> bytes:
        body = lease_bytes(self.own.seal()) if body is None else body
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
                self._heard_of(peer, lease, remaining)
        return answer

    def _answer(self, peer: PeerId, lease: Lease) -> bytes:
        """Book a peer's own lease; a newcomer is told ours, one that has said more already what that was."""
        newcomer = not self.is_live(peer)
        newer = self._welcome(peer, lease)
        if newer is not None:
            return lease_bytes(newer)
        return lease_bytes(self.own.seal()) if newcomer and not self.left else b""

    async def _on_leases(self, peer: PeerId, body: bytes) -> bytes:
        newer = self._welcome(peer, read_lease(body))
        entries = [] if self.left else [(self.table.ttl, self.own.seal())]
        if newer is not None:
            entries.append((0.0, newer))
        return write_leases(entries + self.table.entries(anyio.current_time()))

    def _welcome(self, peer: PeerId, lease: Lease) -> Lease | None:
        """Book a peer's own lease; returns what is known newer of it, or as new with other addresses.

        A peer that was started anew counts from 1: told what it said last, it goes on above that. Of two processes with
        one key each is told what the other said (``OwnLease.hear_own``).
        """
        known = self.table.newest(peer)
        self.heard_from(peer, lease)
        if known is None:
            return None
        differs = known.sequence == lease.sequence and known.addresses != lease.addresses
        return known if differs or known.sequence > lease.sequence else None

    def heard_from(self, peer: PeerId, lease: Lease) -> None:
        """Book a lease from its own peer, or our own that comes back to us."""
        check_run(lease, self.table.run)
        if lease.peer == self.table.me:
            self.own.hear_own(lease)
            return
        if lease.peer != peer:
            raise PayloadError(f"{peer_name(peer)}: sends a lease of {peer_name(lease.peer)} as its own; drop it")
        known = self.table.newest(peer)
        if self.table.take(lease, anyio.current_time()):
            self.changed.tell()
            if known is None or known.addresses != lease.addresses:
                self.contacts.spawn("dial", peer, self._dial)

    def _heard_of(self, source: PeerId, lease: Lease, remaining: float) -> None:
        """Book a lease that ``source`` passed on."""
        known = self.is_live(lease.peer)
        if self.table.is_stranger(lease.peer):
            check_run(lease, self.table.run)
            self.look_for(source, lease, remaining)
        elif self.table.take(lease, anyio.current_time(), remaining):
            self.changed.tell()
            if not known:
                self.meet(lease)

    async def _dial(self, peer: PeerId) -> None:
        """Have the transport know where a peer is, though it is connected now."""
        lease = self.table.newest(peer)
        addresses: Sequence[str] = () if lease is None else lease.addresses
        if self.table.is_outsider(peer):
            addresses = self.dials.allow(peer, addresses, anyio.current_time())
        if addresses:
            await self.transport.connect(peer, addresses)
