"""Whom a peer tells that it is here."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from decentral.errors import ConfigError, StreamClosed
from decentral.swarm.contacts import LEASE, LEASES, Contacts
from decentral.swarm.directory import DIRECT, Bootstrap, Directory, circles, ways_back, ways_in
from decentral.swarm.leases import write_leases
from decentral.transport.memory import MemoryNetwork
from decentral.transport.requests import request
from decentral.wire.keys import Signer
from decentral.wire.messages import PRIVATE, encode
from tests.kit.scenes import played, without_waiting


def circles_of(count):
    peers = [number.to_bytes(4, "big") for number in range(count)]
    return {peer: circles(peer, [other for other in peers if other != peer]) for peer in peers}


def test_in_a_small_swarm_everybody_is_told():
    for count in (1, 2, 3, DIRECT, DIRECT + 1):
        peers = circles_of(count)
        for peer, around in peers.items():
            assert set(around.told) == set(peers) - {peer}
            assert not around.passed_to


def test_in_a_large_one_few_are_told_and_everybody_hears_of_everybody_from_itself_or_from_one_other():
    for count in (*range(DIRECT + 2, 60), 64, 100, 255, 256, 257, 1024):
        peers = circles_of(count)
        heard = {peer: {peer} for peer in peers}
        for peer, around in peers.items():
            told = [*around.told, *around.passed_to]
            assert len(set(told)) == len(told) <= 3 * math.sqrt(count)
            assert peer not in told
            assert set(around.row) <= set(around.told), "what is passed on was heard from itself"
            for other in around.told:
                heard[other].add(peer)
            for other in around.passed_to:
                heard[other] |= {peer, *around.row}
        assert all(known == set(peers) for known in heard.values()), count


# ---- test directory ----
#
# Who is here: real directories on the network in memory, in virtual time.

RUN = b"r" * 32
TTL = 12.0
SOON = TTL / 6 + 1.0  # s until a renewal with news is everywhere


class Swarm:
    """Peers by number. Peer 0 is everybody's bootstrap unless told otherwise."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(latency=0.05)
        self.directories: dict[int, Directory] = {}
        self.scopes: dict[int, anyio.CancelScope] = {}
        self.group: anyio.abc.TaskGroup

    def make(self, number: int, *, run: bytes = RUN, **options) -> Directory:
        signer = Signer(bytes([number + 1]) * 32)
        return Directory(self.network.transport(signer), signer, run, TTL, **options)

    async def add(self, number: int, bootstrap: int | None = 0, **options) -> Directory:
        directory = self.directories[number] = self.make(number, **options)
        if bootstrap is not None:
            directory.add_bootstrap(self.make(bootstrap).transport.addresses())
        await self.group.start(self.live, number)
        return directory

    async def live(self, number: int, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        directory = self.directories[number]
        with anyio.CancelScope() as self.scopes[number]:
            async with directory.transport, anyio.create_task_group() as group:
                await group.start(directory.run)
                task_status.started()

    def kill(self, number: int) -> None:
        self.network.kill(self.directories[number].peer)
        self.scopes[number].cancel()

    def seen_by(self, number: int) -> set[int]:
        peers = {directory.peer: n for n, directory in self.directories.items()}
        return {peers[peer] for peer in self.directories[number].live()}


def swarm_of(peers: int) -> Any:
    """The test gets a swarm in which so many are."""

    def scene(script: Callable[[Swarm], Awaitable[None]]) -> None:
        async def main() -> None:
            swarm = Swarm()
            async with anyio.create_task_group() as swarm.group:
                for number in range(peers):
                    await swarm.add(number)
                await script(swarm)
                swarm.group.cancel_scope.cancel()

        without_waiting(main)

    return played(scene)


@swarm_of(5)
async def test_peers_that_share_one_bootstrap_find_each_other(swarm):
    await anyio.sleep(2.0)
    for number in range(5):
        assert swarm.seen_by(number) == set(range(5)) - {number}
        assert not swarm.directories[number].looking


@swarm_of(0)
async def test_finding_nobody_is_a_state_and_lasts_until_the_bootstrap_comes_up(swarm):
    one = await swarm.add(1)
    await anyio.sleep(3600.0)
    assert one.looking
    await swarm.add(0)
    await anyio.sleep(31.0)
    assert not one.looking
    assert swarm.seen_by(0) == {1}


@pytest.mark.parametrize("how", ["greeted over a line that is open", "looked for where somebody said that it is"])
@swarm_of(1)
async def test_a_peer_that_is_met_otherwise_is_known_and_knows(swarm, how):
    zero, one = swarm.directories[0], await swarm.add(1, bootstrap=None)
    await anyio.sleep(60.0)
    assert zero.looking
    if how.startswith("greeted"):
        await one.transport.connect(zero.peer, zero.transport.addresses())  # a line, and no lease over it
        one.greet([zero.peer, one.peer])
    else:
        one.look_for(zero.peer, zero.transport.addresses())
    await anyio.sleep(1.0)
    assert (swarm.seen_by(0), swarm.seen_by(1)) == ({1}, {0})


@swarm_of(0)
async def test_who_is_missing_is_greeted_ever_more_rarely_and_at_once_when_missing_anew(swarm):
    zero, stranger = await swarm.add(0), Signer(bytes([9]) * 32).peer
    greeted = []
    zero._contacts.spawn = lambda kind, peer, contact: kind == "greet" and greeted.append(anyio.current_time())
    for second in range(30):
        zero.greet([stranger] if second != 20 else [])
        await anyio.sleep(1.0)
    assert [round(time - greeted[0]) for time in greeted] == [0, 1, 3, 7, 15, 21, 22, 24, 28]


@swarm_of(0)
async def test_what_somebody_said_of_a_peer_that_is_elsewhere_or_here_changes_nothing(swarm):
    zero, one = await swarm.add(0), await swarm.add(1)
    await anyio.sleep(2.0)
    stranger = Signer(bytes([9]) * 32).peer
    for _ in range(3):
        one.look_for(stranger, zero.transport.addresses())
        one.look_for(zero.peer, ["/ip4/10.0.0.1/tcp/1"])
        one.look_for(one.peer, zero.transport.addresses())
    await anyio.sleep(120.0)
    assert (swarm.seen_by(0), swarm.seen_by(1)) == ({1}, {0})


@swarm_of(1)
async def test_rubbish_among_the_bootstrap_addresses_is_passed_over(swarm, caplog):
    one = swarm.make(1)
    one.add_bootstrap(["rubbish", "/ip4/1.2.3.4/tcp/1/p2p/nobody", *swarm.directories[0].transport.addresses()])
    swarm.directories[1] = one
    await swarm.group.start(swarm.live, 1)
    await anyio.sleep(2.0)
    assert swarm.seen_by(1) == {0}
    assert sum("is passed over" in record.message for record in caplog.records) == 2


@swarm_of(4)
async def test_a_killed_peer_is_gone_one_lease_after_its_last_word_everywhere(swarm):
    await anyio.sleep(30.0)
    dead = swarm.directories[2].peer
    swarm.kill(2)
    await anyio.sleep(TTL / 2)
    assert swarm.seen_by(0) == {1, 2, 3}
    assert swarm.directories[0].heard(dead) < TTL
    await anyio.sleep(TTL / 2 + 0.2)
    for number in (0, 1, 3):
        assert 2 not in swarm.seen_by(number)
    await anyio.sleep(100.0)
    assert swarm.seen_by(0) == {1, 3}
    assert swarm.directories[0].heard(dead) == pytest.approx(TTL + 100.0, abs=TTL / 2 + 1)


@swarm_of(3)
async def test_a_newcomer_does_not_revive_the_dead(swarm):
    await anyio.sleep(5.0)
    swarm.kill(2)
    await anyio.sleep(TTL - 2.0)
    await swarm.add(3)
    await anyio.sleep(3.0)
    assert [swarm.seen_by(number) for number in (0, 1, 3)] == [{1, 3}, {0, 3}, {0, 1}]


@swarm_of(4)
async def test_goodbye_is_heard_at_once_and_kept(swarm):
    await anyio.sleep(5.0)
    await swarm.directories[1].goodbye()
    await anyio.sleep(0.2)
    for number in (0, 2, 3):
        assert 1 not in swarm.seen_by(number)
    await anyio.sleep(3 * TTL)
    for number in (0, 2, 3):
        assert 1 not in swarm.seen_by(number), "though it still runs"


@swarm_of(3)
async def test_news_of_a_peer_is_everywhere_soon_and_wakes_who_waits(swarm):
    await anyio.sleep(5.0)
    woken = []

    async def wait():
        await swarm.directories[2].until_changed()
        woken.append(anyio.current_time())

    swarm.group.start_soon(wait)
    began = anyio.current_time()
    swarm.directories[1].own.update(round=7, epoch=2, digest=b"d" * 32, state=3, uplink=10**7)
    swarm.directories[1].own.update(round=8)
    await anyio.sleep(SOON)
    lease = swarm.directories[2].live()[swarm.directories[1].peer]
    assert (lease.round, lease.epoch, lease.digest, lease.state, lease.uplink) == (8, 2, b"d" * 32, 3, 10**7)
    assert woken[0] - began <= SOON


@swarm_of(2)
async def test_an_update_that_changes_nothing_costs_no_renewal(swarm):
    await anyio.sleep(5.0)
    one = swarm.directories[1]
    one.own.update(round=3)
    await anyio.sleep(TTL)
    before, sequence = one.transport.traffic.total.sent, one.own.seal().sequence
    for _ in range(100):
        one.own.update(round=3)
        await anyio.sleep(TTL / 100)
    assert one.own.seal().sequence - sequence <= 4
    assert one.transport.traffic.total.sent - before < 12 * 1024


@swarm_of(3)
async def test_a_peer_that_starts_anew_is_heard_although_it_counts_from_one(swarm):
    await anyio.sleep(20 * TTL)
    swarm.kill(2)
    await anyio.sleep(1.0)
    again = await swarm.add(2)
    again.own.update(round=99)
    await anyio.sleep(TTL)
    for number in (0, 1):
        assert swarm.directories[number].live()[again.peer].round == 99


@swarm_of(3)
async def test_a_peer_that_left_can_come_back(swarm):
    await anyio.sleep(10 * TTL)
    await swarm.directories[2].goodbye()
    swarm.kill(2)
    await swarm.add(2)
    await anyio.sleep(TTL)
    assert [swarm.seen_by(number) for number in range(3)] == [{1, 2}, {0, 2}, {0, 1}]


@swarm_of(3)
async def test_two_halves_find_each_other_again_though_neither_is_the_others_bootstrap(swarm):
    await anyio.sleep(5.0)
    one, two = (swarm.directories[number].peer for number in (1, 2))
    swarm.kill(0)
    swarm.network.cut(one, two)
    await anyio.sleep(10 * TTL)
    assert swarm.directories[1].looking
    assert swarm.directories[2].looking
    swarm.network.heal(one, two)
    await anyio.sleep(TTL)
    assert (swarm.seen_by(1), swarm.seen_by(2)) == ({2}, {1})


@swarm_of(3)
async def test_peers_without_a_direct_path_count_each_other_while_a_third_hears_both(swarm):
    swarm.network.cut(swarm.directories[1].peer, swarm.directories[2].peer)
    await anyio.sleep(10 * TTL)
    assert swarm.seen_by(1) == {0, 2}
    swarm.kill(2)
    await anyio.sleep(2 * TTL)
    assert swarm.seen_by(1) == {0}


@swarm_of(1)
async def test_another_runs_peers_are_not_ours(swarm):
    other = await swarm.add(1, run=b"x" * 32)
    await anyio.sleep(60.0)
    assert swarm.directories[0].looking
    assert other.looking


@swarm_of(2)
async def test_a_lease_counts_only_from_its_own_peer_or_as_passed_on(swarm):
    await anyio.sleep(5.0)
    victim = swarm.make(5).own.seal()
    thief = swarm.network.transport(Signer(b"t" * 32))
    async with thief:
        target = swarm.directories[0].peer
        for protocol in (LEASE, LEASES):
            for body in (encode(victim), b"rubbish", b"", write_leases([(9.0, victim)])):
                with pytest.raises(StreamClosed):
                    await request(thief, target, protocol, body, limit=1 << 20, timeout=9)
    assert swarm.seen_by(0) == {1}


async def its_twin_speaks(swarm: Swarm, me: Directory, times: int, ahead: int = 5) -> None:
    """What a twin elsewhere tells peer 0 between our renewals."""
    for _ in range(times):
        twin = swarm.make(1)
        twin.own._addresses = lambda: ("/memory/elsewhere",)
        twin.own._sequence = me.own.seal().sequence + ahead
        swarm.directories[0]._messages.heard_from(me.peer, twin.own.seal())
        await anyio.sleep(TTL / 3)


@pytest.mark.parametrize("ahead", [5, 1], ids=["it counts faster", "it counts as we do"])
@swarm_of(1)
async def test_a_peer_ends_when_another_process_runs_with_its_key(swarm, ahead):
    said = r"another process runs with this identity \(12D3Koo\w+\) at /memory/elsewhere; end one"
    me = swarm.make(1)
    me.add_bootstrap(swarm.directories[0].transport.addresses())
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=said), flatten_subgroups=True):
        async with me.transport, anyio.create_task_group() as group:
            await group.start(me.run)
            await its_twin_speaks(swarm, me, 8, ahead)


