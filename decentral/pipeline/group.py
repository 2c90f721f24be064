"""How machines that are too small for a model each become one replica of it: they find each other, and agree.

Who looks for others says so by its lease: it trains no fragment. Of those that look, the one with the lowest id of
eight proposes: it asks each what it has, cuts the model (`decentral.pipeline.cut`), collects a signature of each
member, and hands all of them the sealed record. Machines of one local network come first. A record that is not sealed
is nothing; one that is sealed names each member, and each of them began with it or tells the others that it did not.

A group is no part of the run: its members hold leases, vote and offer as any other peer, each for its own fragments. A
replica of several machines so counts once in every fragment.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Protocol

import anyio

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.flow.waiting import Offload, inline
from decentral.node.node import Node
from decentral.pipeline.cut import MOST_STAGES, Cut, Machine, cut_for
from decentral.pipeline.lines import Boundaries, StageInbox
from decentral.pipeline.turns import busy_share
from decentral.transport import Transport
from decentral.transport.requests import request, serve_requests
from decentral.wire.codecs import from_bytes, to_bytes
from decentral.wire.groups import GROUP, GroupRecord, Offered, Sealed, has_signed, sign_group
from decentral.wire.keys import SIGNATURE_NBYTES, Digest, PeerId, Signer, peer_name

__all__ = ["Formation", "GroupSide", "Seeker", "Wanted"]

ROOM = 2.0  # times as quick as its stage a line is to be: at once, it filled and emptied late (0.81 of what it allows)
ASSUMED = 2.5e6  # bytes/s of an uplink that has not been measured, as presets assume it
GATHER = 3.0  # s for which nobody new came, before a group is proposed: machines of one home start within seconds
ALL_CAME = 15.0  # s for which nobody new came, before a group leaves fragments out
LOOK_EVERY = 0.5  # s
TIMEOUT = 10.0  # s for an answer
NEAR = 0.01  # s, there and back: of machines in one home
AVOIDED = 120.0  # s for which who did not do its part is in no group with this peer
ROW = 2 * MOST_STAGES  # who look, of which the first proposes
WIDENS = 120.0  # s after which a row is of more
TURN = 20.0  # s after which the next one of a row proposes, where nothing came of it
ALONE = 10.0  # s that a group that leaves fragments out lasts at least, before it is ended for somebody to take them
_LONGEST_PAUSE = 3600.0  # s
REMEMBERED = 60.0  # s for which who looked is nobody new
PLEDGED = 15.0  # s for which a member that signed waits for the seal
_ASK, _PLEDGE, _SEAL = b"\0", b"\1", b"\2"
_LIMIT = 1 << 12


@dataclass(frozen=True, slots=True)
class Seeker:
    """A peer that looks for others, as seen from here."""

    peer: PeerId
    homes: frozenset[str]  # local networks that its addresses are in


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that a group is wanted for, as every member of the run sees it, and what this machine has for it."""

    mine: Machine
    work: Sequence[int]  # parameters that a token is multiplied with, of each fragment
    needs: Callable[[range], int]  # bytes of memory that training a part takes
    nbytes: float  # of a token that cross a boundary one way, as float32
    micro_batches: Callable[[int], int]  # of a step, by the number of stages
    holes: Sequence[range] = ()  # fragments that may be left out together, short ones first


class Finder(Protocol):
    """The swarm around a peer that looks for others."""

    def seekers(self) -> Sequence[Seeker]:
        """Return who looks for others now, this peer included, in the order of the ids."""
        ...

    def is_member(self, peer: PeerId) -> bool:
        """Tell whether a peer is in the run: it may have a group already, and room for one more in it."""
        ...


