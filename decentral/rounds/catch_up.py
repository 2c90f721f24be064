"""The way of a peer to the head of the chain: replay of the commits it missed, or a snapshot of a heavier branch.

Replay costs the frames of the missed rounds: with 64 of 4096 values kept 0.46 % of a snapshot per round and
contributor; a snapshot is fetched when that may come to more. It costs the anchor and the outer state, striped over the
donors that stand at the same commit; every chunk is checked by its hash and the whole by the anchor's digest before
anything is touched. `Donor` is the other side.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from decentral.consensus.acceptance import note_followers, takes_commit
from decentral.consensus.chain import LENGTH as LONGEST
from decentral.consensus.chain import Branch, Head, History, Place, Rules, check_branch, rank_of, removals
from decentral.consensus.learner import RECENT, find_oldest_head, remember_before
from decentral.errors import DecentralError, PayloadError, PeerUnreachable, TransportError
from decentral.replica.contents import MAKERS
from decentral.rounds.driver import Driver
from decentral.rounds.local_state import tell_unexpected
from decentral.rounds.snapshots import CHAIN, CHAIN_LIMIT, LENGTH, OLDEST, SHARED, TIMEOUT, WHERE, Donor, SnapshotFetch
from decentral.state.snapshot import SnapshotIndex
from decentral.transport.requests import request
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import Digest, PeerId, peer_name
from decentral.wire.messages import Commit, FrameRef, decode

ASKED = 4  # other peers asked for the missed commits before a snapshot is fetched
SLOW = 5.0  # s after which the next is asked, too
IN_TIME = 4 * TIMEOUT  # s for all of a chain answer: 8 MiB at 70 kB/s


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a holder about our chain: where it last was the same as its own, and its commits after that."""

    shared: Head | None = None  # None: it knows none of the places that we named
    commits: tuple[Commit, ...] = ()  # as many as it still has and fit


class Chains:
    """The chains of others, as they show them: nothing but the form of it is checked here."""

    def __init__(self, driver: Driver) -> None:
        self.state, self.transport = driver.state, driver.swarm.transport
        self.rules = Rules(driver.state.terms.voting, driver.state.terms.num_fragments)

    async def _request(self, holder: PeerId, protocol: str, body: bytes) -> bytes:
        """Return all of an answer, in time: bytes that trickle hold up whoever waits for them. Raises
        TransportError.
        """
        with anyio.move_on_after(IN_TIME):
            return await request(self.transport, holder, protocol, body, limit=CHAIN_LIMIT, timeout=TIMEOUT)
        raise TransportError(f"{peer_name(holder)}: {protocol} was not whole within {IN_TIME:g} s; ask another peer")

    async def since(self, holder: PeerId, places: Sequence[Place] = ()) -> Answer:
        """Ask where ``holder``'s chain leaves ours (or ``places``), and what it committed since. Raises
        PayloadError.
        """
        places = places or self.state.machine.state.history.locator()
        body = b"".join(WHERE.pack(*place) for place in places)
        try:
            data = await self._request(holder, CHAIN, body)
        except TransportError:
            return Answer()
        if len(data) < SHARED.size:
            return Answer()
        (round_,) = SHARED.unpack_from(data)
        shared = self.state.machine.state.history.newest_of(place for place in places if place[0] == round_)
        return Answer(shared, tuple(split_commits(data[SHARED.size :])))

    async def since_its_oldest(self, holder: PeerId) -> Answer:
        """Ask where ``holder``'s memory begins, if that is on our chain, and what it committed since: the places that
        we name lie apart, and it may remember no further than to one in between. Raises PayloadError.
        """
        start, commits = await self.oldest(holder)
        shared = None if start is None else self.state.machine.state.history.at((start.round, start.hash))
        return Answer(shared, tuple(commits))

    async def oldest(self, holder: PeerId) -> tuple[Head | None, Sequence[Commit]]:
        """Ask for its oldest head, and all that it has from there. None: it cannot say now, or does not know how."""
        try:
            data = await self._request(holder, OLDEST, b"")
        except TransportError:
            return None, ()
        return split_oldest(data) if data else (None, ())

    async def all_of(self, peer: PeerId, start: Head, first: Sequence[Commit], claimed: Head) -> Sequence[Commit]:
        """Return the commits from ``start`` to ``claimed``, the ``first`` among them: an answer holds only so many
        bytes.
        """
        commits, head, more = list(first), self.rules.last(start, first), first
        while more and head.round < claimed.round:
            if len(commits) > LONGEST:
                raise PayloadError(f"its chain goes on after {len(commits)} commits, more than peers keep; ask another")
            more = (await self.since(peer, [(head.round, head.hash)])).commits
            head = self.rules.last(head, more)  # here: one made up would go on for as long as it is asked
            commits += more
        return commits

    async def went_through(self, peer: PeerId, head: Head) -> bool:
        """Tell whether the chain of ``peer`` went through ``head``."""
        with suppress(TransportError, PayloadError):
            data = await self._request(peer, CHAIN, WHERE.pack(head.round, head.hash))
            return len(data) >= SHARED.size and SHARED.unpack_from(data)[0] == head.round
        return False