@swarm_of(2)
async def test_what_former_lives_said_is_told_from_another_process(swarm):
    """Peers that were apart hold leases of several lives, each newer than the one before."""
    await its_twin_speaks(swarm, swarm.directories[1], 4)
    await anyio.sleep(4 * TTL)
    await its_twin_speaks(swarm, swarm.directories[1], 4)
    await anyio.sleep(TTL)
    assert swarm.seen_by(0) == {1}


@swarm_of(0)
async def test_more_peers_than_the_directory_holds_do_not_enter_it(swarm):
    small = await swarm.add(0, capacity=2)
    for number in range(1, 5):
        await swarm.add(number)
    await anyio.sleep(2 * TTL)
    assert len(small.live()) == 2


@swarm_of(4)
async def test_an_invite_outlives_the_peer_that_wrote_it(swarm):
    await anyio.sleep(2.0)
    invite = ways_in(swarm.directories[1])
    swarm.kill(1)
    newcomer = await swarm.add(4, None)
    newcomer.add_bootstrap(invite)
    await anyio.sleep(2.0)
    assert swarm.seen_by(4) >= {0, 2, 3}


@swarm_of(4)
async def test_an_invite_leads_to_who_is_away_for_a_moment_and_not_to_who_left_or_is_behind_a_relay(swarm):
    swarm.directories[2].own.update(state=PRIVATE)
    await anyio.sleep(SOON + 1.0)
    own, away = swarm.directories[0].transport.addresses(), swarm.directories[3].transport.addresses()
    swarm.kill(3)
    await swarm.directories[1].goodbye()
    await anyio.sleep(2 * TTL)
    assert ways_in(swarm.directories[0]) == (*own, away[0])


