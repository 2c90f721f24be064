"""Leases: what each peer says of itself, and for how long its word counts.

A table knows whose word is newest, how long it still counts here, and who fell silent since when. It is pure: the time
comes in. Only this machine's clock decides, so a peer whose clock is wrong harms nobody.
"""

from __future__ import annotations

import math
import re
import struct
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import anyio

from decentral.errors import ConfigError, PayloadError
from decentral.wire.keys import Digest, PeerId, Signer, peer_name
from decentral.wire.messages import (
    LOOKS,
    MAX_ADDRESS,
    MAX_ADDRESSES,
    MAX_PEERS,
    NO_PART,
    Lease,
    decode,
    encode,
    seal_lease,
)


@dataclass(frozen=True, slots=True)
class Silence:
    """A peer that was here, with the last it said."""

    since: float
    lease: Lease
    said_goodbye: bool


class LeaseTable:
    """At most ``capacity`` live leases of one run, and as many silences.

    A lease counts for ``ttl`` seconds from when it came from its own peer. One that another peer passes on counts
    for as long as it still did there, and only if it is newer than all that is known of its peer: a dead peer's
    lease cannot be kept alive by passing it around.

    Keys cost nothing. So what is passed on counts of those alone that a connection has shown to be there, and of the
    run's ``members``; anybody else is a *stranger*, and a name. For a member an outsider makes room where all is full.
    While ``members`` is None there is no run to go by, and nobody is a stranger.
    """

    def __init__(self, me: PeerId, run: Digest, ttl: float, capacity: int = MAX_PEERS) -> None:
        self.me, self.run, self.ttl, self.capacity = me, run, ttl, capacity
        self.members: Container[PeerId] | None = None
        self._live: dict[PeerId, tuple[float, Lease]] = {}  # when it ends, what was said
        self._shown: dict[PeerId, Lease] | None = None  # who is live, in order; None: somebody came or went
        self._silent: dict[PeerId, Silence] = {}
        self._answered: set[PeerId] = set()  # live or silent, and seen at the other end of a connection
        self._soonest = float("inf")  # no live lease ends before: every tick asks, so that most look at none of them

    def take(self, lease: Lease, now: float, remaining: float | None = None, *, answered: bool | None = None) -> bool:
        """Book a lease; tell whether anything about its peer is new. ``remaining``: passed on, counts that long.

        ``answered``: whether a connection has just shown that the peer is there, as its own word does.
        """
        check_run(lease, self.run)
        known = self.newest(lease.peer)
        least = 0 if known is None else known.sequence + (remaining is not None)
        newer = lease.sequence >= least  # its own peer may say the same again: it is there
        answered = remaining is None if answered is None else answered
        if lease.peer == self.me or not newer or (not answered and self.is_stranger(lease.peer)):
            return False
        if lease.peer not in self._live and not self._has_room(lease.peer):
            return False
        life = min(self.ttl, lease.ttl, self.ttl if remaining is None else remaining)
        self._silent.pop(lease.peer, None)
        appeared = lease.peer not in self._live
        self._live[lease.peer] = (now + life, lease)
        self._soonest = min(self._soonest, now + life)
        if answered:
            self._answered.add(lease.peer)
        if appeared:
            self._shown = None
        elif self._shown is not None and lease.peer in self._shown:
            self._shown[lease.peer] = lease
        return appeared or known is None or _news_in(known) != _news_in(lease)

    def is_stranger(self, peer: PeerId) -> bool:
        """Tell whether a peer is no member, and no connection has shown that it is there."""
        return self.is_outsider(peer) and peer not in self._answered

    def is_outsider(self, peer: PeerId) -> bool:
        """Tell whether there is a run, and a peer is no member of it."""
        return self.members is not None and peer not in self.members

    def has_answered(self, peer: PeerId, now: float) -> bool:
        """Tell whether a peer is here, and a connection has shown it."""
        return peer in self._answered and self.is_live(peer, now)

    def newest(self, peer: PeerId) -> Lease | None:
        """Return the last lease of a peer, be it live or silent."""
        if peer in self._live:
            return self._live[peer][1]
        return self._silent[peer].lease if peer in self._silent else None

    def live(self, now: float) -> Mapping[PeerId, Lease]:
        """Return the peers that are here, in the order of their ids.

        Every tick asks: it is sorted when somebody came or went.
        """
        if self._shown is None:
            self._shown = {peer: lease for peer, (_, lease) in sorted(self._live.items())}
        ended = self._find_ended(now)
        return {peer: lease for peer, lease in self._shown.items() if peer not in ended} if ended else self._shown

    def is_live(self, peer: PeerId, now: float) -> bool:
        """Tell whether a peer is here."""
        return peer in self._live and self._live[peer][0] > now

    def next_end(self) -> float:
        """Return when the next live lease may end: not later than it does if its peer stays silent."""
        return self._soonest

    def expire(self, now: float) -> list[PeerId]:
        """Move those whose lease has ended to the silent ones."""
        ended = sorted(self._find_ended(now))
        for peer in ended:
            end, lease = self._live.pop(peer)
            self._shown = None
            self._fall_silent(peer, Silence(end, lease, said_goodbye=False))
        if now >= self._soonest:
            self._soonest = min((end for end, _ in self._live.values()), default=float("inf"))
        return ended

    def _find_ended(self, now: float) -> list[PeerId]:
        if now < self._soonest:
            return []
        return [peer for peer, (end, _) in self._live.items() if end <= now]

    def goodbye(self, peer: PeerId, now: float) -> bool:
        """Note that the peer left in good order; tell whether it was here."""
        _, lease = self._live.pop(peer, (now, None))
        if lease is not None:
            self._shown = None
            self._fall_silent(peer, Silence(now, lease, said_goodbye=True))
        return lease is not None

    def heard(self, peer: PeerId, now: float) -> float | None:
        """Return the seconds since the peer last said that it is here, to us or to whom we have it from; None: never,
        for all we know.
        """
        if peer in self._live:
            end, lease = self._live[peer]
            return max(0.0, now - end + min(self.ttl, lease.ttl))
        if (silence := self._silent.get(peer)) is None:
            return None
        return now - silence.since + (0.0 if silence.said_goodbye else min(self.ttl, silence.lease.ttl))

    def left_politely(self, peer: PeerId) -> bool:
        """Tell whether the peer is silent because it left in good order."""
        return peer in self._silent and self._silent[peer].said_goodbye

    def known(self) -> list[Lease]:
        """Return the leases of all who may be found again: those who are here, then those who fell silent without a
        goodbye.
        """
        return [lease for _, (_, lease) in sorted(self._live.items())] + self.last_words()

    def lately(self) -> list[Lease]:
        """Return the leases of all who were here: the longest here first, then the last to fall silent."""
        return [lease for _, lease in self._live.values()] + [one.lease for one in reversed(self._silent.values())]

    def last_words(self) -> list[Lease]:
        """Return the last leases of those who fell silent without a goodbye, in the order of their ids."""
        return [silence.lease for _, silence in sorted(self._silent.items()) if not silence.said_goodbye]

    def entries(self, now: float) -> list[tuple[float, Lease]]:
        """Return every live lease with the seconds it still counts."""
        return [(end - now, lease) for end, lease in self._live.values() if end > now]

    def _has_room(self, peer: PeerId) -> bool:
        """Make room for one more live lease and tell whether there is any: for a member also that of an outsider."""
        if len(self._live) >= self.capacity and self.members is not None and peer in self.members:
            outsider = next(filter(self.is_outsider, self._live), None)
            if outsider is not None:
                del self._live[outsider]
                self._answered.discard(outsider)
                self._shown = None
        return len(self._live) < self.capacity

    def _fall_silent(self, peer: PeerId, silence: Silence) -> None:
        self._silent.pop(peer, None)
        if len(self._silent) >= self.capacity:
            oldest = next(filter(self.is_outsider, self._silent), next(iter(self._silent)))
            del self._silent[oldest]
            self._answered.discard(oldest)
        self._silent[peer] = silence