# ---- remembering ----
#
# Who came by a snapshot, or lost a disk, knows nothing of before; and two of whom neither remembers where they
# parted can compare nothing. Each record names the one before it by its hash, so nobody can make up what led to
# where this peer stands.


class Memory:
    """The commits that one peer keeps, made longer by what others remember of its chain."""

    def __init__(self, driver: Driver, chains: Chains) -> None:
        self.state, self.directory, self.chains = driver.state, driver.swarm.directory, chains

    async def run(self) -> None:
        """Ask peers on this peer's chain for what was before its memory begins, one after the other."""
        asked: dict[PeerId, Digest] = {}  # and where it began then
        while True:
            await anyio.sleep(self.state.terms.lease / 4)
            begins = find_oldest_head(self.state.machine.state)
            there = [peer for peer in self._on_our_chain() if asked.get(peer) != begins.hash]
            if begins.round == 0 or len(self.state.machine.state.recent) >= RECENT or not there:
                continue
            asked = {peer: place for peer, place in asked.items() if place == begins.hash}
            asked[there[0]] = begins.hash
            try:
                await self._ask_what_was_before(there[0], begins)
            except PayloadError as error:
                self.state.on_event("catch_up_failed", {"why": str(error)})

    def _on_our_chain(self) -> list[PeerId]:
        head, history = self.state.head, self.state.machine.state.history
        live = self.directory.live()
        here = [peer for peer, lease in live.items() if history.at((lease.round, lease.digest)) is not None]
        return sorted(here, key=lambda peer: peer not in head.members)

    async def _ask_what_was_before(self, peer: PeerId, begins: Head) -> None:
        start, first = await self.chains.oldest(peer)
        if start is None or start.round >= begins.round:
            return
        commits = await self.chains.all_of(peer, start, first, begins)
        branch = check_branch(History(start), start, commits, begins, self.chains.rules)
        state = self.state.machine.state
        if find_oldest_head(state).hash == begins.hash:  # else it went over to another branch meanwhile
            remember_before(state, start, branch.heads, commits[: len(branch.heads)])


# ---- a head that no record leads to ----
#
# Who was away for longer than peers remember commits, or was cut off for as long, cannot check how the chain went
# on. Then it takes the word of those it knows, of all who were members at a head that it remembers: the head that
# more of those who answer stand behind than members stand behind its own, itself included, and where those are as
# many the heavier. All of the state is named by them, the outer state too, which no anchor's digest covers. Who
# holds records that do not lead to the head that it names is not heard. What this peer had is kept aside.

Said = dict[PeerId, tuple[SnapshotIndex, Head]]  # what each can give, and where its chain stands there