@swarm_of(DIRECT + 3)
async def test_where_few_are_told_everybody_stays_known_and_news_and_deaths_come_to_all(swarm):
    everybody, news = set(swarm.directories), swarm.directories[3].peer
    for _ in range(8):
        await anyio.sleep(TTL / 8)
        assert all(swarm.seen_by(number) == everybody - {number} for number in everybody)
    swarm.directories[3].own.update(round=6)
    await anyio.sleep(2 * TTL / 3 + 1.0)
    assert {swarm.directories[number].live()[news].round for number in everybody - {3}} == {6}
    swarm.kill(7)
    await anyio.sleep(TTL + 1.0)
    alive = everybody - {7}
    assert all(swarm.seen_by(number) == alive - {number} for number in alive)


# ---- test restarts ----
#
# A peer that comes back knows what its last life noted, and nothing else.


async def met_again(swarm: Swarm, kept: dict[int, tuple[str, ...]], first: int, offset: float) -> float:
    """Restart peers 0 and 1, the second one so much later; s from then until each sees the other."""
    for number in (first, 1 - first):
        if number != first:
            await anyio.sleep(offset)
        directory = await swarm.add(number, None)
        directory.add_bootstrap(kept[number])
    began = anyio.current_time()
    while not (swarm.seen_by(0) and swarm.seen_by(1)):
        await anyio.sleep(0.01)
    return anyio.current_time() - began


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("offset", [0.0, 0.1, 0.3, 0.7, 1.0, 1.6, 2.0])
@pytest.mark.parametrize("politely", [False, True])
@swarm_of(2)
async def test_two_that_are_restarted_together_find_each_other_within_two_seconds(swarm, first, offset, politely):
    await anyio.sleep(2.0)
    if politely:
        await swarm.directories[1].goodbye()
        await anyio.sleep(5 * TTL)
    kept = {number: ways_back(swarm.directories[number]) for number in range(2)}
    for number in range(2):
        swarm.kill(number)
    await anyio.sleep(1.0)
    assert await met_again(swarm, kept, first, offset) < 2.0