def check_run(lease: Lease, run: Digest) -> None:
    """Raise PayloadError when the lease is of another run."""
    if lease.run != run:
        here, there = run.hex()[:12], lease.run.hex()[:12]
        raise PayloadError(f"lease of run {there}, this is run {here}; compare the invites")


def _news_in(lease: Lease) -> tuple[object, ...]:
    """Return the fields of a lease whose change anybody would want to know."""
    return lease.addresses, lease.epoch, lease.round, lease.digest, lease.state, lease.uplink, lease.version, lease.part


# ---- leases as bytes ----

_ENTRY = struct.Struct("<IH")  # milliseconds it still counts, bytes of the lease
MAX_LEASE_NBYTES = 1 << 13
MAX_LEASES_NBYTES = MAX_PEERS * (_ENTRY.size + MAX_LEASE_NBYTES)
MAX_LIST_NBYTES = 64 * (_ENTRY.size + MAX_LEASE_NBYTES)  # a row of the largest swarm, and the half again


def write_leases(entries: Sequence[tuple[float, Lease]]) -> bytes:
    """Write leases for others, each with the seconds it still counts."""
    told = [(int(1000 * max(0.0, remaining)), lease_bytes(lease)) for remaining, lease in entries[:MAX_PEERS]]
    return b"".join(_ENTRY.pack(remaining, len(data)) + data for remaining, data in told)


@lru_cache(maxsize=2 * MAX_PEERS)
def lease_bytes(lease: Lease) -> bytes:
    """Return the bytes of one lease: each is sent to many."""
    return encode(lease)


def read_leases(data: bytes) -> Iterator[tuple[float, Lease]]:
    """Read what ``write_leases`` wrote: seconds it still counts, lease. PayloadError for anything else."""
    at = 0
    while at < len(data):
        if len(data) - at < _ENTRY.size:
            raise PayloadError("list of leases is cut short; drop it and its sender")
        remaining, nbytes = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size + nbytes
        if nbytes > MAX_LEASE_NBYTES or at > len(data):
            raise PayloadError(f"list of leases names one of {nbytes} bytes; drop it and its sender")
        yield remaining / 1000, read_lease(data[at - nbytes : at])