class Poll:
    """The question to all members which head they stand behind, where no record leads to one."""

    def __init__(self, driver: Driver, chains: Chains, snapshots: SnapshotFetch) -> None:
        self.state, self.directory = driver.state, driver.swarm.directory
        self.chains, self.snapshots = chains, snapshots

    async def find_donor(self, first: PeerId) -> tuple[PeerId, SnapshotIndex, Head] | None:
        """Return a donor that most members here stand behind, and what it can give; None: they do not agree.

        Raises PayloadError where no more stand behind its head than behind ours.
        """
        electors = self._electors(first)
        said = await self._ask_indices(electors)
        group = self._largest_group(said)
        if not group:
            return None
        index, head = said[group[0]]
        named_it = set(group)
        records = await self._certify(group, head)
        if not group:
            return None
        for liar in named_it.difference(group):  # its word counts for neither side
            electors.remove(liar)
            del said[liar]
        others = {peer: other for peer, (_, other) in said.items() if peer not in group}
        if any(other.hash == head.hash for other in others.values()):
            return None  # of one head two states are shown
        passed = [peer for peer in others if await self.chains.went_through(peer, head)]
        if passed and len(group) == 1 and not self.state.gossips:
            return None  # all are on their way, and nobody else shows the state of this head: asked again in a while
        behind_it, behind_ours = len(group) + len(passed), await self._count_for_ours(electors, said, others, passed)
        if (behind_it, head.weight) <= (behind_ours, self.state.head.weight):
            raise PayloadError(
                "nobody can check its chain, and of those who answer fewer stand behind it than behind ours; drop it"
            )
        asked, named = len(said), behind_it
        at = {"round": head.round, "outer_step": head.outer_step}
        self.state.on_event("unchecked", {**at, "asked": asked, "named": named, "records": records})
        return (first if first in group else group[0]), index, head

    def _largest_group(self, said: Said) -> list[PeerId]:
        """Return the peers that name one head and one state of it, most of all; nobody where all are on our chain."""
        groups: dict[tuple[Digest, Digest], list[PeerId]] = defaultdict(list)
        for peer, (index, head) in said.items():
            if self.state.machine.state.history.at((head.round, head.hash)) is None:  # else it is on our chain
                groups[head.hash, b"" if self.state.gossips else index.digest].append(peer)
        return max(groups.values(), key=lambda group: (len(group), said[group[0]][1].weight), default=[])

    async def _count_for_ours(
        self, electors: Sequence[PeerId], said: Said, others: Mapping[PeerId, Head], passed: Container[PeerId]
    ) -> int:
        """Count the members that stand behind our own head, this peer and the silent ones among them."""
        members = self.state.head.members  # a peer that is none, as this one may be, has no chain of its own
        rivals = [peer for peer in others if peer in members and peer not in passed]
        mine = [peer for peer in rivals if await self._is_on_ours(peer, others[peer])]
        # A peer that does not answer stands where it was: an honest one cannot while it applies a commit, and one that
        # lies chose that moment for its question. Nobody stands behind this peer where it is no member, and it may
        # reach one of them only.
        silent = (set(electors) | self._missing_members()) - said.keys() if self.state.is_member else set()
        return len(mine) + len(silent) + self.state.is_member

    def _missing_members(self) -> set[PeerId]:
        """Return the members that are silent, and not yet given up."""
        head, presence = self.state.head, self.state.machine.state.presence
        return set(head.members) - presence.given_up() - {self.state.me}

    async def _certify(self, group: list[PeerId], head: Head) -> int:
        """Count the records that lead to ``head`` from the oldest that one of ``group`` holds, each with its votes.

        0 where nobody holds any: they took it over themselves. A peer whose records lead elsewhere is removed from
        ``group``.
        """
        for peer in tuple(group):
            try:
                start, first = await self.chains.oldest(peer)
                if start is None:
                    continue
                commits = await self.chains.all_of(peer, start, first, head)
                if records := check_branch(History(start), start, commits, head, self.chains.rules).records:
                    return len(records)
            except PayloadError as error:
                self.state.on_event("catch_up_failed", {"why": str(error)})
                group.remove(peer)
        return 0

    async def _is_on_ours(self, peer: PeerId, head: Head) -> bool:
        """Tell whether a peer at ``head`` is on this peer's chain, behind it or further on."""
        ours = self.state.head
        behind = self.state.machine.state.history.at((head.round, head.hash)) is not None
        return behind or await self.chains.went_through(peer, ours)

    def _electors(self, first: PeerId) -> list[PeerId]:
        """Return the peers here that this peer knows to belong to the run; all that are here, where it knows fewer than
        two: alone it cannot tell which of two peers speaks for the others.
        """
        known, live = self.state.machine.state.history.members(), list(self.directory.live())
        found = [peer for peer in live if peer in known]
        return found if len(found) > 1 else live or [first]

    async def _ask_indices(self, peers: Sequence[PeerId]) -> Said:
        """Return what each can give now; asked of all at once, so that few rounds pass in between."""
        said: Said = {}

        async def ask(peer: PeerId) -> None:
            with suppress(TransportError, PayloadError), anyio.move_on_after(TIMEOUT):
                said[peer] = await self.snapshots.index(peer)

        async with anyio.create_task_group() as group:
            for peer in peers:
                group.start_soon(ask, peer)
        return said