@pytest.mark.parametrize("offset", [0.6, 1.6, 3.6, 8.0, 16.0, 32.0, 55.0])
@swarm_of(0)
async def test_who_is_less_than_a_minute_late_is_found_within_two_seconds_by_the_only_one_that_knows_where(
    swarm, offset
):
    where = swarm.make(0).transport.addresses()
    assert await met_again(swarm, {0: (), 1: where}, 1, offset) < 2.0


@swarm_of(0)
async def test_a_peer_comes_back_to_those_that_have_been_here_longest_to_eight_of_them(swarm):
    for number in range(12):
        await swarm.add(number)
        await anyio.sleep(TTL / 6)
    swarm.kill(3)
    await anyio.sleep(2 * TTL)
    ways, addresses = ways_back(swarm.directories[0]), [swarm.make(n).transport.addresses() for n in range(12)]
    assert set(ways) == {address for n in (1, 2, 4, 5, 6, 7, 8, 9) for address in addresses[n]}


@pytest.mark.parametrize("alone", [True, False])
@swarm_of(0)
async def test_who_waits_in_vain_dials_once_a_second_for_a_minute_if_alone_and_then_every_half(swarm, alone):
    dialled = []

    async def visit(peer, addresses):
        dialled.append(anyio.current_time())

    contacts = Contacts()
    contacts.group = swarm.group
    bootstrap = Bootstrap(bytes(32), contacts, visit, lambda peer: False, lambda: alone, 10.0)
    bootstrap.add(swarm.make(0).transport.addresses())
    began = anyio.current_time()
    await anyio.sleep(3600.0)
    first_minute = [at for at in dialled if at < began + 60.0]
    assert (60 < len(first_minute) < 80) if alone else (len(first_minute) < 12)
    assert len(dialled) - len(first_minute) <= 3540 / (0.8 * 30) + 6
