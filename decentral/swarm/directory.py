"""The directory of the peers that are here: every peer tells every other, or one that tells it on, so that nobody
depends on one that keeps the list.

Crosses the wire: one lease (about 400 bytes) to each live peer per third of its life, and at most every sixth when it
changed; beyond 21 peers to the row of ``circles``, and that row's leases to the column; the leases of all, asked from
one peer in turn per third. Per peer and second that is about N * 4 kB / ttl, both ways: 0.2 MB/s for 1,024 peers and
20 s.

Finding nobody is a state (``looking``), never an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.abc

from decentral.errors import PayloadError
from decentral.flow.waiting import Repeats
from decentral.swarm.contacts import PARTING, Contacts, LeaseMessages
from decentral.swarm.dht import share
from decentral.swarm.invite import MAX_ADDRESSES, Invite
from decentral.swarm.leases import LeaseTable, OwnLease
from decentral.transport import Transport
from decentral.wire.keys import Digest, PeerId, Signer, peer_from_name
from decentral.wire.messages import MAX_ADDRESS, MAX_PEERS, PRIVATE, Lease

logger = logging.getLogger("decentral.swarm")


_GREET_AGAIN, _GREET_AT_LAST = 1.0, 8.0  # s until one that is missing is greeted again, and at most
_RECALLED = 4  # silent peers tried again per renewal
_NOBODY = bytes(32)  # stands for whoever put something into the DHT


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
        self.table = LeaseTable(signer.peer, run, ttl, capacity)
        self.own = OwnLease(signer, run, ttl, transport.addresses)
        self._contacts = Contacts()
        self._messages = LeaseMessages(transport, self.table, self.own, self._contacts)
        self._bootstrap = Bootstrap(
            signer.peer, self._contacts, self._messages.visit, self._messages.is_live, lambda: self.looking, ttl / 3
        )
        self._dht = dht  # look in hivemind's DHT, too, where the transport has one
        self._turn = 0
        self._greeted: frozenset[PeerId] = frozenset()  # who was missing at the last greeting
        # Where a tenth of 260 was away, three of five messages were greetings to them.
        self._greetings = Repeats(_GREET_AGAIN, _GREET_AT_LAST)

    @property
    def peer(self) -> PeerId:
        """This peer; it is not in ``live``."""
        return self.signer.peer

    @property
    def looking(self) -> bool:
        """Tell whether nobody else is here."""
        return not self.live()

    def live(self) -> Mapping[PeerId, Lease]:
        """Return the other peers that are here, in the order of their ids, and what each said last."""
        return self.table.live(anyio.current_time())

    def parts(self) -> Mapping[PeerId, range]:
        """Return the fragments of those that do not train all of them; this peer may be one."""
        every = (self.own.draft(), *self.live().values())
        return {lease.peer: lease.part for lease in every if lease.part is not None}

    def sharing(self) -> list[PeerId]:
        """Return those that look for others to share a replica with; this peer may be one."""
        return [lease.peer for lease in (self.own.draft(), *self.live().values()) if lease.looks]

    def prefer(self, members: Container[PeerId]) -> None:
        """Know ``members``, which may change, by anybody's word; of others it takes a connection."""
        self.table.members = members

    def has_answered(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` is here by its lease, and has shown so itself at the other end of a connection."""
        return self.table.has_answered(peer, anyio.current_time())

    @property
    def answer_seconds(self) -> Mapping[PeerId, float]:
        """Seconds that each one's answer to our last renewal took, there and back."""
        return self._messages.answer_seconds

    def heard(self, peer: PeerId) -> float | None:
        """Return the seconds since ``peer`` last said that it is here; None: it never did."""
        return self.table.heard(peer, anyio.current_time())

    def left_politely(self, peer: PeerId) -> bool:
        """Tell whether a peer that is not here any more left in good order."""
        return self.table.left_politely(peer)

    async def until_changed(self) -> None:
        """Wait until somebody came, went, or said something new."""
        await self._messages.changed.next()

    def add_bootstrap(self, addresses: Iterable[str]) -> None:
        """Dial the peers at these addresses (each ends in ``/p2p/<name>``) in the background, until they answer."""
        self._bootstrap.add(addresses)

    def hint(self, lease: Lease) -> None:
        """Look at an address that somebody passed on: whether it is there, unless it is known to be."""
        if lease.run != self.run_digest or lease.peer == self.peer or self._messages.is_live(lease.peer):
            return
        if self.table.is_stranger(lease.peer):
            self._messages.look_for(_NOBODY, lease, self.ttl)
        else:
            self._messages.meet(lease)

    def look_for(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Look once where somebody said, without proof, that a peer may be, unless it is known to be here."""
        if peer != self.peer and not self._messages.is_live(peer):
            self._contacts.spawn("look", peer, partial(self._messages.visit, addresses=addresses))

    def greet(self, peers: Iterable[PeerId]) -> None:
        """Tell those that are not known to be here that this peer is, the more rarely the longer they are missing; who
        hears it answers with its own lease.

        Where they are may be known to those who are here, whose word about them did not count before: one is asked.
        """
        missing = [peer for peer in peers if peer != self.peer and not self._messages.is_live(peer)]
        for peer in self._greetings.due("here", missing, anyio.current_time()):
            self._contacts.spawn("greet", peer, self._messages.tell)
        if not self._greeted.issuperset(missing) and (live := list(self.live())):
            self._contacts.spawn("ask", live[self._turn % len(live)], self._messages.ask)
        self._greeted = frozenset(missing)

    def ask_for_lease(self, peer: PeerId) -> None:
        """Have a peer that spoke to this one say by its lease that it is here."""
        self._contacts.spawn("ask", peer, self._messages.ask_for_lease)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Renew, ask, dial and expire until cancelled. Raises ConfigError when another process has this key, too."""
        async with anyio.create_task_group() as group:
            self._contacts.group = group
            self._bootstrap.start()
            group.start_soon(self._expire_forever)
            group.start_soon(self.own.until_doubled)
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
        self._messages.left = True
        self._contacts.end()
        with anyio.move_on_after(PARTING):
            async with anyio.create_task_group() as group:
                for peer in self.live():
                    group.start_soon(self._messages.part_from, peer)

    # ---- telling ----

    async def _renew_forever(self) -> None:
        while True:
            self.own.renew()
            live = list(self.live())
            if not self._messages.left:
                self._ask_around(live)
            await anyio.sleep(self.ttl / 6)
            with anyio.move_on_after(self.ttl / 6):
                await self.own.until_news()

    def _ask_around(self, live: list[PeerId]) -> None:
        self._turn += 1
        messages = self._messages
        if live:
            asked, around = live[self._turn % len(live)], circles(self.peer, live)
            for peer in around.told:
                self._contacts.spawn("tell", peer, messages.ask if peer == asked else messages.tell)
            for peer in around.passed_to:
                self._contacts.spawn("tell", peer, partial(messages.pass_on, row=frozenset(around.row)))
            self._contacts.spawn("ask", asked, messages.ask) if asked not in around.told else None
        missed = self.table.last_words()
        for n in range(min(_RECALLED, len(missed))):
            messages.meet(missed[(_RECALLED * self._turn + n) % len(missed)])

    # ---- forgetting ----

    async def _expire_forever(self) -> None:
        while True:
            if self.table.expire(anyio.current_time()):
                self._messages.changed.tell()
                live = self.live()
                answered = self._messages.answer_seconds
                self._messages.answer_seconds = {peer: took for peer, took in answered.items() if peer in live}
            with anyio.CancelScope(deadline=self.table.next_end()):
                await self._messages.changed.next()


# ---- addresses by which the run is found ----

_OTHER_WAYS = 3  # peers beside this one that an invite leads to
_KEPT, _KEPT_EACH = 8, 4  # peers that a restart begins with, and addresses of each


def ways_in(directory: Directory) -> tuple[str, ...]:
    """Return addresses for an invite: this peer's, and one of each of a few others, so that it outlives who wrote it.

    None while this peer has none.
    """
    own = directory.transport.addresses()
    others = ways_to_others(directory) if own else ()
    return (*own[: MAX_ADDRESSES - len(others)], *others)


def invite_line(directory: Directory, run: Digest, token: str | None) -> str:
    """Return the line that lets others join ``run`` by way of this peer; empty while nobody could reach it."""
    addresses = ways_in(directory)
    return str(Invite(run, addresses, token)) if addresses else ""


def ways_to_others(directory: Directory) -> tuple[str, ...]:
    """Return one address of each of a few others that can be dialled, here now or lately."""
    leases = directory.table.known()
    known = [lease.addresses[0] for lease in leases if lease.addresses and not lease.state & PRIVATE]
    return tuple(known[:_OTHER_WAYS])


def ways_back(directory: Directory) -> tuple[str, ...]:
    """Return addresses by which a restart finds the run again: of a few others, the longest here first.

    Also of who said goodbye, for it may be restarted, too, and of private ones, for nobody else may be there.
    """
    known = [lease.addresses[:_KEPT_EACH] for lease in directory.table.lately() if lease.addresses]
    return tuple(address for addresses in known[:_KEPT] for address in addresses)


# ---- whom a peer tells ----
#
# Everybody in a small swarm, its row and its column in a large one.
#
# The peers, in the order of their ids, stand in rows of equal length, or one longer: about the square root of their
# number. A peer tells its row of itself, and its column of its row: so all hear of all by way of one other at most, in
# 2 to 3 ``sqrt(N)`` messages per renewal instead of N. What is passed on is as old as a renewal, a third of a lease at
# most, and signed by whom it is of; who passes nothing on is made up for by the list that each peer asks another for.

DIRECT = 20  # others that are told one by one: where the DHT begins, too


@dataclass(frozen=True, slots=True)
class Circles:
    """The others, each once."""

    told: Sequence[PeerId]  # hear of this peer alone
    passed_to: Sequence[PeerId] = ()  # hear of it and of its row
    row: Sequence[PeerId] = ()  # of whom those hear


def circles(me: PeerId, others: Sequence[PeerId]) -> Circles:
    """Return where peer ``me`` stands among ``others``, which are in the order of their ids."""
    if len(others) <= DIRECT:
        return Circles(others)
    peers = sorted((me, *others))
    num_rows = math.isqrt(len(peers))
    short, num_long = divmod(len(peers), num_rows)
    rows, start = [], 0
    for number in range(num_rows):
        stop = start + short + (number < num_long)
        rows.append(peers[start:stop])
        start = stop
    own = next(row for row in rows if row[-1] >= me)
    place = own.index(me)
    column = [row[place] for row in rows if place < len(row) and row is not own]
    nobody_passes_on = [row[short] for row in rows if len(row) > short] if len(own) == short else []
    told = [peer for peer in (*own, *nobody_passes_on) if peer != me]
    return Circles(told, column, [peer for peer in own if peer != me])


# ---- peers known beforehand ----
#
# Each peer that this one was told of is tried until it answers, for ever, as it may come up tomorrow. The pauses grow
# to half a minute; in the first minute of being alone to a second, because machines that are restarted together do not
# listen at the same moment, and a doubled pause is as long as the time that one of them was late.

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 30.0  # s between attempts to reach one
_EAGER_PAUSE, _EAGER_FOR = 1.0, 60.0  # s between them while nobody is here, and for how long: some 60 attempts
_BOOTSTRAPS = 64

Visit = Callable[[PeerId, tuple[str, ...]], Awaitable[None]]


class Bootstrap:
    """The peers that ``me`` was told of. ``visit`` dials one and asks it; one that ``is_live`` is left alone for
    ``rest`` s. ``is_alone``: whether nobody at all is here.
    """

    def __init__(
        self,
        me: PeerId,
        contacts: Contacts,
        visit: Visit,
        is_live: Callable[[PeerId], bool],
        is_alone: Callable[[], bool],
        rest: float,
    ) -> None:
        self._me, self._contacts, self._visit = me, contacts, visit
        self._is_live, self._is_alone, self._rest = is_live, is_alone, rest
        self._known: dict[PeerId, tuple[str, ...]] = {}
        self._pace = 0.8 + 0.4 * me[-1] / 255  # of its own: many that wait for one peer do not dial it in step

    def add(self, addresses: Iterable[str]) -> None:
        """Try the peers at these addresses, too; of a peer that is known, these count from now on."""
        for peer, theirs in _by_peer(addresses).items():
            if peer == self._me or len(self._known) >= _BOOTSTRAPS:
                continue
            fresh = peer not in self._known
            self._known[peer] = theirs
            if fresh:
                self._begin(peer)

    def start(self) -> None:
        """Begin with those that are known, in the group of the contacts."""
        for peer in self._known:
            self._begin(peer)

    def _begin(self, peer: PeerId) -> None:
        if self._contacts.group is not None:
            self._contacts.group.start_soon(self._court, peer)

    async def _court(self, peer: PeerId) -> None:
        pause, since = _FIRST_PAUSE, anyio.current_time()
        while True:
            if self._is_live(peer):
                await anyio.sleep(self._rest)
                pause, since = _FIRST_PAUSE, anyio.current_time()
                continue
            await self._contacts.make(peer, self._try)
            if not self._is_live(peer):
                await anyio.sleep(pause * self._pace)
                eager = self._is_alone() and anyio.current_time() - since < _EAGER_FOR
                pause = min(2 * pause, _EAGER_PAUSE if eager else _LONGEST_PAUSE)

    async def _try(self, peer: PeerId) -> None:
        await self._visit(peer, self._known[peer])


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