# ---- catching up ----


class CatchUp:
    """The asking side of one peer; its `Donor` is the serving side."""

    def __init__(self, driver: Driver, folder: Path | None) -> None:
        """``folder``: for the chunks of a snapshot that is being fetched."""
        self.driver, self.state = driver, driver.state
        self.directory, self.chains = driver.swarm.directory, Chains(driver)
        self.snapshots = SnapshotFetch(driver.state, driver.swarm, folder)
        self.donor = Donor(driver.state, driver.swarm.transport)
        self.memory, self.poll = Memory(driver, self.chains), Poll(driver, self.chains, self.snapshots)

    async def run(self) -> None:
        """Catch up with whom the rounds ask for, until cancelled."""
        while True:
            peer = await self.state.catch_up.next()
            if peer is None:
                continue
            led_on = False
            try:
                led_on = await self._catch_up(peer)
            except PeerUnreachable as error:  # as soon as it is noticed again
                self.state.on_event("catch_up_failed", {"why": str(error)})
                continue
            except DecentralError as error:
                self.state.on_event("catch_up_failed", {"why": str(error)})
            except Exception as error:  # noqa: BLE001  told with its traceback
                tell_unexpected(self.state.on_event, "catching up", error)
            (self.state.catch_up.led_on if led_on else self.state.catch_up.led_nowhere)(peer)

    async def _catch_up(self, peer: PeerId) -> bool:
        """Go on from this peer's head by what ``peer`` has, or another; tell whether that led anywhere."""
        head = self.state.head
        if head.anchor is None:
            return True  # nobody was asked
        doubted: set[PeerId] = set()
        found = await self._ask_in_turn(peer, head, doubted)
        if found is None:
            return peer not in doubted and await self._adopt_if_better(peer)
        holder, missed = found
        if self.is_cheap(missed) and await self.replay(holder, missed):
            self.state.catch_up.drop()
            return True
        return await self._adopt_if_better(holder)  # of its chain it is known that it goes on from ours

    async def _ask_in_turn(
        self, peer: PeerId, head: Head, doubted: set[PeerId]
    ) -> tuple[PeerId, tuple[Commit, ...]] | None:
        """Find a holder of what this peer missed, and that, checked; ``doubted``: peers whose commits are not taken.

        The next is asked when the one before has answered that it has nothing (one that joined later does not know the
        records before it), or has not answered for some seconds: a slow one kept a peer back for as long as it liked.
        """
        found: list[tuple[PeerId, tuple[Commit, ...]]] = []
        asked, waited_for, answered = set[PeerId](), set[PeerId](), anyio.Event()

        async def ask(holder: PeerId) -> None:
            missed = await self._ask_missed(holder, head)
            if missed is None:
                doubted.add(holder)
            elif missed and not takes_commit(self.state.machine.state, missed[0]):
                doubted.add(holder)
                self._tell_refused(holder, missed)
            elif missed:
                found.append((holder, missed))
                group.cancel_scope.cancel()
            waited_for.discard(holder)
            answered.set()

        async with anyio.create_task_group() as group:
            while True:
                answered = anyio.Event()
                # Looked up anew each time: who comes back knows of the others one by one.
                more = [one for one in (peer, *self._others(peer, head)) if one not in asked]
                if more and len(asked) <= ASKED:
                    asked.add(more[0])
                    waited_for.add(more[0])
                    group.start_soon(ask, more[0])
                elif not waited_for:
                    break
                with anyio.move_on_after(SLOW):
                    await answered.wait()
        return found[0] if found else None

    def _tell_refused(self, peer: PeerId, commits: Sequence[Commit]) -> None:
        """Tell that the first of these records gives up peers that are here: nobody who hears them takes it. Every peer
        on that chain, asked or not, is silent on this one.
        """
        record, beyond = commits[0].record, {(commit.record.round, commit.record.hash) for commit in commits}
        there = [other for other, lease in self.directory.live().items() if (lease.round, lease.digest) in beyond]
        for other in (peer, *there):
            self.driver.watch.note_parted(other)
        dropped = [peer_name(one) for one in sorted(removals(record))]
        at = {"round": record.round, "outer_step": record.outer_step + 1}
        self.state.on_event("refused", {**at, "peer": peer_name(peer), "gives_up": dropped})

    def _others(self, peer: PeerId, head: Head) -> list[PeerId]:
        """Return the peers to ask besides ``peer``: those that say they are ahead first, and members before
        newcomers.
        """
        live = self.directory.live()
        others = [other for other in live if other != peer]
        others.sort(key=lambda other: (live[other].round <= head.round, other not in head.members))
        return others[:ASKED]

    async def _ask_missed(self, holder: PeerId, head: Head) -> tuple[Commit, ...] | None:
        """Return what ``holder`` says was committed after ``head``, checked before anything is reckoned from it: one
        flipped bit in the number of a fragment ended a peer. () where it does not know, None where it says what cannot
        be: one that lies keeps nobody from asking the next.
        """
        try:
            answer = await self.chains.since(holder)
            if answer.shared is None or answer.shared.hash != head.hash:
                return ()
            self.chains.rules.last(answer.shared, answer.commits)
            self._note_followers(answer.commits)
        except PayloadError as error:
            self.state.on_event("catch_up_failed", {"why": str(error)})
            return None
        return answer.commits

    def is_cheap(self, commits: Sequence[Commit]) -> bool:
        """Tell whether the missed frames surely take fewer bytes than a snapshot."""
        replica, nbytes = self.state.replica, 0
        for record in (commit.record for commit in commits):
            missing = sum(ref.frame not in self.state.store for ref in record.frames)
            tails = min(missing, MAKERS) if record.contributors else missing
            channels = len(replica.due(record.outer_step)) if replica.agrees else 1  # gossip commits what it merges
            shapes = replica.shapes(record.fragment) * channels
            whole = HEADER_NBYTES + replica.codec.max_body_nbytes(shapes, channels)
            nbytes += missing * whole // max(1, len(record.partition)) + tails * replica.tail.nbytes(record.fragment)
        return nbytes <= self.snapshots.layouts.nbytes

    async def replay(self, holder: PeerId, commits: Sequence[Commit]) -> bool:
        """Apply the commits in order; False when a frame of one is nowhere to be had any more."""
        for number, commit in enumerate(commits):
            if commit.record.round <= self.state.head.round:
                continue  # it came from its leader while this peer asked for it
            if not await self._fetch_frames(holder, commit):
                return False
            if not takes_commit(self.state.machine.state, commit):
                self._tell_refused(holder, commits[number:])
                return True  # as far as this peer goes with it
            await self.driver.frames.feed(holder, commit)
        return True

    async def _fetch_frames(self, holder: PeerId, commit: Commit) -> bool:
        """Get the frames that ``commit`` names, from all who have it at once; tell whether all are here.

        The machine then decides on the commit as if it had just come.
        """
        state, record = self.state, commit.record
        if record.contributors:
            self.driver.frames.inbox.expect(record)
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

    async def _adopt_if_better(self, peer: PeerId) -> bool:
        """Compare before a byte of state is fetched; adopt the branch that ranks higher and hangs together.

        Tell whether that was done.
        """
        index, head = await self.snapshots.index(peer)
        if self.state.machine.state.history.at((head.round, head.hash)) is not None:
            return False  # it is behind, on our chain
        branch = await self._branch_to(peer, head)
        if branch.shared is None:
            self.driver.watch.note_parted(peer)
            named = await self.poll.find_donor(peer)
            if named is None:
                return False
            peer, index, head = named
        elif not self._ranks_higher(branch):
            self.driver.watch.note_parted(peer)
            return False
        tensors = {} if self.state.gossips else (await self.snapshots.tensors(peer, index, head)).tensors
        await self.driver.adoption.adopt(head, tensors, branch)
        return True

    def _ranks_higher(self, branch: Branch) -> bool:
        state = self.state.machine.state
        assert branch.shared is not None
        ours = rank_of(state.history.since(branch.shared), state.terms.voting)
        return rank_of((branch.shared, *branch.heads), state.terms.voting) > ours

    async def _branch_to(self, peer: PeerId, claimed: Head) -> Branch:
        """Return the way from our chain to ``claimed``, checked. Unknown when it left ours longer ago than peers
        remember.
        """
        answer = await self.chains.since(peer)
        if answer.shared is None:
            answer = await self.chains.since_its_oldest(peer)
        shared = answer.shared
        if shared is None or not answer.commits:
            return Branch(None)
        commits = await self.chains.all_of(peer, shared, answer.commits, claimed)
        self._check_taken(peer, shared, commits)
        return check_branch(self.state.machine.state.history, shared, commits, claimed, self.chains.rules)

    def _note_followers(self, commits: Sequence[Commit]) -> None:
        places = {peer: (lease.round, lease.digest) for peer, lease in self.directory.live().items()}
        note_followers(self.state.machine.state, commits, places)

    def _check_taken(self, peer: PeerId, shared: Head, commits: Sequence[Commit]) -> None:
        """Raise PayloadError where they go on from our own head by giving up peers that are here."""
        self._note_followers(commits)
        if shared.hash == self.state.head.hash and not takes_commit(self.state.machine.state, commits[0]):
            self._tell_refused(peer, commits)
            raise PayloadError("its chain goes on without peers that are here; ask another")


