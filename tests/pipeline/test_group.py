"""How machines that share become groups: real requests on a network in memory, under virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import anyio
import anyio.abc
import pytest

from decentral.errors import PayloadError, TransportError
from decentral.pipeline.cut import Machine, holes_of
from decentral.pipeline.group import PLEDGED, ROW, Formation, Seeker, Wanted, row_of
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request
from decentral.wire.codecs import to_bytes
from decentral.wire.groups import GROUP, GroupRecord, Sealed, sign_group
from decentral.wire.keys import PeerId
from tests.kit.nodes import signer_of

RUN, FRAGMENTS = bytes(32), 12
WANTED = Wanted(
    mine=Machine(6, 1e6),
    work=[10] * FRAGMENTS,
    needs=len,
    nbytes=64.0,
    micro_batches=lambda stages: 4 * stages,
)


class Peer:
    """A peer that looks for others, until it is in a group."""

    def __init__(
        self, network: Network, number: int, wanted: Wanted = WANTED, kind: type[Formation] = Formation
    ) -> None:
        self.network, self.signer, self.wanted = network, signer_of(number), wanted
        self.peer, self.home = self.signer.peer, "here"
        self.transport = network.memory.transport(self.signer)
        self.groups, self.pledges = list[GroupRecord](), list[GroupRecord | None]()
        self.formation = kind(
            self.transport, self.signer, RUN, self, on_pledge=self.pledges.append, on_begin=self._begins
        )

    async def live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self.transport:
            task_status.started()
            await self.formation.run()

    def seekers(self) -> Sequence[Seeker]:
        looking = [one for one in self.network.looking if one in self.network.known_to(self)]
        return sorted((Seeker(one.peer, frozenset({one.home})) for one in looking), key=lambda one: one.peer)

    def is_member(self, peer: PeerId) -> bool:
        return peer in self.network.members

    def _begins(self, record: GroupRecord) -> None:
        self.groups.append(record)
        self.network.looking.remove(self)


class Network:
    def __init__(self) -> None:
        self.memory = MemoryNetwork(latency=0.02)
        self.peers, self.looking, self.members = list[Peer](), list[Peer](), list[PeerId]()

    def known_to(self, peer: Peer) -> Sequence[Peer]:
        return self.peers

    async def add(self, group: Any, *peers: Peer, looks: bool = True) -> None:
        for peer in peers:
            await group.start(peer.live)
            self.peers.append(peer)
            if looks:
                await peer.formation.look(peer.wanted)
                self.looking.append(peer)


def in_virtual_time(script: Callable[[Network, Any], Awaitable[None]]) -> None:
    async def main() -> None:
        network = Network()
        async with anyio.create_task_group() as group:
            await script(network, group)
            group.cancel_scope.cancel()

    run_in_virtual_time(main, seed=0)


async def ask(of: Peer, to: Peer, body: bytes) -> bytes:
    return await request(of.transport, to.peer, GROUP, body, limit=64, timeout=5.0)


def record_of(*peers: Peer, run: bytes = RUN, micro_batches: int = 8) -> GroupRecord:
    each = FRAGMENTS // len(peers)
    stages = tuple((one.peer, each * place, each * (place + 1)) for place, one in enumerate(peers))
    return GroupRecord(run, 7, stages, micro_batches, 0)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_machines_that_look_become_one_group_that_all_have_signed(count: int) -> None:
    async def script(network: Network, group: Any) -> None:
        peers = [Peer(network, number) for number in range(count)]
        await network.add(group, *peers)
        await anyio.sleep(10)
        records = {one.groups[-1] for one in peers}
        (record,) = records
        assert set(record.members) == {one.peer for one in peers}
        assert record.fragments == FRAGMENTS
        assert all(one.pledges[0] == record for one in peers)

    in_virtual_time(script)


def test_seven_machines_become_two_groups_those_of_one_home_first() -> None:
    async def script(network: Network, group: Any) -> None:
        peers = [Peer(network, number) for number in range(7)]
        first = min(peers, key=lambda one: one.peer)
        near = [first, *[one for one in peers if one is not first][-3:]]
        for one in peers:
            one.home = "here" if one in near else "there"
        await network.add(group, *peers)
        await anyio.sleep(30)
        assert all(one.groups for one in peers)
        assert set(first.groups[0].members) == {one.peer for one in near}

    in_virtual_time(script)


def test_a_row_is_the_same_whoever_comes_and_goes_elsewhere() -> None:
    seekers = [Seeker(peer, frozenset()) for peer in sorted(signer_of(number).peer for number in range(128))]
    for me in seekers:
        row = row_of(me.peer, seekers)
        assert me in row
        assert 2 <= len(row) <= ROW
        elsewhere = [one for one in seekers if one not in row and one.peer[0] >> 7 != me.peer[0] >> 7]
        fewer = [one for one in seekers if one not in elsewhere[::3]]
        assert row_of(me.peer, fewer) == row


def test_of_many_that_come_one_after_the_other_many_are_in_groups_before_the_last_is_there() -> None:
    """One in twenty was, where each newcomer and each group moved all others to other rows."""

    async def script(network: Network, group: Any) -> None:
        for number in range(128):
            await network.add(group, Peer(network, number))
            await anyio.sleep(0.2)
        assert sum(bool(one.groups) for one in network.peers) >= 40
        await anyio.sleep(30)
        assert all(one.groups for one in network.peers)

    in_virtual_time(script)


def test_two_rows_of_which_neither_has_memory_for_the_model_become_one() -> None:
    async def script(network: Network, group: Any) -> None:
        peers = sorted((Peer(network, number) for number in range(10)), key=lambda one: one.peer)
        seekers = [Seeker(one.peer, frozenset()) for one in peers]
        for row in (row_of(peers[0].peer, seekers), row_of(peers[-1].peer, seekers)):
            held = iter([3, 3, 3, 0, 0])  # of which four are to make up twelve
            for one in peers:
                if one.peer in {seeker.peer for seeker in row}:
                    one.wanted = replace(WANTED, mine=Machine(next(held), 1e6))
        await network.add(group, *peers)
        await anyio.sleep(100)
        assert not any(one.groups for one in peers)
        await anyio.sleep(100)
        assert sum(bool(one.groups) for one in peers) == 4

    in_virtual_time(script)


def test_one_that_comes_and_goes_keeps_nobody_from_being_a_group() -> None:
    async def script(network: Network, group: Any) -> None:
        peers = [Peer(network, number) for number in range(3)]
        await network.add(group, *peers)
        flickers = max(peers, key=lambda one: one.peer)
        for _ in range(20):
            network.looking.remove(flickers)
            await anyio.sleep(1)
            network.looking.append(flickers)
            await anyio.sleep(1)
            if flickers.groups:
                break
        assert all(one.groups for one in peers if one is not flickers)

    in_virtual_time(script)


def test_machines_that_hold_too_little_wait_for_one_more() -> None:
    async def script(network: Network, group: Any) -> None:
        small = replace(WANTED, mine=Machine(3, 1e6))
        peers = [Peer(network, number, small) for number in range(4)]
        await network.add(group, *peers[:3])
        await anyio.sleep(60)
        assert not any(one.groups for one in peers)
        await network.add(group, peers[3])
        await anyio.sleep(20)
        assert all(len(one.groups) == 1 for one in peers)

    in_virtual_time(script)


def test_machines_that_hold_too_little_do_without_a_stage_where_the_terms_allow_it() -> None:
    async def script(network: Network, group: Any) -> None:
        small = replace(WANTED, mine=Machine(5, 1e6), holes=holes_of([True] * FRAGMENTS, 3))
        peers = [Peer(network, number, small) for number in range(2)]
        await network.add(group, *peers)
        await anyio.sleep(12)
        assert not any(one.groups for one in peers), "a third one may be on its way"
        await anyio.sleep(30)
        (record,) = {one.groups[-1] for one in peers}
        assert record.hole == range(5, 7)
        assert sum(len(record.part_of(one.peer)) for one in peers) == 10

    in_virtual_time(script)


def test_machines_that_hold_enough_leave_nothing_out() -> None:
    async def script(network: Network, group: Any) -> None:
        wanted = replace(WANTED, holes=holes_of([True] * FRAGMENTS, 3))
        peers = [Peer(network, number, wanted) for number in range(2)]
        await network.add(group, *peers)
        await anyio.sleep(20)
        assert {one.groups[-1].hole for one in peers} == {None}

    in_virtual_time(script)


def test_one_that_does_not_answer_keeps_nobody_from_being_a_group() -> None:
    """It is dead, and its lease has not run out yet."""

    async def script(network: Network, group: Any) -> None:
        peers = [Peer(network, number) for number in range(3)]
        await network.add(group, *peers)
        dead = max(peers, key=lambda one: one.peer)
        network.memory.kill(dead.peer)
        await anyio.sleep(60)
        others = [one for one in peers if one is not dead]
        assert all(one.groups for one in others)
        assert dead.peer not in others[0].groups[0].members

    in_virtual_time(script)


REFUSED = {
    "of another run": lambda me, other, third: record_of(me, other, run=bytes([1]) * 32),
    "without it": lambda me, other, third: record_of(other, third),
    "with one that looks for nobody": lambda me, other, third: record_of(me, third),
    "beyond its memory": lambda me, other, third: GroupRecord(RUN, 7, ((me.peer, 0, 7), (other.peer, 7, 12)), 8, 0),
    "of other micro-batches": lambda me, other, third: record_of(me, other, micro_batches=9),
    "without a stage": lambda me, other, third: GroupRecord(RUN, 7, ((me.peer, 0, 5), (other.peer, 7, 12)), 8, 0),
    "of fewer fragments": lambda me, other, third: GroupRecord(RUN, 7, ((me.peer, 0, 1), (other.peer, 1, 2)), 8, 0),
}


@pytest.mark.parametrize("record", REFUSED.values(), ids=REFUSED.keys())
def test_a_machine_signs_no_group(record: Callable[..., GroupRecord]) -> None:
    async def script(network: Network, group: Any) -> None:
        me, other, third = (Peer(network, number) for number in range(3))
        await network.add(group, me, other)
        await network.add(group, third, looks=False)
        with pytest.raises(TransportError):
            await ask(other, me, b"\1" + to_bytes(record(me, other, third)))
        assert not me.pledges

    in_virtual_time(script)


def test_what_was_signed_last_counts_and_nothing_that_was_not_sealed() -> None:
    async def script(network: Network, group: Any) -> None:
        me, other, third = (Peer(network, number) for number in range(3))
        await network.add(group, me, other, third)
        mine, theirs = record_of(me, other), record_of(me, third)
        signature = await ask(other, me, b"\1" + to_bytes(mine))
        with pytest.raises(TransportError):  # it has signed for another just now
            await ask(third, me, b"\1" + to_bytes(theirs))
        forged = Sealed(theirs, (sign_group(theirs, third.signer),) * 2)
        with pytest.raises(PayloadError):
            to_bytes(forged)
        another = replace(mine, number=8)
        unsigned = Sealed(another, tuple(sign_group(another, one.signer) for one in (me, other)))
        with pytest.raises(TransportError):
            await ask(other, me, b"\2" + to_bytes(unsigned))
        assert not me.groups
        await ask(other, me, b"\2" + to_bytes(Sealed(mine, (signature, sign_group(mine, other.signer)))))
        assert me.groups == [mine]

    in_virtual_time(script)


class FalseFormation(Formation):
    """It signs nothing."""

    async def _answer(self, peer: PeerId, data: bytes) -> bytes:
        answer = await super()._answer(peer, data)
        return bytes(64) if data[:1] == b"\1" else answer


def test_the_next_one_proposes_where_the_first_does_not_and_does_without_one_that_signs_falsely() -> None:
    async def script(network: Network, group: Any) -> None:
        peers = sorted((Peer(network, number) for number in range(4)), key=lambda one: one.peer)
        number = next(number for number in range(4) if signer_of(number).peer == peers[-1].peer)
        liar = peers[-1] = Peer(network, number, kind=FalseFormation)
        await network.add(group, *peers)
        await peers[0].formation.look(None)  # it is there by its lease, and does nothing
        await anyio.sleep(90)
        assert peers[1].groups == peers[2].groups
        assert set(peers[1].groups[0].members) == {peers[1].peer, peers[2].peer}
        assert not liar.groups

    in_virtual_time(script)


def test_who_signed_and_heard_nothing_more_may_sign_for_another() -> None:
    async def script(network: Network, group: Any) -> None:
        me, other, third = (Peer(network, number) for number in range(3))
        await network.add(group, me, other, third)
        await ask(other, me, b"\1" + to_bytes(record_of(me, other)))
        other.formation._wanted = third.formation._wanted = None  # nobody proposes meanwhile
        await anyio.sleep(PLEDGED + 1)
        assert await ask(third, me, b"\1" + to_bytes(record_of(me, third)))

    in_virtual_time(script)


def test_a_member_that_has_a_group_may_ask_what_one_has_that_looks_and_no_more() -> None:
    async def script(network: Network, group: Any) -> None:
        me, member = Peer(network, 0), Peer(network, 1)
        await network.add(group, me)
        await network.add(group, member, looks=False)
        network.members.append(member.peer)
        found = await member.formation.ask(Seeker(me.peer, frozenset()))
        assert found is not None
        assert found.memory == WANTED.mine.memory
        with pytest.raises(TransportError):
            await ask(member, me, b"\1" + to_bytes(record_of(me, member)))
        await me.formation.look(None)
        assert await member.formation.ask(Seeker(me.peer, frozenset())) is None

    in_virtual_time(script)


def test_a_stranger_learns_nothing_of_a_machine() -> None:
    async def script(network: Network, group: Any) -> None:
        me, stranger = Peer(network, 0), Peer(network, 1)
        await network.add(group, me)
        await network.add(group, stranger, looks=False)
        for body in (b"", b"\0", b"\3", b"\1" + bytes(64), b"\2" + bytes(200)):
            with pytest.raises(TransportError):
                await ask(stranger, me, body)

    in_virtual_time(script)
