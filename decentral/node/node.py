"""The swarm side of one peer, put together: chain, frames, directory, catch-up, gossip. No thread, no torch.nn.

Runs on any transport and any anyio backend, so that tests drive real nodes in memory under virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, median_low

import anyio
import anyio.abc
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.consensus.chain import VOTING, Head, Voting
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import RoundTerms, RunClock
from decentral.dissemination.spread import UNKNOWN_RATE, Line, Lines, even_out
from decentral.dissemination.text import TextDonor
from decentral.errors import (
    ConfigError,
    ManifestMismatch,
    NoPeersError,
    NotAdmitted,
    PayloadError,
    TransportError,
    VersionError,
)
from decentral.flow.pacing import lease_bits
from decentral.flow.waiting import Offload, in_thread
from decentral.manifest import Manifest, rule_of
from decentral.node.upload import DailyUpload, Suspension
from decentral.optimizers import make_outer
from decentral.parameters import Schema
from decentral.replica.codec import Codec, WarmUp, codec_of
from decentral.replica.contents import MAKERS, Readings, Tail
from decentral.replica.replica import Replica
from decentral.rounds.catch_up import CatchUp
from decentral.rounds.driver import Driver
from decentral.rounds.frame_io import CONTROL
from decentral.rounds.gossip import PAIR, Gossip
from decentral.rounds.local_state import CommittedUpdate, Ledger, Listeners, OwnParts, RoundObserver, SwarmAccess
from decentral.rounds.partners import Partners, Punctuality
from decentral.rounds.reduce import USUAL_GRAIN, Grain, partition, shares
from decentral.swarm.admission import ADMISSION, Admission, AdmittingTransport
from decentral.swarm.contacts import LEASE, LEASE_LIST, LEASES
from decentral.swarm.directory import Directory
from decentral.swarm.hello import HELLO, ask_hello, check_terms, greeting, refusal
from decentral.transport import Transport
from decentral.transport.paths import DIALBACK, SPEED, Paths, serve_dialback, serve_speed
from decentral.transport.requests import serve_requests
from decentral.transport.throttle import Caps, ThrottledTransport
from decentral.wire.frames import FrameKind
from decentral.wire.groups import BOUNDARY, GROUP
from decentral.wire.keys import PeerId, Signer, peer_name
from decentral.wire.messages import PRIVATE

# ---- the node ----

END_TIMEOUT = 15.0  # s for the others to get the last commit: a frame of 10 MB and 10 Mbit/s take 8
RETRY = 0.5  # s between looks for a peer that answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a peer begins: its model, and what it remembers or whom it was invited by."""

    manifest: Manifest
    schema: Schema
    anchors: Sequence[Tensor]  # the model as it is now, fragment by fragment, flat float32
    buffers_B: Tensor | None = None  # and its buffers, flat float32; needed where the schema has any
    founder: bool  # starts the run's chain
    bootstrap: tuple[str, ...] = ()
    head: Head | None = None  # resumed from a checkpoint
    acceptor: Acceptor | None = None  # the last vote: also without a checkpoint it must not be given twice
    age: float = 0.0  # s the run has lasted already
    away: float = 0.0  # s since the head below was made durable here
    gossip_step: int = 0
    folder: Path | None = None  # for the chunks of a snapshot that is being fetched
    join_timeout: float | None = None  # s to look for anybody when it has no model yet