def split_oldest(answer: bytes) -> tuple[Head, list[Commit]]:
    """Read a head, and the commits after it. Raises PayloadError."""
    at, (nbytes,) = LENGTH.size, LENGTH.unpack_from(answer.ljust(LENGTH.size, b"\0"))
    try:
        head = Head.from_dict(json.loads(answer[at : at + nbytes]))
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"oldest head: {error}; drop its sender") from None
    return head, split_commits(answer[at + nbytes :])


def split_commits(answer: bytes) -> list[Commit]:
    """Read the commits of a chain answer. Raises PayloadError."""
    commits, at = list[Commit](), 0
    while at < len(answer):
        if at + LENGTH.size > len(answer):
            raise PayloadError("chain answer ends inside a length; drop its sender")
        (nbytes,) = LENGTH.unpack_from(answer, at)
        at += LENGTH.size
        if nbytes > len(answer) - at:
            raise PayloadError("chain answer ends inside a commit; drop its sender")
        if len(commits) == RECENT:
            raise PayloadError(f"chain answer of more than {RECENT} commits, which nobody keeps; drop its sender")
        message = decode(answer[at : at + nbytes])
        if not isinstance(message, Commit):
            raise PayloadError(f"chain answer holds a {type(message).__name__}; drop its sender")
        commits.append(message)
        at += nbytes
    return commits
