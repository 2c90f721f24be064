"""One peer's swarm side, put together: chain, frames, directory, catch-up, gossip. No thread, no torch.nn.

Runs on any transport and any anyio backend, so that tests drive real nodes in memory under virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import anyio.abc
from torch import Tensor

from decentral.consensus.chain import VOTING, Head, Voting
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import RunClock
from decentral.dissemination.reduce import USUAL, Grain
from decentral.errors import (
    ConfigError,
    ManifestMismatch,
    NoPeersError,
    NotAdmitted,
    PayloadError,
    TransportError,
    VersionError,
)
from decentral.flow.offload import Offload, in_thread
from decentral.flow.uplink import lease_bits
from decentral.manifest import Manifest
from decentral.node.company import Company, RunMembers
from decentral.node.daily_upload import DailyUpload
from decentral.node.redundancy import redundancy_of
from decentral.node.suspension import Suspension
from decentral.node.terms import make_replica, make_terms
from decentral.node.uplinks import Uplinks
from decentral.parameters import Schema
from decentral.replica.contents import Readings
from decentral.replica.figures import Figures
from decentral.rounds.catch_up import CatchUp
from decentral.rounds.driver import Driver
from decentral.rounds.gossip import Gossip
from decentral.rounds.inbox import Inbox
from decentral.rounds.local_state import CommittedUpdate, Ledger, Listeners, OwnParts, SwarmAccess
from decentral.rounds.partners import Partners, Punctuality
from decentral.swarm.admission import Admission
from decentral.swarm.directory import Directory
from decentral.swarm.hello import HELLO, ask_hello, check_terms, greeting, refusal
from decentral.swarm.paths import Paths
from decentral.transport import Transport
from decentral.transport.dialback import serve_dialback
from decentral.transport.requests import serve_requests
from decentral.transport.speed import serve_speed
from decentral.wire.keys import PeerId, Signer, peer_name
from decentral.wire.messages import PRIVATE

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
    gossip_step: int = 0
    folder: Path | None = None  # for the chunks of a snapshot that is being fetched
    join_timeout: float | None = None  # s to look for anybody when it has no model yet


class Node:
    """One peer. ``run`` it in a task; ``ready`` is set once its chain has a head and training may begin."""

    def __init__(
        self,
        start: Start,
        *,
        signer: Signer,
        transport: Transport,
        ledger: Ledger,
        on_update: Callable[[CommittedUpdate], None],
        on_event: Callable[[str, dict[str, object]], None],
        on_figures: Callable[[Figures], None] = lambda figures: None,
        offload: Offload = in_thread,
        uplink: Callable[[], float | None] = lambda: None,
        daily_upload: DailyUpload | None = None,
        private: bool = False,
        admission: Admission | None = None,
        grain: Grain = USUAL,
        voting: Voting = VOTING,
        readings: Readings | None = None,
    ) -> None:
        """``on_figures`` is told what rounds say of the swarm; ``uplink`` tells the bytes per second that this peer was
        seen to send, for its lease; ``private`` that others reach it through relays only; ``admission`` who may ask for
        the terms, where the run admits by token; ``grain`` how finely a reduce is cut; ``voting`` whose votes
        count, the same for all; ``readings`` is of a simulation.
        """
        manifest = start.manifest
        self.manifest, self.transport, self.signer = manifest, transport, signer
        self.start = replace(start, anchors=(), buffers_B=None)  # the replica has them, until rounds replace them
        self.on_event, self.admission = on_event, admission
        self.directory = Directory(transport, signer, manifest.digest, ttl=manifest.swarm.lease)
        self.directory.update(state=PRIVATE if private else 0)
        self.replica = make_replica(manifest, start.schema, start.anchors, start.buffers_B)
        replica = self.replica
        channels = len(replica.method.channels())
        self.clock = RunClock(manifest.run.minutes)
        inbox = Inbox(
            start.schema,
            replica.codec,
            replica.merge_codec,
            offload,
            replica.tail,
            channels,
            replica.contents.unpacked,
            readings,
        )
        uplinks = Uplinks(self.directory, manifest.exchange.kind == "reduce")
        partners = None
        if not replica.agrees:
            limits, step, steps = manifest.swarm, start.gossip_step, manifest.run.rounds
            punctuality = Punctuality(limits.deadline_floor, limits.deadline_ceiling)
            partners = Partners(steps, manifest.outer.fragments, lambda step: len(replica.due(step)), punctuality, step)
        parts = OwnParts(
            signer=signer,
            head=start.head or Head.genesis(manifest.digest, start.schema.digest, replica.digest, signer.peer),
            acceptor=start.acceptor,
            terms=make_terms(manifest, replica, uplinks, grain, self.clock, voting),
            replica=replica,
            inbox=inbox,
            ledger=ledger,
            partners=partners,
            offload=offload,
        )
        swarm = SwarmAccess(
            transport=transport,
            directory=self.directory,
            lease=manifest.swarm.lease,
            shrink_after=manifest.swarm.shrink_after,
            lines_of=uplinks.lines_of,
        )
        listeners = Listeners(on_update=on_update, on_event=on_event, on_figures=on_figures)
        self.driver = Driver(parts, swarm, listeners)
        self.paths = Paths(transport)
        self.catch_up = CatchUp(self.driver, start.folder)
        self.gossip = None if partners is None else Gossip(self.driver, partners)
        self.state = "looking"
        self.ready = anyio.Event()
        self.uplink, self.daily_upload = uplink, daily_upload
        self.resting = Suspension(self.driver, on_event, offload)
        self.company = Company()
        self.waits = False  # training has not begun here, for want of others
        self._began = 0.0
        transport.budget.prefer(RunMembers(self.driver))
        serve_requests(transport, HELLO, self._on_hello, limit=64)
        serve_dialback(transport)
        self.speed = serve_speed(transport)
        self.redundancy = redundancy_of(manifest, signer, transport, self.directory, self.driver, daily_upload, offload)

    @property
    def outer_steps(self) -> int:
        """Made so far; in gossip by this peer."""
        return self.gossip.step if self.gossip is not None else self.driver.head.outer_step

    @property
    def age(self) -> float:
        """Seconds since the run began, wherever that was; it has not, while its first peers wait for others."""
        if self.waits and not self.outer_steps:
            self._began = anyio.current_time()
        return anyio.current_time() - self._began

    def ways_to_others(self) -> tuple[str, ...]:
        """Addresses by which this peer can come back to its run: of those it knows, else of those it came by."""
        return self.directory.ways_to_others() or self.start.bootstrap

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. Raises ManifestMismatch, VersionError or NoPeersError while joining."""
        self._began = anyio.current_time() - self.start.age
        async with anyio.create_task_group() as group:
            group.start_soon(self.directory.run)
            self.directory.add_bootstrap(self.start.bootstrap)
            if not self.start.founder and self.start.head is None:
                await self._join()
            await group.start(self.driver.run)
            group.start_soon(self.catch_up.run)
            group.start_soon(self.paths.watch)
            group.start_soon(self._announce_forever)
            if self.redundancy is not None:
                group.start_soon(self.redundancy.run)
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
        await self.driver.goodbye()
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
        self._began = anyio.current_time() - hello.age
        fetched = await self.catch_up.snapshots.fetch(peer)
        self.replica.take_over(await self.driver.state.offload(self.replica.read, fetched.tensors))
        self.driver.begin_at(fetched.head, self.start.acceptor)
        if self.gossip is not None:
            self.gossip.follow(fetched.gossip_step)
        self.on_event("synced", {"peer": peer_name(peer), "round": fetched.head.round})

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
        self.on_event("synced", {"peer": peer_name(peer), "round": fetched.head.round})
        return True

    # ---- being there ----

    async def _announce_forever(self) -> None:
        """Keep the lease in step with the chain, and the clock of a run that ends by time."""
        while True:
            head = self.driver.head
            uplink = lease_bits(self.uplink())
            self.directory.update(epoch=head.epoch, round=head.round, digest=head.hash, uplink=uplink)
            self.clock.tell(self.age)
            if self.state in ("looking", "syncing") and self.ready.is_set():
                self.state = "training"
            self._look_who_is_here(head)
            await anyio.sleep(0.25)

    def _look_who_is_here(self, head: Head) -> None:
        """Say once when the last of the others has gone, unless the run is over: then all go."""
        alone = self.company.look(self.directory.live(), head.members, self.directory.said_goodbye)
        if alone and not head.final and self.state != "leaving":
            names = [peer_name(peer) for peer in sorted(self.company.gone)]
            self.on_event("alone", {"peers": names, "left": self.company.left})

    async def _on_hello(self, peer: PeerId, data: bytes) -> bytes:
        if self.admission is not None and not self.admission.take(peer, data):
            return refusal()
        return greeting(self.manifest, self.start.schema, self.age, over=self.driver.head.final)