def read_lease(data: bytes) -> Lease:
    """Read one signed lease. PayloadError for anything else."""
    lease = decode(data)
    if not isinstance(lease, Lease):
        raise PayloadError(f"{type(lease).__name__} where a lease belongs; drop it and its sender")
    return lease


# ---- what people call a peer ----
#
# A name travels behind the library's version, of which nothing depends: an older reader takes both for the version.
# Anybody may take any name, so it is shown beside the key's letters only, and nothing goes by it.

_NAME = re.compile(r"[A-Za-z0-9._-]{1,16}")
_BEFORE_NAME = 15  # characters of the version


def is_name(text: str) -> bool:
    """Tell whether a peer may be called so: letters, digits, dot, underscore and hyphen, 16 at most."""
    return _NAME.fullmatch(text) is not None


def name_in(lease: Lease) -> str:
    """Return what the peer of a lease calls itself; empty: nothing, or nothing that is a name."""
    name = lease.version.partition("/")[2]
    return name if is_name(name) else ""


# ---- this peer's own lease ----
#
# Renewed under a growing number, and sooner when there is news.

_LOOKED_AT, _TWIN = 12, 5  # our last renewals; those in which what we never said came back: a restart explains few


class OwnLease:
    """The lease of ``signer``'s peer, which can be dialled at ``addresses``; it lasts ``ttl`` s."""

    def __init__(self, signer: Signer, run: Digest, ttl: float, addresses: Callable[[], Sequence[str]]) -> None:
        self._signer, self._run, self._ttl, self._addresses = signer, run, ttl, addresses
        self._fields: dict[str, Any] = {"epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0}
        self._version = package_version()
        self._sequence = 0
        self._said = set[str]()  # every address of this life
        self._foreign = deque([False], _LOOKED_AT)  # by renewal: did what this life never said come back?
        self._doubled = anyio.Event()
        self._elsewhere = "an unknown address"  # of who is doubled
        self._news = anyio.Event()
        self._signed: tuple[Lease | None, Lease | None] = None, None  # the last draft, and the lease it became

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
            self._news.set()

    def train(self, part: range | None) -> None:
        """Say which fragments this peer trains; None: all of them, an empty range: none."""
        self._say_part(*((0, 0) if part is None else (part.start, part.stop) if part else (NO_PART, NO_PART)))

    def look(self) -> None:
        """Say that this peer trains none yet, and looks for others to share a replica with."""
        self._say_part(LOOKS, LOOKS)

    def _say_part(self, first: int, stop: int) -> None:
        self._fields |= {"first": first, "stop": stop}
        self._news.set()

    def call(self, name: str) -> None:
        """Tell others a name of this peer, see `is_name`; before the first lease is sealed."""
        self._version = f"{package_version()[:_BEFORE_NAME]}/{name}"

    def renew(self) -> None:
        """Count on: what is sealed from now on is newer than all before, and what is known now is no news any more."""
        self._sequence += 1
        self._foreign.append(False)
        self._news = anyio.Event()

    async def until_news(self) -> None:
        """Wait until there is something to say that was not so at the last ``renew``."""
        await self._news.wait()

    def seal(self) -> Lease:
        """Return the lease of this peer as of now, signed."""
        draft = self.draft()
        before, sealed = self._signed
        if sealed is None or draft != before:
            sealed = seal_lease(draft, self._signer)
            self._signed = draft, sealed
        return sealed

    def draft(self) -> Lease:
        """Return the lease of this peer as of now, not signed."""
        addresses = [address for address in self._addresses() if len(address) <= MAX_ADDRESS][:MAX_ADDRESSES]
        self._said.update(addresses)
        return Lease(
            run=self._run,
            peer=self._signer.peer,
            sequence=self._sequence,
            ttl=math.ceil(self._ttl),
            addresses=tuple(addresses),
            version=self._version,
            **self._fields,  # Any: integers and one digest, by the names of Lease
        )

    def hear_own(self, own: Lease) -> None:
        """Take note that somebody has ``own``. When it is newer than what was made here, go on above that.

        It is from before a restart then, or from another process, as one of today's number and of addresses that were
        never ours is: the dead say nothing new, the living do again and again.
        """
        if own.sequence > self._sequence:
            self._sequence = own.sequence
            self._news.set()
        elif own.sequence < self._sequence or self._said.issuperset(own.addresses):
            return
        self._foreign[-1] = True
        if sum(self._foreign) >= _TWIN:
            self._elsewhere = own.addresses[0] if own.addresses else self._elsewhere
            self._doubled.set()

    async def until_doubled(self) -> None:
        """Wait until another process is seen to run with this key, which might vote twice in one ballot: ConfigError.

        Whoever sees it ends, which may be both: neither knows which of them is meant to live.
        """
        await self._doubled.wait()
        name = peer_name(self._signer.peer)
        raise ConfigError(
            f"another process runs with this identity ({name}) at {self._elsewhere}; end one of the two, or give it a "
            "key of its own, and start the other again"
        )


@cache
def package_version() -> str:
    """Return this library's version, which is read from a file: of a swarm that comes together many ask for it."""
    try:
        return version("decentral")[:32]
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "source"
