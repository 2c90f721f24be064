"""Who is here: every peer tells every other directly, so nobody depends on one that keeps the list.

Crosses the wire: one lease (about 400 bytes) to each live peer per third of its life, and at most every sixth
when it changed; the leases of all, asked from one peer in turn per third. Per peer and second that is about
N * 4 kB / ttl, both ways: 0.2 MB/s for 1,024 peers and 20 s.

Finding nobody is a state (``looking``), never an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio
import anyio.abc

from decentral.errors import PayloadError, TransportError
from decentral.swarm.leases import (
    MAX_LEASE_NBYTES,
    MAX_LEASES_NBYTES,
    LeaseTable,
    read_lease,
    read_leases,
    write_leases,
)
from decentral.transport import Transport
from decentral.transport.daemon import DaemonTransport
from decentral.transport.requests import notify, request, serve_requests
from decentral.transport.throttle import bare
from decentral.wire.keys import Digest, PeerId, Signer, peer_from_name, peer_name
from decentral.wire.lease import MAX_ADDRESS, MAX_ADDRESSES, Lease, seal_lease
from decentral.wire.messages import MAX_PEERS, Goodbye, decode, encode

LEASE = "/decentral/lease/1"
LEASES = "/decentral/leases/1"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # s between attempts to reach a bootstrap peer
_AT_ONCE = 32  # peers contacted at the same time
_RECALLED = 4  # silent peers tried again per renewal
_BOOTSTRAPS = 64
_TWIN = 5  # times our own lease comes back newer; a restart explains a few
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
        self._fields: dict[str, Any] = {"epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0}
        self._sequence = 0
        self._dht = dht  # look in hivemind's DHT, too, where the transport has one
        self._version = _installed_version()
        self._bootstrap: dict[PeerId, tuple[str, ...]] = {}
        self._turn = 0
        self._outrun = 0
        self._left = False
        self._busy: set[tuple[str, PeerId]] = set()
        self.answered_in: dict[PeerId, float] = {}  # s that the last renewal took, there and back
        self._changed = anyio.Event()
        self._told = anyio.Event()
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)
        self._group: anyio.abc.TaskGroup | None = None
        serve_requests(transport, LEASE, self._on_lease, limit=MAX_LEASE_NBYTES)
        serve_requests(transport, LEASES, self._on_leases, limit=MAX_LEASE_NBYTES)

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

    def live(self) -> dict[PeerId, Lease]:
        """The other peers that are here, in the order of their ids, and what each said last."""
        return self._table.live(anyio.current_time())

    def expired_for(self, peer: PeerId) -> float:
        """Seconds since the lease of ``peer`` ended: 0 while it is live, infinity when it was never here."""
        return self._table.silent_for(peer, anyio.current_time())

    async def until_changed(self) -> None:
        """Wait until somebody came, went, or said something new."""
        await self._changed.wait()

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
        given = {"epoch": epoch, "round": round, "digest": digest, "state": state, "uplink": uplink}
        news = {name: value for name, value in given.items() if value not in (None, self._fields[name])}
        if news:
            self._fields |= news
            self._told.set()

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Dial the peers at these addresses (each ends in ``/p2p/<name>``) in the background, until they answer."""
        for peer, theirs in _by_peer(addresses).items():
            if peer == self.peer or len(self._bootstrap) >= _BOOTSTRAPS:
                continue
            fresh = peer not in self._bootstrap
            self._bootstrap[peer] = theirs
            if fresh and self._group is not None:
                self._group.start_soon(self._court, peer)

    def hint(self, lease: Lease) -> None:
        """Somebody passed on where a peer may be: look whether it is there, unless it is known to be."""
        if lease.run == self.run_digest and lease.peer != self.peer and lease.peer not in self.live():
            self._meet(lease)

    def look_for(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Somebody said, without proof, where a peer may be: look there once, unless it is known to be here."""

        async def look(peer: PeerId) -> None:
            await self.transport.connect(peer, addresses)
            await self._ask(peer)

        if peer != self.peer and peer not in self.live():
            self._spawn("look", peer, look)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Renew, ask, dial and expire until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            for peer in self._bootstrap:
                group.start_soon(self._court, peer)
            group.start_soon(self._expire_forever)
            daemon = bare(self.transport)
            if self._dht and isinstance(daemon, DaemonTransport):
                from decentral.swarm.dht import share

                group.start_soon(share, daemon, self)
            task_status.started()
            try:
                await self._renew_forever()
            finally:
                self._group = None

    async def goodbye(self) -> None:
        """Tell everybody that this peer leaves, and renew no more. Takes 3 s at most."""
        self._left = True
        with anyio.move_on_after(_PARTING):
            async with anyio.create_task_group() as group:
                for peer in self.live():
                    group.start_soon(self._part_from, peer)

    def own(self) -> Lease:
        """What this peer says of itself now, signed."""
        addresses = [a for a in self.transport.addresses() if len(a) <= MAX_ADDRESS][:MAX_ADDRESSES]
        lease = Lease(
            run=self.run_digest,
            peer=self.peer,
            sequence=self._sequence,
            ttl=math.ceil(self.ttl),
            addresses=tuple(addresses),
            version=self._version,
            **self._fields,  # Any: integers and one digest, by the names of Lease
        )
        return seal_lease(lease, self.signer)

    # ---- telling ----

    async def _renew_forever(self) -> None:
        while True:
            self._sequence += 1
            self._told = anyio.Event()
            live = list(self.live())
            if not self._left:
                self._ask_around(live)
            await anyio.sleep(self.ttl / 6)
            with anyio.move_on_after(self.ttl / 6):
                await self._told.wait()

    def _ask_around(self, live: list[PeerId]) -> None:
        self._turn += 1
        asked = live[self._turn % len(live)] if live else None
        for peer in live:
            self._spawn("tell", peer, self._ask if peer == asked else self._tell)
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

    async def _request(self, peer: PeerId, protocol: str, limit: int) -> bytes:
        body = encode(self.own())
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
                self._notify()
            return b""
        newcomer = peer not in self.live()
        newer = self._welcome(peer, read_lease(body))
        if newer is not None:
            return encode(newer)
        return encode(self.own()) if newcomer and not self._left else b""

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
            self._outrun_by(lease)
            return
        if lease.peer != peer:
            raise PayloadError(f"{peer_name(peer)}: sends a lease of {peer_name(lease.peer)} as its own; drop it")
        known = self._table.newest(peer)
        if self._table.take(lease, anyio.current_time()):
            self._notify()
            if known is None or known.addresses != lease.addresses:
                self._spawn("dial", peer, self._dial)

    def _outrun_by(self, own: Lease) -> None:
        """Our own lease came back newer than we made it: from before a restart, or from another process."""
        if own.sequence <= self._sequence:
            return
        self._sequence = own.sequence
        self._told.set()
        self._outrun += 1
        if self._outrun == _TWIN:
            logger.warning(
                "another process runs with this identity (%s) at %s; end one, or give it a key of its own",
                peer_name(self.peer),
                own.addresses[0] if own.addresses else "an unknown address",
            )

    def _heard_of(self, lease: Lease, remaining: float) -> None:
        """A lease that another peer passed on."""
        known = lease.peer in self.live()
        if self._table.take(lease, anyio.current_time(), remaining):
            self._notify()
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

        self._spawn("dial", lease.peer, meet)

    async def _court(self, peer: PeerId) -> None:
        """Reach a bootstrap peer, for ever: it may come up tomorrow."""
        pause = _FIRST_PAUSE
        while True:
            if peer in self.live():
                pause = _FIRST_PAUSE
                await anyio.sleep(self.ttl / 3)
                continue
            await self._contact(peer, self._visit)
            if peer not in self.live():
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _visit(self, peer: PeerId) -> None:
        await self.transport.connect(peer, self._bootstrap[peer])
        await self._ask(peer)

    def _spawn(self, kind: str, peer: PeerId, contact: Callable[[PeerId], Awaitable[None]]) -> None:
        async def work() -> None:
            try:
                await self._contact(peer, contact)
            finally:
                self._busy.discard((kind, peer))

        if self._group is not None and (kind, peer) not in self._busy:
            self._busy.add((kind, peer))
            self._group.start_soon(work)

    async def _contact(self, peer: PeerId, contact: Callable[[PeerId], Awaitable[None]]) -> None:
        try:
            async with self._limiter:
                if not self._left:
                    await contact(peer)
        except (TransportError, PayloadError) as error:
            logger.debug("%s", error)

    # ---- forgetting ----

    async def _expire_forever(self) -> None:
        while True:
            if self._table.expire(anyio.current_time()):
                self._notify()
                live = self.live()
                self.answered_in = {peer: took for peer, took in self.answered_in.items() if peer in live}
            with anyio.CancelScope(deadline=self._table.next_end()):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def _patience(self) -> float:
        return min(10.0, max(1.0, self.ttl / 3))


def _by_peer(addresses: Iterable[str]) -> dict[PeerId, tuple[str, ...]]:
    found: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        try:
            peer = peer_from_name(address.rpartition("/p2p/")[2])
        except PayloadError as error:
            logger.warning("bootstrap address %s is passed over: %s", ascii(address[:MAX_ADDRESS]), error)
            continue
        found[peer] = (*found.get(peer, ()), address)
    return found


def _installed_version() -> str:
    try:
        return version("decentral")[:32]
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"
