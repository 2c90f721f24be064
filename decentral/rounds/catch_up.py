"""How a peer gets to the head of the chain: replay the commits it missed, or adopt a snapshot of a heavier branch.

Replay costs the frames of the missed rounds: with 64 of 4096 values kept 0.46 % of a snapshot per round and
contributor; a snapshot is fetched when that may come to more. It costs the anchor and the outer state, striped over the
donors that stand at the same commit; every chunk is checked by its hash and the whole by the anchor's digest before
anything is touched. `Donor` is the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from decentral.consensus.chain import LENGTH as LONGEST
from decentral.consensus.chain import Branch, Head, Place, Rules, checked_branch
from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.rounds.driver import Driver
from decentral.rounds.local_state import tell_unexpected
from decentral.rounds.snapshots import CHAIN, CHAIN_LIMIT, LENGTH, SHARED, TIMEOUT, WHERE, Donor, SnapshotFetch
from decentral.transport.requests import request
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, FrameRef, decode

ASKED = 4  # other peers asked for the missed commits before a snapshot is fetched


@dataclass(frozen=True, slots=True)
class Answer:
    """What a holder says of our chain: where it last was the same as its own, and its commits after that."""

    shared: Head | None = None  # None: it knows none of the places that we named
    commits: tuple[Commit, ...] = ()  # as many as it still has and fit


class CatchUp:
    """The asking side of one peer; its `Donor` is the serving side."""

    def __init__(self, driver: Driver, folder: Path | None) -> None:
        """``folder``: for the chunks of a snapshot that is being fetched."""
        self.driver, self.state = driver, driver.state
        self.transport, self.directory = driver.swarm.transport, driver.swarm.directory
        self.snapshots = SnapshotFetch(driver.state, driver.swarm, folder)
        self.donor = Donor(driver.state, driver.swarm.transport)
        self._rules = Rules(driver.state.terms.voting, driver.state.terms.num_fragments)

    async def run(self) -> None:
        """Catch up with whom the rounds ask for, until cancelled."""
        while True:
            peer = await self.state.catch_up.next()
            if peer is None:
                continue
            try:
                await self._catch_up(peer)
            except DecentralError as error:
                self.state.on_event("catch_up_failed", {"why": str(error)})
            except Exception as error:  # noqa: BLE001  told with its traceback
                tell_unexpected(self.state.on_event, "catching up", error)

    # ---- asking ----

    async def _catch_up(self, peer: PeerId) -> None:
        head = self.state.head
        if head.anchor is None:
            return
        lied = False
        for holder in (peer, *self._others(peer, head)):  # one that joined later does not know the records before it
            missed = await self._missed(holder, head)
            lied = lied or (holder == peer and missed is None)
            if missed:
                if self.is_cheap(missed) and await self.replayed(holder, missed):
                    self.state.catch_up.drop()
                else:  # of this one's chain it is known that it goes on from ours
                    await self._adopt_if_heavier(holder)
                return
        if not lied:
            await self._adopt_if_heavier(peer)

    def _others(self, peer: PeerId, head: Head) -> list[PeerId]:
        """Whom to ask besides ``peer``: those that say they are ahead before others, and members before newcomers."""
        live = self.directory.live()
        others = [other for other in live if other != peer]
        others.sort(key=lambda other: (live[other].round <= head.round, other not in head.members))
        return others[:ASKED]

    async def _missed(self, holder: PeerId, head: Head) -> tuple[Commit, ...] | None:
        """What ``holder`` says was committed after ``head``, checked before anything is reckoned from it: of one
        flipped bit in the number of a fragment a peer ended. () where it does not know, None where it says what cannot
        be: one that lies keeps nobody from asking the next.
        """
        try:
            answer = await self._ask_chain(holder)
            if answer.shared is None or answer.shared.hash != head.hash:
                return ()
            self._rules.last(answer.shared, answer.commits)
        except PayloadError as error:
            self.state.on_event("catch_up_failed", {"why": str(error)})
            return None
        return answer.commits

    async def _ask_chain(self, holder: PeerId, places: Sequence[Place] = ()) -> Answer:
        """Where ``holder``'s chain leaves ours (or ``places``), and what it committed since. Raises PayloadError."""
        places = places or self.state.machine.state.history.locator()
        body = b"".join(WHERE.pack(*place) for place in places)
        try:
            data = await request(self.transport, holder, CHAIN, body, limit=CHAIN_LIMIT, timeout=TIMEOUT)
        except TransportError:
            return Answer()
        if len(data) < SHARED.size:
            return Answer()
        (round_,) = SHARED.unpack_from(data)
        shared = self.state.machine.state.history.newest_of(place for place in places if place[0] == round_)
        return Answer(shared, tuple(split_commits(data[SHARED.size :])))

    def is_cheap(self, commits: Sequence[Commit]) -> bool:
        """Whether the missed frames surely take fewer bytes than a snapshot."""
        replica, nbytes = self.state.replica, 0
        for record in (commit.record for commit in commits):
            missing = sum(ref.frame not in self.state.store for ref in record.frames)
            tails = min(missing, 1) if record.contributors else missing
            channels = len(replica.due(record.outer_step)) if replica.agrees else 1  # gossip commits what it merges
            shapes = replica.shapes(record.fragment) * channels
            whole = HEADER_NBYTES + replica.codec.max_body_nbytes(shapes, channels)
            nbytes += missing * whole // max(1, len(record.partition)) + tails * replica.tail.nbytes(record.fragment)
        return nbytes <= self.snapshots.layouts.nbytes

    async def replayed(self, holder: PeerId, commits: Sequence[Commit]) -> bool:
        """Apply the commits in order; False when a frame of one is nowhere to be had any more."""
        for commit in commits:
            if commit.record.round <= self.state.head.round:
                continue  # it came from its leader while this peer asked for it
            if not await self._fetch_frames(holder, commit):
                return False
            await self.driver.frames.feed(holder, commit)
        return True

    async def _fetch_frames(self, holder: PeerId, commit: Commit) -> bool:
        """Get the frames that ``commit`` names, from all who have it at once. Whether all are here.

        The machine then decides on the commit as if it had just come.
        """
        state, record = self.state, commit.record
        if record.contributors:
            state.inbox.expect(record)
        ahead = [p for p, lease in self.directory.live().items() if lease.round >= record.round and p != holder]
        holders = (holder, *ahead)
        missing = [ref for ref in record.frames if ref.frame not in state.store]

        async def fetch(turn: int, ref: FrameRef) -> None:
            try:
                for peer in holders[turn % len(holders) :] + holders[: turn % len(holders)]:
                    if await self.driver.frames.fetcher.ask(peer, ref.frame, ref.peer, record.round):
                        return
            except DecentralError as error:
                state.on_event("catch_up_failed", {"why": str(error)})

        async with anyio.create_task_group() as group:
            for turn, ref in enumerate(missing):
                group.start_soon(fetch, turn, ref)
        return all(ref.frame in state.store for ref in record.frames)

    async def _adopt_if_heavier(self, peer: PeerId) -> None:
        """Compare before a byte of state is fetched; adopt what is heavier and hangs together."""
        index, head = await self.snapshots.index(peer)
        if head.weight <= self.state.head.weight:
            return
        branch = await self._branch_to(peer, head)
        if branch.shared is None and peer not in self.state.head.members and self._most_stand_here():
            raise PayloadError(
                "nobody can check its chain, it is no member, and most members stand on ours; ask another"
            )
        tensors = {} if self.state.gossips else (await self.snapshots.tensors(peer, index, head)).tensors
        await self.driver.adoption.adopt(head, tensors, branch)

    async def _branch_to(self, peer: PeerId, claimed: Head) -> Branch:
        """The way from our chain to ``claimed``, checked. Unknown when it left ours longer ago than peers remember."""
        answer = await self._ask_chain(peer)
        shared = answer.shared
        if shared is None or not answer.commits:
            return Branch(None)
        commits, head = list(answer.commits), self._rules.last(shared, answer.commits)
        while answer.commits and head.round < claimed.round:  # an answer holds only so many bytes
            if len(commits) > LONGEST:
                raise PayloadError(f"its chain goes on after {len(commits)} commits, more than peers keep; ask another")
            answer = await self._ask_chain(peer, [(head.round, head.hash)])
            head = self._rules.last(head, answer.commits)  # here: one made up would go on for as long as it is asked
            commits += answer.commits
        return checked_branch(self.state.machine.state.history, shared, commits, claimed, self._rules)

    def _most_stand_here(self) -> bool:
        """Whether more than half of the other members that are here say that they stand on its chain."""
        history, members = self.state.machine.state.history, self.state.head.members
        fellows = [lease for peer, lease in self.directory.live().items() if peer in members]
        return 2 * sum(history.at((one.round, one.digest)) is not None for one in fellows) > len(fellows)


def split_commits(answer: bytes) -> list[Commit]:
    """The commits of a chain answer. Raises PayloadError."""
    commits, at = [], 0
    while at < len(answer):
        if at + LENGTH.size > len(answer):
            raise PayloadError("chain answer ends inside a length; drop its sender")
        (nbytes,) = LENGTH.unpack_from(answer, at)
        at += LENGTH.size
        if nbytes > len(answer) - at:
            raise PayloadError("chain answer ends inside a commit; drop its sender")
        message = decode(answer[at : at + nbytes])
        if not isinstance(message, Commit):
            raise PayloadError(f"chain answer holds a {type(message).__name__}; drop its sender")
        commits.append(message)
        at += nbytes
    return commits
