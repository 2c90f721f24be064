"""A swarm of round machines without network, clock or disk: messages in a list, time as a number."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from decentral.consensus.chain import SEATS, Head, Voting, leaders, moves_anchor
from decentral.consensus.machine import TICK, RoundMachine
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import (
    CatchUpWith,
    Decide,
    Effect,
    Fetch,
    Mistake,
    Persist,
    RoundTerms,
    Send,
    SendSlices,
)
from decentral.errors import PayloadError
from decentral.rounds.reduce import partition
from decentral.wire.frames import FrameKind, Header, claims_of
from decentral.wire.keys import PeerId, Signer
from decentral.wire.messages import (
    Commit,
    FrameRef,
    JoinRequest,
    Message,
    Offer,
    Proposal,
    Record,
    ReducePlan,
    join_text,
    vote_text,
)

RUN = bytes(range(32))
NUMEL = 3 * 4096 + 17


def signer_of(number: int) -> Signer:
    seed = hashlib.blake2b(b"peer" + number.to_bytes(4, "little"), digest_size=32).digest()
    return Signer(seed)


def digest_of(*words: object) -> bytes:
    return hashlib.blake2b(repr(words).encode(), digest_size=32).digest()


def join_request(signer: Signer, round_: int, digest: bytes) -> JoinRequest:
    return JoinRequest(round_, digest, signer.sign(join_text(RUN, round_, digest)))


def proposal_of(signer: Signer, ballot: int, record: Record) -> Proposal:
    return Proposal(ballot, record, vote_of(signer, ballot, record))


def vote_of(signer: Signer, ballot: int, record: Record) -> bytes:
    return signer.sign(vote_text(record.run, record.epoch, record.round, ballot, record.hash))


@dataclass
class Disk:
    """What survives a crash."""

    acceptor: bytes | None = None
    log: list[Commit] = field(default_factory=list)
    frames: dict[bytes, Header] = field(default_factory=dict)  # of the record voted for


@dataclass
class Host:
    machine: RoundMachine
    disk: Disk
    alive: bool = True
    frames: dict[bytes, Header] = field(default_factory=dict)
    caught_up_with: list[PeerId] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


class Swarm:
    """Machines that exchange messages in a seeded order; a peer can be killed before any delivery."""

    def __init__(
        self,
        num_peers: int,
        *,
        reduce: bool = False,
        rounds: int = 1000,
        seed: int = 0,
        min_peers: int = 1,
        quorum: int = 0,
        grace: float = 0.0,
        max_staleness: int = 0,
        seats: int = SEATS,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.signers = sorted((signer_of(i) for i in range(num_peers)), key=lambda s: s.peer)
        self.members = tuple(s.peer for s in self.signers)
        self.reduce = reduce
        self.terms = RoundTerms(
            num_fragments=1,
            rounds=rounds,
            min_peers=min_peers,
            floor=1.0,
            ceiling=10.0,
            patience=2.0,
            partition=(lambda f, owners: partition(NUMEL, owners)) if reduce else None,
            quorum=quorum,
            grace=grace,
            max_staleness=max_staleness,
            voting=Voting(seats),
        )
        self.queue: list[tuple[PeerId, PeerId, Message | tuple[bytes, Header]]] = []
        self.delivered = 0
        self.asks_again = False  # whether who was left out asks to be let in, as the driver does
        self.on_delivery: Callable[[int], None] = lambda count: None
        self.hosts: dict[PeerId, Host] = {}
        self.lose: Callable[[PeerId, PeerId, object], bool] = lambda a, b, m: False
        self.stale: dict[PeerId, int] = {}  # outer steps that the progress of some is old
        self.summaries: dict[PeerId, bytes] = {}
        self.slices: dict[tuple[int, int, PeerId], set[PeerId]] = {}
        for signer in self.signers:
            self.start(signer, Disk())

    # ---- life and death ----

    def genesis(self) -> Head:
        return Head(RUN, 0, 0, 0, digest_of("genesis"), digest_of("anchor", 0), self.members)

    def start(self, signer: Signer, disk: Disk) -> None:
        head, recent = self.genesis(), []
        for commit in disk.log:
            head = self._after(head, commit)
            recent.append(commit)
        acceptor = None if disk.acceptor is None else Acceptor.from_bytes(disk.acceptor)
        machine = RoundMachine(signer, head, self.terms, self.now, acceptor)
        for commit in recent:
            machine.state.recent[commit.record.round] = commit
        self.hosts[signer.peer] = Host(machine, disk, frames=dict(disk.frames))
        machine.state.held.update({frame: kept for frame, kept in disk.frames.items() if kept.round > head.round})

    def signer(self, peer: PeerId) -> Signer:
        return next(one for one in self.signers if one.peer == peer)

    def kill(self, peer: PeerId) -> None:
        self.hosts[peer].alive = False

    def restart(self, peer: PeerId) -> None:
        signer = next(s for s in self.signers if s.peer == peer)
        self.start(signer, self.hosts[peer].disk)
        for other in self.alive():
            self.hosts[other].machine.state.presence.unreachable.discard(peer)

    def leave(self, leaver: PeerId, to: Iterable[PeerId] | None = None) -> None:
        """Its farewell reaches those of ``to`` at once: all who live, unless told otherwise."""
        farewell = self.hosts[leaver].machine.leave()
        for peer in self.alive() if to is None else to:
            if peer != leaver:
                self.do(peer, self.hosts[peer].machine.receive(leaver, farewell, self.now))

    def come_back(self, peer: PeerId) -> None:
        """It votes again, and says so."""
        machine = self.hosts[peer].machine
        machine.stay()
        request = join_request(machine.state.signer, machine.head.round, machine.head.hash)
        self.queue += [(peer, other, request) for other in machine.head.members if other != peer]

    def alive(self) -> list[PeerId]:
        return [peer for peer, host in self.hosts.items() if host.alive]

    def lose_leases(self, *, gone: bool) -> None:
        dead = frozenset(peer for peer, host in self.hosts.items() if not host.alive)
        for peer in self.alive():
            self.do(peer, self.hosts[peer].machine.liveness(dead, dead if gone else frozenset(), self.now))

    @property
    def head(self) -> Head:
        """Where the first member stands."""
        return self.hosts[self.members[0]].machine.head

    def leaders(self) -> list[PeerId]:
        """Of the round after that: who leads each ballot."""
        return list(leaders(self.head))

    def machine(self, peer: PeerId) -> RoundMachine:
        return self.hosts[peer].machine

    def at_delivery(self, acts: dict[int, Callable[[], object]]) -> None:
        """Do something right before a message is delivered, by how many were delivered before it, itself counted."""
        self.on_delivery = lambda count: acts.get(count, lambda: None)()

    # ---- contributing ----

    def offer(self, peer: PeerId) -> None:
        machine = self.hosts[peer].machine
        head = machine.head
        if head.anchor is None or peer not in head.members or peer in machine.state.round.offers or head.final:
            return
        frame = digest_of("frame", peer, head.round, head.hash)
        based, summary = head.outer_step - self.stale.get(peer, 0), self.summaries.get(peer, b"")
        header = replace(self.header(FrameKind.CONTRIBUTION, peer, head), claims=claims_of(based, summary))
        offer = Offer(head.epoch, head.round + 1, 0, head.anchor, frame, 100, 5, 50, based, summary)
        if not self.reduce:
            self.do(peer, machine.hold(frame, header, self.now))
            self.hosts[peer].frames[frame] = header
            self.push(peer, frame, header)
        self.do(peer, machine.offer(offer, self.now))

    def offer_all(self) -> None:
        for peer in self.alive():
            self.offer(peer)

    def push(self, sender: PeerId, frame: bytes, header: Header) -> None:
        for peer in self.hosts[sender].machine.head.members:
            if peer != sender:
                self.queue.append((sender, peer, (frame, header)))

    def header(self, kind: FrameKind, peer: PeerId, head: Head, part: int = 0, parts: int = 1, plan: int = 0) -> Header:
        assert head.anchor is not None
        made = Header(kind, RUN, head.epoch, head.round + 1, 0, part, parts, plan, head.anchor, peer, 5, 50)
        return replace(made, claims=claims_of(head.outer_step, b""))

    # ---- running ----

    def run(self, until: Callable[[], bool], limit: float = 200.0) -> bool:
        """Deliver and let time pass until ``until`` holds; False when ``limit`` seconds were not enough."""
        end = self.now + limit
        while not until():
            if self.queue:
                self.deliver_one()
            elif self.now >= end:
                return False
            else:
                self.now += TICK
                for peer in self.alive():
                    self.do(peer, self.hosts[peer].machine.tick(self.now))
                    if self.asks_again and peer not in self.hosts[peer].machine.head.members:
                        self.come_back(peer)
        return True

    def deliver_one(self) -> None:
        sender, to, message = self.queue.pop(self.random.randrange(len(self.queue)))
        self.delivered += 1
        self.on_delivery(self.delivered)
        if self.lose(sender, to, message):
            return
        if not self.hosts[to].alive:
            if self.hosts[sender].alive:
                self.do(sender, self.hosts[sender].machine.unreachable(to, self.now))
            return
        host = self.hosts[to]
        if isinstance(message, tuple):
            frame, header = message
            host.frames[frame] = header
            if header.round > host.machine.head.round:
                self.do(to, host.machine.hold(frame, header, self.now))
            return
        try:
            self.do(to, host.machine.receive(sender, message, self.now))
        except PayloadError as error:
            raise AssertionError(f"an honest peer's message was refused: {error}") from error

    def do(self, peer: PeerId, effects: list[Effect]) -> None:
        host = self.hosts[peer]
        for effect in effects:
            if not host.alive:
                return
            if isinstance(effect, Send):
                self.queue.append((peer, effect.to, effect.message))
            elif isinstance(effect, Persist):
                accepted = effect.acceptor.accepted
                named = () if accepted is None else accepted.frames
                host.disk.frames = {ref.frame: host.frames[ref.frame] for ref in named if ref.frame in host.frames}
                host.disk.acceptor = effect.acceptor.to_bytes()
            elif isinstance(effect, Decide):
                assert host.machine.head.round == effect.commit.record.round, "it went on before this was applied"
                host.disk.log.append(effect.commit)
                self.do(peer, host.machine.note_applied(self._anchor(effect.commit), self.now))
            elif isinstance(effect, Fetch):
                self.fetch(peer, effect)
            elif isinstance(effect, SendSlices):
                self._slice(peer, effect.plan)
            elif isinstance(effect, Mistake):
                host.mistakes.append(effect)
            elif isinstance(effect, CatchUpWith):
                self.catch_up(peer, effect.peer)

    def fetch(self, peer: PeerId, effect: Fetch) -> None:
        for holder in effect.holders:
            host = self.hosts[holder]
            if host.alive and effect.frame in host.frames:
                self.queue.append((holder, peer, (effect.frame, host.frames[effect.frame])))
                return

    def catch_up(self, peer: PeerId, ahead: PeerId) -> None:
        """Replay what the other has logged, as the driver does through the chain service."""
        host, other = self.hosts[peer], self.hosts[ahead]
        host.caught_up_with.append(ahead)
        if not other.alive:
            return
        for commit in other.disk.log:
            if commit.record.round == host.machine.head.round + 1 and commit.record.previous == host.machine.head.hash:
                for ref in commit.record.frames:
                    header = other.frames[ref.frame]
                    host.frames[ref.frame] = header
                    self.do(peer, host.machine.hold(ref.frame, header, self.now))
                self.do(peer, host.machine.receive(ahead, commit, self.now))

    def _slice(self, peer: PeerId, plan: ReducePlan) -> None:
        """Slices arrive at once; an owner that has all makes its result."""
        head = self.hosts[peer].machine.head
        if peer in {ref.peer for ref in plan.contributors}:
            for part in range(len(plan.partition)):
                self.slices.setdefault((plan.number, part, plan.partition[part][0]), set()).add(peer)
        for part, (owner, _, _) in enumerate(plan.partition):
            host = self.hosts[owner]
            came = self.slices.get((plan.number, part, owner), set())
            frame = digest_of("result", owner, plan.number, part, head.hash)
            complete = {ref.peer for ref in plan.contributors} <= came
            if host.alive and complete and frame not in host.frames and host.machine.head.hash == head.hash:
                header = self.header(FrameKind.RESULT, owner, head, part, len(plan.partition), plan.number)
                host.frames[frame] = header
                self.push(owner, frame, header)
                self.do(owner, host.machine.hold(frame, header, self.now))

    # ---- what must hold ----

    def _anchor(self, commit: Commit) -> bytes:
        record = commit.record
        return digest_of("anchor", record.hash) if moves_anchor(record) else record.base

    def _after(self, head: Head, commit: Commit) -> Head:
        return replace(head.extended(commit.record), anchor=self._anchor(commit))

    def rounds_done(self, peer: PeerId) -> int:
        return self.hosts[peer].machine.head.outer_step

    def check_agreement(self) -> None:
        """One record per round, over the dead as well: what was logged was logged."""
        chosen: dict[int, bytes] = {}
        for host in self.hosts.values():
            rounds = [commit.record.round for commit in host.disk.log]
            assert rounds == list(range(1, len(rounds) + 1)), "a peer applied a round twice or left one out"
            for commit in host.disk.log:
                assert chosen.setdefault(commit.record.round, commit.record.hash) == commit.record.hash

    def named(self, peer: PeerId) -> list[PeerId]:
        record = self.hosts[peer].disk.log[-1].record
        return [ref.peer for ref in (record.contributors or record.frames)]


def finish_round(swarm, count: int = 1, limit: float = 200.0) -> bool:
    """Let every living member offer until each has ``count`` more outer steps."""
    goal = {peer: swarm.rounds_done(peer) + count for peer in swarm.alive()}

    def done() -> bool:
        behind = [peer for peer in swarm.alive() if swarm.rounds_done(peer) < goal[peer]]
        for peer in behind:
            swarm.offer(peer)
        return not behind

    return swarm.run(done, limit)


def after_a_lost_tail(swarm) -> PeerId:
    """Two of three commit two rounds; then one is away and the other, returned here, forgets both, but not its vote."""
    assert finish_round(swarm)
    kept, cut, late = swarm.members
    swarm.lose = lambda sender, to, message: late in (sender, to)
    while min(swarm.rounds_done(kept), swarm.rounds_done(cut)) < 3:
        swarm.offer_all()
        assert swarm.run(lambda: not swarm.queue)
        swarm.run(lambda: False, 1.0)
    swarm.lose = lambda sender, to, message: kept in (sender, to)
    swarm.hosts[cut].disk.log = swarm.hosts[cut].disk.log[:1]
    swarm.restart(cut)
    return cut


def few_of(seeds: Sequence[int], count: int) -> list[Any]:  # Any: pytest does not name what it takes
    """For ``parametrize``: ``make test`` tries ``count`` of them, and ``make test-long`` the rest."""
    return [seed if n < count else pytest.param(seed, marks=pytest.mark.long) for n, seed in enumerate(seeds)]


def ref(peer: PeerId, frame: bytes) -> FrameRef:
    return FrameRef(peer, frame, 0, 5, 50)


# ---- records of a chain of three peers, made by hand ----

A, B, C = sorted(signer_of(n).peer for n in range(3))


START = Head(RUN, 0, 0, 0, digest_of("genesis"), digest_of("anchor"), (A, B, C))


def record(head: Head, tokens: dict[bytes, int], next_members: tuple[bytes, ...] = (A, B, C)) -> Record:
    frames = tuple(replace(ref(peer, digest_of(peer, head.hash)), tokens=n) for peer, n in sorted(tokens.items()))
    lists = {"members": head.members, "frames": frames, "contributors": (), "partition": ()}
    base = head.anchor or digest_of("anchor", head.hash)
    numbers = {"epoch": head.epoch, "round": head.round + 1, "outer_step": head.outer_step, "fragment": 0, "plan": 0}
    given = {"run": RUN, "previous": head.hash, "base": base, "next_members": next_members, "final": False}
    return Record(**numbers, **lists, **given)


@pytest.fixture
def make_swarm() -> type[Swarm]:
    return Swarm