class Node:
    """A peer's node. ``run`` it in a task; ``ready`` is set once its chain has a head and training may begin."""

    def __init__(
        self,
        start: Start,
        *,
        signer: Signer,
        transport: Transport,
        ledger: Ledger,
        on_update: Callable[[CommittedUpdate], None],
        on_event: Callable[[str, dict[str, object]], None],
        observe: Callable[[Replica], RoundObserver] | None = None,
        offload: Offload = in_thread,
        uplink: Callable[[], float | None] = lambda: None,
        daily_upload: DailyUpload | None = None,
        private: bool = False,
        admission: Admission | None = None,
        grain: Grain = USUAL_GRAIN,
        voting: Voting = VOTING,
        readings: Readings | None = None,
        clock: Callable[[], float] = anyio.current_time,
        compiles_aside: bool = False,
    ) -> None:
        """``observe`` makes what looks at the rounds of this replica, if anything does; ``uplink`` tells the bytes per
        second that this peer was seen to send, for its lease; ``private`` that others reach it through relays only;
        ``admission`` who may ask for the terms, where the run admits by token; ``grain`` how finely a reduce is cut;
        ``voting`` whose votes count, the same for all; ``readings`` is of a simulation; ``clock`` counts seconds in
        which the machine sleeps; ``compiles_aside``: this returns before the machine code of its codec is there.
        """
        manifest = start.manifest
        self.manifest, self.transport, self.signer = manifest, transport, signer
        self.start = replace(start, anchors=(), buffers_B=None)  # the replica has them, until rounds replace them
        self.on_event, self.admission = on_event, admission
        self.directory = Directory(transport, signer, manifest.digest, ttl=manifest.swarm.lease)
        self.directory.own.update(state=PRIVATE if private else 0)
        self.replica = make_replica(manifest, start.schema, start.anchors, start.buffers_B)
        replica = self.replica
        self.clock = RunClock(manifest.run.minutes)
        uplinks = Uplinks(self.directory, manifest.exchange.kind == "reduce")
        partners = None if replica.agrees else make_partners(manifest, replica, start.gossip_step)
        parts = OwnParts(
            signer=signer,
            head=start.head or Head.genesis(manifest.digest, start.schema.digest, replica.digest, signer.peer),
            acceptor=start.acceptor,
            away=start.away,
            terms=make_terms(manifest, replica, uplinks, grain, self.clock, voting),
            replica=replica,
            ledger=ledger,
            partners=partners,
            offload=offload,
            readings=readings,
        )
        swarm = SwarmAccess(
            transport=transport,
            directory=self.directory,
            lease=manifest.swarm.lease,
            shrink_after=manifest.swarm.shrink_after,
            lines_of=uplinks.lines_of,
            clock=clock,
        )
        observers = () if observe is None else (observe(replica),)
        listeners = Listeners(on_update=on_update, on_event=on_event, observers=observers)
        self.driver = Driver(parts, swarm, listeners)
        if compiles_aside:
            self.driver.membership.is_ready = WarmUp(replica.codec).is_over
        else:
            replica.codec.warm_up()
        uplinks.received = self.driver.frames.arrivals.rate_of
        self._now = clock
        self.paths = Paths(transport)
        self.catch_up = CatchUp(self.driver, start.folder)
        self.gossip = None if partners is None else Gossip(self.driver, partners)
        self.state = "looking"
        self.ready = anyio.Event()
        self.uplink, self.daily_upload = uplink, daily_upload
        self.resting = Suspension(self.driver.membership, on_event, offload)
        self.company = Company()
        self.waits = False  # training has not begun here, for want of others
        self._began = 0.0
        members = RunMembers(self.driver)
        transport.budget.prefer(members)
        transport.budget.answers.uplink = lambda: self.uplink() or transport.meter.bytes_per_second
        self.directory.prefer(members)
        serve_requests(transport, HELLO, self._on_hello, limit=64)
        shared = manifest.data.shared
        gives = shared is not None and shared.chunks is not None
        self.text = TextDonor(transport, shared, offload=offload) if shared is not None and gives else None
        serve_dialback(transport)
        self.speed = serve_speed(transport)

    @property
    def outer_steps(self) -> int:
        """Made so far; in gossip by this peer."""
        return self.gossip.step if self.gossip is not None else self.driver.head.outer_step

    @property
    def age(self) -> float:
        """Seconds since the run began, wherever that was; it has not, while its first peers wait for others."""
        if self.waits and not self.outer_steps:
            self._began = self._now()
        return self._now() - self._began

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. Raises ManifestMismatch, VersionError or NoPeersError while joining."""
        self._began = self._now() - self.start.age - self.start.away
        async with anyio.create_task_group() as group:
            group.start_soon(self.directory.run)
            self.directory.add_bootstrap(self.start.bootstrap)
            if not self.start.founder and self.start.head is None:
                await self._join()
            await group.start(self.driver.run)
            group.start_soon(self.catch_up.run)
            group.start_soon(self.catch_up.memory.run)
            group.start_soon(self.paths.watch)
            group.start_soon(self._announce_forever)
            if self.daily_upload is not None:
                group.start_soon(self.resting.keep_to, self.daily_upload, self.transport.traffic)
            self.ready.set()
            task_status.started()

    async def see_others_to_the_end(self) -> None:
        """After the last commit stay until all others that are here have it, members or not, or ``END_TIMEOUT``.

        Who is a message behind needs the commit and its frames from somebody: two of three used to leave with them.
        """
        driver = self.driver
        with anyio.move_on_after(END_TIMEOUT):
            while driver.head.final and any(map(driver.watch.lacks_the_end, list(self.directory.live()))):
                await anyio.sleep(0.1)

    async def leave(self) -> None:
        """Say farewell, so that nobody waits for this peer."""
        self.state = "leaving"
        await self.driver.membership.say_goodbye()
        await self.directory.goodbye()

    # ---- joining ----

    async def _join(self) -> None:
        """Find a peer that answers, compare the terms, take its snapshot. Looks on for as long as nobody is there."""
        with anyio.move_on_after(self.start.join_timeout):
            await self._look_until_synced()
            return
        raise NoPeersError(
            "nobody answered within the time given to join_timeout; check the invite, or that a peer of the run is up, "
            "with: decentral doctor INVITE"
        )

    async def _look_until_synced(self) -> None:
        """Raises ManifestMismatch, NotAdmitted or VersionError when all that are here say so, or one says so twice and
        nobody else lets this peer in: one that is older, or lies, keeps it from nobody else.
        """
        before = False
        while True:
            refused, live = list[ConfigError](), list(self.directory.live())
            for peer in live:
                try:
                    await self._sync_with(peer)
                    return
                except (TransportError, PayloadError) as error:
                    self.on_event("sync_failed", {"peer": peer_name(peer), "why": str(error)})
                except (ManifestMismatch, NotAdmitted, VersionError) as error:
                    refused.append(error)
            if refused and (before or len(refused) == len(live)):
                raise refused[0]
            before = bool(refused)
            self.state = "looking"
            await anyio.sleep(RETRY)

    async def _sync_with(self, peer: PeerId) -> None:
        hello = await ask_hello(self.transport, peer, self.admission)
        check_terms(self.manifest, self.start.schema, hello)
        self.state = "syncing"
        self._began = self._now() - hello.age
        fetched = await self.catch_up.snapshots.fetch(peer)
        self.replica.take_over(await self.driver.state.offload(self.replica.read, fetched.tensors))
        self.driver.state.begin_at(fetched.head, self.start.acceptor)
        if self.gossip is not None:
            self.gossip.follow(fetched.gossip_step)
        self._tell_synced(peer, fetched.head)

    def _tell_synced(self, peer: PeerId, head: Head) -> None:
        at = {"round": head.round, "outer_step": self.outer_steps if self.gossip is not None else head.outer_step}
        self.on_event("synced", {"peer": peer_name(peer), **at})

    async def follow_others(self) -> bool:
        """In gossip, take over the replica of a peer that is here, as a newcomer does; False when nobody gives one.

        Asked twice: a donor that lets this peer in again just now is between two commits.
        """
        for _ in range(2):
            for peer in list(self.directory.live()):
                if await self._follow(peer):
                    return True
            await anyio.sleep(RETRY)
        return False

    async def _follow(self, peer: PeerId) -> bool:
        assert self.gossip is not None
        before = self.driver.head.final
        try:
            fetched = await self.catch_up.snapshots.fetch(peer)
        except (TransportError, PayloadError) as error:
            self.on_event("sync_failed", {"peer": peer_name(peer), "why": str(error)})
            return False
        loaded = await self.driver.state.offload(self.replica.read, fetched.tensors)
        if self.driver.head.final and not before:
            return True  # replicas were merged meanwhile: what came is older
        self.replica.take_over(loaded)
        self.gossip.follow(max(self.gossip.step, fetched.gossip_step))
        self._tell_synced(peer, fetched.head)
        return True

    # ---- being there ----

    async def _announce_forever(self) -> None:
        """Keep the lease in step with the chain, and the clock of a run that ends by time."""
        while True:
            head = self.driver.head
            uplink = lease_bits(self.uplink())
            self.directory.own.update(epoch=head.epoch, round=head.round, digest=head.hash, uplink=uplink)
            self.clock.tell(self.age)
            if self.state in ("looking", "syncing") and self.ready.is_set():
                self.state = "training"
            self._look_who_is_here(head)
            if self.ready.is_set():  # not with the rounds: a disk that hangs holds those up
                self.driver.watch.look_how_far_the_others_are(anyio.current_time())
            await anyio.sleep(0.25)

    def _look_who_is_here(self, head: Head) -> None:
        """Say once when the last of the others has gone, unless the run is over: then all go."""
        alone = self.company.look(self.directory.live(), head.members, self.directory.left_politely)
        if alone and not head.final and self.state != "leaving":
            names = [peer_name(peer) for peer in sorted(self.company.gone)]
            self.on_event("alone", {"peers": names, "left": self.company.left})

    async def _on_hello(self, peer: PeerId, data: bytes) -> bytes:
        if self.admission is not None and not self.admission.take(peer, data):
            return refusal()
        return greeting(self.manifest, self.start.schema, self.age, over=self.driver.head.final)


# ---- what the manifest means here ----
#
# A peer's replica and the terms of its rounds follow from it.


def make_replica(
    manifest: Manifest, schema: Schema, anchors: Sequence[Tensor], buffers_B: Tensor | None = None
) -> Replica:
    """Anchor, buffers, outer optimizer and codec as the manifest says."""
    outer = manifest.outer
    codec = codec_of(manifest)
    return Replica(
        schema,
        anchors,
        make_outer(outer.method, outer.hyper),
        codec,
        Codec(parse_compressor("none")),
        manifest.weighting,
        buffers_B,
        Tail.of(schema, manifest.model.buffers or "average"),
        rule_of(manifest),
    )


def largest_offer(replica: Replica, gossips: bool, fragments: int, tails: int = 1) -> int:
    """Bytes of the largest body that a peer may offer: a contribution, whole or in slices, or what gossip merges.

    ``tails``: how often its buffers are with it.
    """
    codec, channels = (replica.merge_codec, 1) if gossips else (replica.codec, len(replica.method.channels()))
    whole = [replica.shapes(f) * channels for f in range(fragments)]
    shapes = [*whole, *(((replica.numel(f),),) * channels for f in range(fragments))]
    return max(codec.max_body_nbytes(one, channels) for one in shapes) + tails * replica.tail.nbytes(0)


def make_partners(manifest: Manifest, replica: Replica, step: int) -> Partners:
    """Return the partners of a peer that gossips and stands at ``step``."""
    swarm, fragments = manifest.swarm, manifest.outer.fragments
    punctuality = Punctuality(swarm.deadline_floor, swarm.deadline_ceiling)
    return Partners(manifest.run.rounds, fragments, lambda step: len(replica.due(step)), punctuality, step)


def make_terms(
    manifest: Manifest, replica: Replica, uplinks: Uplinks, grain: Grain, clock: RunClock, voting: Voting
) -> RoundTerms:
    """Return what the round machine needs of the manifest and of the links."""

    def ranges(fragment: int, owners: tuple[PeerId, ...]) -> tuple[tuple[PeerId, int, int], ...]:
        return partition(replica.numel(fragment), owners, shares(uplinks.for_owners(owners)), grain)

    swarm, fragments = manifest.swarm, manifest.outer.fragments
    gossips, method = not replica.agrees, replica.method
    return RoundTerms(
        num_fragments=fragments,
        rounds=fragments if gossips else manifest.run.rounds,  # gossip commits only the merge at the end
        min_peers=swarm.min_peers,
        floor=swarm.deadline_floor,
        ceiling=swarm.deadline_ceiling,
        patience=max(2.0, swarm.deadline_floor),
        partition=ranges if uplinks.reduces else None,
        steps=0 if manifest.inner.pace == "clock" else manifest.inner.steps // fragments,  # all are full then
        overlaps=manifest.outer.overlap > 0,
        largest=largest_offer(replica, gossips, fragments, MAKERS if uplinks.reduces else 1),
        takes=uplinks.takes,
        quorum=method.timing.quorum,
        grace=method.timing.grace,
        max_staleness=method.timing.staleness * fragments,
        offered=FrameKind.MERGE if gossips else FrameKind.CONTRIBUTION,
        states=lambda outer_step: 0 if gossips else len(replica.due(outer_step)) - 1,
        clock=clock,
        voting=voting,
        lease=swarm.lease,
    )


# ---- what members can send ----
#
# Their leases say it: a hint for a round, wrong ones cost time.

# s for which lines are remembered: leases change less often; looked up with every tick they took a tenth of it
FRESH = 1.0
LEAST = 0.1  # of the usual uplink: nobody is waited for as long as who says that it sends less would need


@dataclass(slots=True)
class Uplinks:
    """The uplinks of the members of a run; ``reduces``: whether its rounds are reduces."""

    directory: Directory
    reduces: bool
    clock: Callable[[], float] = anyio.current_time
    received: Callable[[PeerId], float | None] = lambda peer: None  # bytes per second had from a peer
    _members: tuple[PeerId, ...] = ()  # whose lines were looked up last, when, and what was found
    _since: float = -math.inf
    _places: dict[PeerId, int] = field(default_factory=dict)
    _lines: Lines | None = None

    def lines_of(self, peers: Sequence[PeerId]) -> list[Line]:
        """Return the line that each says it was seen to have; private peers, which not all reach, pass nothing on."""
        live, own = self.directory.live(), self.directory.own.draft()
        leases = [own if peer == own.peer else live.get(peer) for peer in peers]
        known = {lease.peer: lease.uplink / 8 for lease in leases if lease is not None and lease.uplink}
        others = [rate for peer, rate in known.items() if peer != own.peer]  # the own line says nothing of theirs
        usual = fmean(others or known.values() or [UNKNOWN_RATE])
        rates = even_out([lease.uplink / 8 if lease is not None and lease.uplink else usual for lease in leases])
        private = [lease is not None and bool(lease.state & PRIVATE) for lease in leases]
        return [Line(rate, passes_on=not hidden) for rate, hidden in zip(rates, private, strict=True)]

    def for_owners(self, peers: Sequence[PeerId]) -> list[float]:
        """Bytes per second for a reduce; private peers own nothing of it, unless all are.

        What a peer says of its line counts for at most as many times the usual one as this peer had from it of what it
        had from the usual one; of one from whom nothing was had yet, for no more than the usual line. Else whoever
        claims the most owns all that the others apply.
        """
        lines, me = self.lines_of(peers), self.directory.own.draft().peer
        nobody = not any(line.passes_on for line in lines)
        seen = {peer: rate for peer in peers if (rate := self.received(peer)) is not None}
        usual, usual_seen = median_low(line.rate for line in lines), median(seen.values() or [1.0])
        capped = [
            line.rate if peer == me else min(line.rate, usual * seen.get(peer, usual_seen) / usual_seen)
            for peer, line in zip(peers, lines, strict=True)
        ]
        return [rate if line.passes_on or nobody else 0.0 for rate, line in zip(even_out(capped), lines, strict=True)]

    def takes(self, nbytes: int, peer: PeerId, members: Sequence[PeerId]) -> float | None:
        """Estimate the seconds, as `Takes` asks for. In a reduce, slices and results are about two bodies."""
        lines = self._lines_for_waiting(tuple(members))
        me = self._places.get(peer)
        if lines is None or me is None:
            return None
        return lines.seconds_alone(2 * nbytes, me) if self.reduces else lines.seconds_to_all(nbytes, me)

    def _lines_for_waiting(self, members: tuple[PeerId, ...]) -> Lines | None:
        now = self.clock()
        if self._since <= now < self._since + FRESH and (members is self._members or members == self._members):
            return self._lines
        self._members, self._since = members, now
        self._places = {peer: place for place, peer in enumerate(members)}
        lines = self.lines_of(members)
        usual = median(line.rate for line in lines)
        least = [replace(line, rate=max(line.rate, LEAST * usual)) for line in lines]
        self._lines = None if usual == UNKNOWN_RATE else Lines(least)
        return self._lines


# ---- who is here ----
#
# A pure watch over the live leases: who trains with this peer now, and whether it was left alone.


@dataclass(slots=True)
class Company:
    """The other members that are here, and the last ones that were."""

    here: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()  # who was here last, once nobody is any more; empty before anybody came
    left: bool = False  # whether all of those said goodbye, rather than fell silent
    _seen: tuple[object, object] = (None, None)  # the live ones and the members at the look before

    def look(
        self, live: Collection[PeerId], members: Collection[PeerId], said_goodbye: Callable[[PeerId], bool]
    ) -> bool:
        """Book who is here; whether the last one has gone since the look before.

        A peer that rests is no member and still here; one that only asks for the terms never was.
        """
        if self._seen[0] is live and self._seen[1] is members:  # nobody came or went; asked four times a second
            return False
        before, self._seen = self.here, (live, members)
        self.here = frozenset(peer for peer in live if peer in members or peer in before)
        if self.here:
            self.gone = frozenset()
        elif before:
            self.gone, self.left = before, all(map(said_goodbye, before))
        return bool(before) and not self.here


# ---- limits of the transport ----
#
# The person of a peer allows caps and a day's upload; what a swarm must hear in time goes ahead of bulk.

URGENT = (CONTROL, LEASE, LEASE_LIST, LEASES, HELLO, PAIR, DIALBACK, ADMISSION, GROUP)
TIMELY = (BOUNDARY,)
OPEN_TO_ALL = frozenset({HELLO, LEASE, LEASES, DIALBACK, SPEED})  # also where a run admits by token


class RunMembers(Container[PeerId]):
    """The members of the run as its chain has them now: whom the transport's budget prefers."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._of: tuple[PeerId, ...] = ()  # the members looked at last, as a set: it is asked for every stream
        self._members: frozenset[PeerId] = frozenset()

    def __contains__(self, peer: object) -> bool:
        members = self._driver.head.members
        if members is not self._of:
            self._of, self._members = members, frozenset(members)
        return peer in self._members


def throttle(
    inner: Transport, caps: Caps, daily: DailyUpload | None, admission: Admission | None = None
) -> ThrottledTransport:
    """Also without caps: it measures the uplink. With ``admission`` it serves nobody who was not admitted."""

    def may_upload() -> bool:
        if daily is None:
            return True
        daily.count(inner.traffic.total.sent)
        return daily.may_upload

    if admission is None:
        return ThrottledTransport(inner, caps, urgent=URGENT, timely=TIMELY, may_upload=may_upload)
    return AdmittingTransport(
        inner,
        caps,
        admission=admission,
        open_to_all=OPEN_TO_ALL,
        urgent=URGENT,
        timely=TIMELY,
        may_upload=may_upload,
    )