class Formation:
    """The part of one peer in the forming of groups. Made before its transport is entered, as it serves."""

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        run: Digest,
        finder: Finder,
        *,
        on_pledge: Callable[[GroupRecord | None], None],
        on_begin: Callable[[GroupRecord], None],
        offload: Offload = inline,
    ) -> None:
        """``on_pledge`` is told what this peer signed, ``on_begin`` of a group that it is in from now on."""
        self._transport, self._signer, self._run, self._finder = transport, signer, run, finder
        self._on_pledge, self._on_begin, self._offload = on_pledge, on_begin, offload
        self._wanted: Wanted | None = None  # None: this peer looks for nobody
        self._pledge: GroupRecord | None = None
        self._pledged_to: PeerId | None = None
        self._pledged_until = 0.0
        self._left_out: dict[PeerId, float] = {}  # who did not sign, and until when it is not asked again
        serve_requests(transport, GROUP, self._answer, limit=_LIMIT)

    async def look(self, wanted: Wanted | None) -> None:
        """Look for others from now on; None: no more."""
        self._wanted, self._pledge = wanted, None

    async def ask(self, seeker: Seeker) -> Machine | None:
        """Return what a peer that looks has for a group; None: it does not answer, or looks for none just now."""
        try:
            offered = from_bytes(Offered, await self._request(seeker.peer, _ASK))
        except (TransportError, PayloadError):
            return None
        uplink = float(offered.uplink) if offered.uplink else None
        return Machine(offered.memory, float(offered.speed), uplink, seeker.homes)

    async def run(self) -> None:
        """Propose groups while this peer looks for others, until cancelled."""
        known, began, since, tried = dict[PeerId, float](), anyio.current_time(), 0.0, 0.0
        while True:
            await anyio.sleep(LOOK_EVERY)
            now = anyio.current_time()
            if self._wanted is None:  # as most are in a group most of the time, and a row is of all that look
                known, began = {}, now
                continue
            # A row of which none can form a group, for want of memory, becomes one with its neighbours.
            most = ROW * (1 + int((now - began) // WIDENS))
            seekers = row_of(self._transport.peer, self._finder.seekers(), most)
            peers = tuple(seeker.peer for seeker in seekers)
            if not known.keys() >= set(peers):
                since = now
            # Who comes and goes is no news each time.
            known = {peer: at for peer, at in known.items() if now - at < REMEMBERED} | dict.fromkeys(peers, now)
            is_first = len(peers) > 1 and peers[int((now - since) // TURN) % len(peers)] == self._transport.peer
            early = now < max(since, tried) + GATHER
            if self._is_pledged(now) or not is_first or early:
                continue
            wanted = self._wanted if now - since >= ALL_CAME else replace(self._wanted, holes=())
            with suppress(TransportError, PayloadError):  # it is tried again, by another one after a while
                await self._propose(wanted, seekers)
            tried = anyio.current_time()

    # ---- the one that proposes ----

    async def _propose(self, wanted: Wanted, seekers: Sequence[Seeker]) -> bool:
        """Form a group of those that look; tell whether it came to one."""
        machines = await self._ask_all(wanted, seekers)
        chosen, cut = await self._offload(choose, machines, wanted)  # of many fragments there are many cuts
        if cut is None:
            return False
        record = self._describe(chosen, machines, cut, wanted)
        signatures = await self._collect(record)
        now = anyio.current_time()
        self._left_out = {peer: until for peer, until in self._left_out.items() if until > now}
        self._left_out |= {peer: now + AVOIDED for peer in record.members if peer not in signatures}
        if len(signatures) < len(record.members) or self._wanted is None:
            self._pledge = None
            self._on_pledge(None)
            return False
        sealed = Sealed(record, tuple(signatures[peer] for peer in record.members))
        await self._hand_out(sealed)
        self._begin(record)
        return True

    async def _ask_all(self, wanted: Wanted, seekers: Sequence[Seeker]) -> dict[PeerId, Machine]:
        """Return what each has, this peer first, then by nearness to it."""
        me = self._transport.peer
        homes = {seeker.peer: seeker.homes for seeker in seekers}
        found = {me: replace(wanted.mine, home=homes[me])}

        async def ask(seeker: Seeker) -> None:
            if (machine := await self.ask(seeker)) is not None:
                found[seeker.peer] = machine

        async with anyio.create_task_group() as group:
            for seeker in seekers:
                if seeker.peer != me and anyio.current_time() >= self._left_out.get(seeker.peer, 0.0):
                    group.start_soon(ask, seeker)
        near = sorted(found, key=lambda peer: (peer != me, not homes[peer] & homes[me], peer))
        return {peer: found[peer] for peer in near}

    def _describe(
        self, chosen: Sequence[PeerId], machines: Mapping[PeerId, Machine], cut: Cut, wanted: Wanted
    ) -> GroupRecord:
        order = [chosen[place] for place in cut.machines]
        stages = tuple((peer, part.start, part.stop) for peer, part in zip(order, cut.parts, strict=True))
        rounding = choose_rounding([machines[peer] for peer in order], cut, wanted)
        micro_batches = wanted.micro_batches(len(stages))
        return GroupRecord(self._run, secrets.randbits(63), stages, micro_batches, rounding)

    async def _collect(self, record: GroupRecord) -> dict[PeerId, bytes]:
        self._take_pledge(record, self._transport.peer)
        signatures = {self._transport.peer: sign_group(record, self._signer)}

        async def ask(peer: PeerId) -> None:
            try:
                signature = await self._request(peer, _PLEDGE + to_bytes(record))
            except (TransportError, PayloadError):
                return
            if has_signed(record, peer, signature):
                signatures[peer] = signature

        async with anyio.create_task_group() as group:
            for peer in record.members:
                if peer != self._transport.peer:
                    group.start_soon(ask, peer)
        return signatures

    async def _hand_out(self, sealed: Sealed) -> None:
        data = _SEAL + to_bytes(sealed)  # PayloadError where a signature is none

        async def hand(peer: PeerId) -> None:
            try:
                await self._request(peer, data)
            except DecentralError:
                return  # it is not ready then, and the others find out

        async with anyio.create_task_group() as group:
            for peer in sealed.record.members:
                if peer != self._transport.peer:
                    group.start_soon(hand, peer)

    async def _request(self, peer: PeerId, body: bytes) -> bytes:
        return await request(self._transport, peer, GROUP, body, limit=SIGNATURE_NBYTES, timeout=TIMEOUT)

    # ---- those that are asked ----

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        """Answer a peer that proposes. PayloadError."""
        kind, body, wanted = data[:1], data[1:], self._wanted
        looks = peer in {seeker.peer for seeker in self._finder.seekers()}
        if wanted is None or not (looks or (kind == _ASK and self._finder.is_member(peer))):
            raise PayloadError("one of the two looks for no others; drop it")
        if kind == _ASK and not body:
            mine = wanted.mine
            return to_bytes(Offered(mine.memory, max(1, int(mine.speed)), int(mine.uplink or 0)))
        if kind == _PLEDGE:
            record = from_bytes(GroupRecord, body)
            self._check(record, peer, wanted)
            self._take_pledge(record, peer)
            return sign_group(record, self._signer)
        if kind == _SEAL:
            sealed = from_bytes(Sealed, body)
            if sealed.record != self._pledge:
                raise PayloadError(f"{peer_name(peer)} sealed a group that this peer has not signed last; drop it")
            self._begin(sealed.record)
            return b""
        raise PayloadError(f"{peer_name(peer)} asks for something else than a group; drop it")

    def _check(self, record: GroupRecord, peer: PeerId, wanted: Wanted) -> None:
        """Raise PayloadError for a group that this peer does not enter."""
        me, here = self._transport.peer, {seeker.peer for seeker in self._finder.seekers()}
        if self._is_pledged(anyio.current_time()) and peer != self._pledged_to:
            raise PayloadError("this peer has signed for another group just now; ask again later")
        if record.run != self._run or record.fragments != len(wanted.work) or me not in record.members:
            raise PayloadError("a group of another run, or without this peer; drop it")
        if peer not in record.members or not here.issuperset(record.members):
            raise PayloadError("a group of peers that do not look for one; drop it")
        if wanted.needs(record.part_of(me)) > wanted.mine.memory:
            raise PayloadError("a part that this machine has no memory for; cut it anew")
        if record.hole is not None and record.hole not in wanted.holes:
            raise PayloadError("a group that leaves out what the run's terms do not; cut it anew")
        if record.micro_batches != wanted.micro_batches(len(record.stages)):
            raise PayloadError(f"{record.micro_batches} micro-batches do not make up a batch of the run; drop it")

    def _take_pledge(self, record: GroupRecord, proposer: PeerId) -> None:
        self._pledge, self._pledged_to = record, proposer  # whose next one takes its place
        self._pledged_until = anyio.current_time() + PLEDGED
        self._on_pledge(record)

    def _is_pledged(self, now: float) -> bool:
        return self._pledge is not None and now < self._pledged_until

    def _begin(self, record: GroupRecord) -> None:
        self._wanted, self._pledge = None, None
        self._on_begin(record)


# ---- who, and how ----


def row_of(me: PeerId, seekers: Sequence[Seeker], most: int = ROW) -> Sequence[Seeker]:
    """Return those whose ids begin with the same bits as ``me``, as many bits as leave ``most`` on either side; of
    these, where they are more, the part in which it stands.

    So it is no matter to most rows who comes or goes elsewhere. Where it was the place among all, each group that
    formed moved all others, which waited again: of 256 that came together 59 were in groups after 50 s.
    """
    row, bit = seekers, 0
    while True:
        half = [one for one in row if _bit(one.peer, bit) == _bit(me, bit)]
        if min(len(half), len(row) - len(half)) < most:
            break
        row, bit = half, bit + 1
    parts = -(-len(row) // most)
    part = parts * next((n for n, one in enumerate(row) if one.peer == me), 0) // max(1, len(row))
    return [one for n, one in enumerate(row) if parts * n // len(row) == part]


def _bit(peer: PeerId, number: int) -> int:
    return peer[number // 8] >> (7 - number % 8) & 1 if number < 8 * len(peer) else 0


def choose(machines: Mapping[PeerId, Machine], wanted: Wanted) -> tuple[tuple[PeerId, ...], Cut | None]:
    """Return the first two, three or four of the machines, whichever make most tokens a second, and the cut for them.

    None where the memory of none of these holds the model, or as much of it as may not be left out.
    """
    least = min(wanted.needs(range(first, first + 1)) for first in range(len(wanted.work)))
    able = tuple(peer for peer, machine in machines.items() if machine.memory >= least)
    room = sum(_most(wanted, machines[peer].memory) for peer in able[:MOST_STAGES])
    for left_out, holes in groupby((range(0), *wanted.holes), key=len):
        if room + left_out < len(wanted.work):  # which spares thousands of cuts that do not fit
            continue
        found = list(_cuts(machines, able, wanted, tuple(holes)))
        if found:
            _, chosen, cut = max(found, key=lambda one: one[0])
            return chosen, cut
    return (), None


def _most(wanted: Wanted, memory: int) -> int:
    """Return the most neighbouring fragments that a machine has memory for."""
    count = len(wanted.work)
    for most in range(count, 0, -1):
        if any(wanted.needs(range(first, first + most)) <= memory for first in range(count - most + 1)):
            return most
    return 0


def _cuts(
    machines: Mapping[PeerId, Machine], able: Sequence[PeerId], wanted: Wanted, holes: Sequence[range]
) -> Iterator[tuple[float, tuple[PeerId, ...], Cut]]:
    """The best cut for each number of machines, with the tokens a second that it makes."""
    for count in range(2, min(MOST_STAGES, len(able)) + 1):
        chosen = tuple(able[:count])
        # What is not known yet is how exactly states will cross; half of their bytes is what they take at most.
        cut = cut_for([machines[peer] for peer in chosen], wanted.work, wanted.needs, wanted.nbytes / 2, holes)
        if cut is not None:
            yield busy_share(count, wanted.micro_batches(count)) / cut.seconds, chosen, cut


def choose_rounding(stages: Sequence[Machine], cut: Cut, wanted: Wanted) -> int:
    """Return the number of the rounding: as exact as lines carry in half the time of computing, or the shortest."""
    compute = max(
        sum(wanted.work[part.start : part.stop]) / stage.speed for stage, part in zip(stages, cut.parts, strict=True)
    )
    if all(one.home & other.home for one, other in pairwise(stages)):
        return 0
    slowest = max(2 * wanted.nbytes / (stage.uplink or ASSUMED) for stage in stages)
    return next((number for number, share in enumerate((1.0, 0.5)) if slowest * share <= compute / ROOM), 2)


# ---- one peer's side ----
#
# It looks for others or is in a group. The swarm's loop runs it, the training thread asks it.


class GroupSide:
    """The forming of groups and the lines of one, of a peer that shares. Made before its transport is entered."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.record: GroupRecord | None = None  # the group that this peer is in, or is to enter
        self.inbox: StageInbox | None = None  # of the group that it is in
        self.boundaries = Boundaries(node.transport, gives_up=node.manifest.swarm.lease)
        self.formation = Formation(
            node.transport,
            node.signer,
            node.manifest.digest,
            self,
            on_pledge=self.boundaries.expect,
            on_begin=self._begin,
            offload=node.driver.state.offload,
        )
        self._near: frozenset[PeerId] = frozenset()
        self._needs: Callable[[range], int] = len  # bytes that training a part takes; known once it looked
        self._avoided: dict[PeerId, float] = {}  # until when
        self._pause = ALONE  # before a group that leaves fragments out is ended for somebody, twice as long each time

    def seekers(self) -> Sequence[Seeker]:
        """Return who looks for others now, this peer included, in the order of the ids."""
        directory, me = self._node.directory, self._node.driver.state.me
        found = [
            Seeker(peer, frozenset({"here"}) if peer == me or peer in self._near else frozenset({peer_name(peer)}))
            for peer in directory.sharing()
            if peer == me or (directory.has_answered(peer) and not self._is_avoided(peer))
        ]
        return sorted(found, key=lambda seeker: seeker.peer)

    def is_member(self, peer: PeerId) -> bool:
        """Tell whether a peer is in the run."""
        return peer in self._node.driver.head.members

    async def run(self) -> None:
        """Form groups while this peer looks for others, and know who is near, until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.formation.run)
            while True:
                self._near = await self._find_near()
                await anyio.sleep(2.0)

    async def _find_near(self) -> frozenset[PeerId]:
        """Return the peers that are reached at an address of a local network, and answer at once."""
        try:
            paths = await self._node.transport.paths()
        except TransportError:  # as while a daemon is started anew
            return self._near
        seconds = self._node.directory.answer_seconds
        local = {peer for peer, ends in paths.items() if ends and _is_local(ends[0])}
        return frozenset(peer for peer in local if seconds.get(peer, 1.0) < NEAR)

    def _begin(self, record: GroupRecord) -> None:
        self.record = record

    async def look(self, wanted: Wanted | None) -> None:
        """Be in no group, and look for others from now on; None: look no more."""
        self.record, own = None, self._node.directory.own
        if wanted is None:
            own.train(range(0))
        else:
            own.look()
            self._needs = wanted.needs
        await self.formation.look(wanted)

    async def enter(self, inbox: StageInbox) -> None:
        """Move what crosses in a group, and watch its members, until it is no more."""
        self.inbox, record = inbox, inbox.record
        async with anyio.create_task_group() as group:
            group.start_soon(self.boundaries.run, inbox)
            group.start_soon(self.watch, inbox)
            if record.hole is None:
                self._pause = ALONE
            elif self._node.driver.state.me == record.members[0] and len(record.members) < MOST_STAGES:
                group.start_soon(self._fill, inbox, record.hole)
        if self.inbox is inbox:
            self.inbox = None

    async def avoid(self, peer: PeerId) -> None:
        """Be in no group with a peer for a while: it did not do its part."""
        now = anyio.current_time()
        self._avoided = {other: until for other, until in self._avoided.items() if until > now}
        self._avoided[peer] = now + AVOIDED

    def _is_avoided(self, peer: PeerId) -> bool:
        return anyio.current_time() < self._avoided.get(peer, 0.0)

    async def watch(self, inbox: StageInbox) -> None:
        """End a group when the lease of a member does, until it is no more."""
        me, directory = self._node.driver.state.me, self._node.directory
        while not inbox.why:
            for peer in inbox.record.members:
                if peer != me and peer not in directory.live():
                    inbox.end(f"{peer_name(peer)} is gone")
            await anyio.sleep(LOOK_EVERY)

    async def _fill(self, inbox: StageInbox, hole: range) -> None:
        """End a group that leaves fragments out when somebody looks that has memory for them, until it is no more.

        Who says so may not do it: the next one is waited for twice as long. Of several such groups one should end for
        one machine, so each waits for a moment of its own.
        """
        me = self._node.driver.state.me
        self._pause, pause = min(2 * self._pause, _LONGEST_PAUSE), self._pause
        await _until(inbox, pause * (1 + me[-1] / 256))
        while not inbox.why:
            for seeker in self.seekers():
                machine = await self.formation.ask(seeker)
                if machine is not None and machine.memory >= self._needs(hole):
                    inbox.end(f"{peer_name(seeker.peer)} is here for the fragments that were left out")
            await _until(inbox, ALONE)


async def _until(inbox: StageInbox, seconds: float) -> None:
    """Wait so long, or until a group is no more."""
    until = anyio.current_time() + seconds
    while not inbox.why and anyio.current_time() < until:
        await anyio.sleep(LOOK_EVERY)


def _is_local(address: str) -> bool:
    """Tell whether a multiaddr is of a local network, and of no relay."""
    words = address.split("/")
    try:
        return "p2p-circuit" not in words and ipaddress.ip_address(words[2]).is_private
    except (ValueError, IndexError):
        return False
