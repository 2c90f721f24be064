"""Keys that cost nothing, at real nodes in memory: what they say, send and fetch holds up nobody who is a member."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from functools import partial

import anyio
import pytest
import torch

from decentral.dissemination.broadcast import PUSH
from decentral.errors import PayloadError, TransportError
from decentral.flow.budget import Budget, Limits
from decentral.node.node import RunMembers
from decentral.replica.contribution import Contribution, encode_whole
from decentral.rounds.frame_io import CONTROL, FEW_AT_ONCE, PREPARES_AT_ONCE
from decentral.rounds.snapshots import CHUNK, INDEX, STATE
from decentral.state.snapshot import CHUNK_NBYTES
from decentral.swarm.contacts import ALL_DIALS, DIALS, LEASE, LEASE_LIST, LEASES
from decentral.swarm.leases import MAX_LEASES_NBYTES, lease_bytes, read_leases, write_leases
from decentral.transport.requests import notify, request
from decentral.wire.frames import Frame
from decentral.wire.keys import Signer, peer_name
from decentral.wire.messages import MAX_PEERS, Behind, JoinRequest, Lease, Prepare, encode, join_text, seal_lease
from tests.kit.nodes import scene, small_terms, tiny_model

MINUTE = 60.0
STEP = 5.0  # s of a round
slow_rounds = partial(
    scene, lambda: small_terms("sparseloco", lease=20.0, shrink_after=60.0), make_model=tiny_model, step=STEP
)


def key(number: int, kind: str = "stranger") -> Signer:
    return Signer(hashlib.blake2b(f"{kind} {number}".encode(), digest_size=32).digest())


def lease_of(signer: Signer, run: bytes, addresses: tuple[str, ...]) -> Lease:
    told = {"epoch": 0, "round": 0, "digest": bytes(32), "state": 0, "uplink": 0, "version": "1"}
    return seal_lease(Lease(run=run, peer=signer.peer, sequence=1, ttl=20, addresses=addresses, **told), signer)


def made_up(count: int, run: bytes, num_addresses: int = 1, first: int = 0) -> list[Lease]:
    """Leases of keys that nobody has, at addresses where nobody is."""
    found = []
    for number in range(first, first + count):
        signer = key(number, "made up")
        where = f"/ip4/10.0.{number // 250}.{number % 250}/tcp"
        addresses = (f"{where}/{4000 + n}/p2p/{peer_name(signer.peer)}" for n in range(num_addresses))
        found.append(lease_of(signer, run, tuple(addresses)))
    return found


def count_dials(member) -> list[str]:
    """The addresses that a member dials from now on."""
    dialled, connect = [], member.transport.connect

    async def counted(peer, addresses):
        dialled.extend(addresses)
        await connect(peer, addresses)

    member.transport.connect = counted
    return dialled


async def say(network, signer: Signer, victim, leases: list[Lease]) -> None:
    """One message of a stranger that passes on so many leases."""
    async with network.transport(signer) as stranger:
        body = write_leases([(20.0, lease) for lease in leases])
        await request(stranger, victim.signer.peer, LEASE_LIST, body, limit=1 << 20, timeout=9)


@slow_rounds(peers=3)
async def test_of_made_up_leases_few_addresses_are_dialled_whoever_passes_them_on(lab):
    victim, run = lab.members[0], lab.manifest.digest
    dialled = count_dials(victim)
    for number in range(4):  # again and again, of others each time
        await say(lab.network, key(0), victim, made_up(16, run, 16, first=16 * number))
        await anyio.sleep(MINUTE / 8)
    assert 0 < len(dialled) <= 2 * DIALS
    assert len(lab.members[0].node.directory.live()) <= 3, "nobody who never answered is booked"
    await anyio.sleep(MINUTE)
    dialled.clear()
    for number in range(24):  # many strangers together
        await say(lab.network, key(number), victim, made_up(8, run, 16, first=100 + 8 * number))
    await anyio.sleep(5.0)
    assert len(dialled) <= ALL_DIALS + 24


@slow_rounds(peers=3)
async def test_a_newcomer_is_known_though_a_table_full_of_made_up_leases_was_sent(lab):
    victim, run = lab.members[0], lab.manifest.digest
    for first in range(0, MAX_PEERS, 256):
        await say(lab.network, key(0), victim, made_up(256, run, first=first))
    newcomer = lab.add()
    await lab.until(lambda: newcomer.signer.peer in victim.node.directory.live(), limit=10.0)
    await lab.until(lambda: len(victim.node.driver.head.members) == 4, limit=30.0)


@slow_rounds(peers=3)
async def test_a_stranger_that_is_where_its_lease_says_is_found_through_another(lab):
    """A follower that somebody names is looked for, answers, and is known from then on."""
    victim, run = lab.members[0], lab.manifest.digest
    named = key(7)
    async with lab.network.transport(named) as transport:
        answered = []

        async def answer(stream):
            answered.append(stream.peer)

        transport.services.fixed = False
        transport.serve(LEASE, answer)
        await say(lab.network, key(0), victim, [lease_of(named, run, transport.addresses())])
        await anyio.sleep(5.0)
        assert answered
        assert not victim.node.directory.has_answered(named.peer), "it ended the stream without an answer"


async def ask_around(network, signer: Signer, victim, run: bytes) -> dict[bytes, Lease]:
    async with network.transport(signer) as stranger:
        own = lease_bytes(lease_of(signer, run, stranger.addresses()))
        answer = await request(stranger, victim.signer.peer, LEASES, own, limit=MAX_LEASES_NBYTES, timeout=9)
        return {lease.peer: lease for _, lease in read_leases(answer)}


@slow_rounds(peers=3)
async def test_what_a_peer_passes_on_is_of_who_has_answered(lab):
    """Made-up keys travel no further than the peer that they were told."""
    victim, run = lab.members[0], lab.manifest.digest
    await say(lab.network, key(0), victim, made_up(8, run))
    told = await ask_around(lab.network, key(1), victim, run)
    assert told.keys() == {member.signer.peer for member in lab.members} | {key(1).peer}


# ---- frames ----


def contribution(signer: Signer, victim, change: float) -> Frame:
    """A well-formed contribution to the round that is open at a peer."""
    node = victim.node
    head, replica = node.driver.head, node.replica
    change_N = torch.full((replica.numel(0),), change)
    encoded = encode_whole(replica, 0, change_N, (), signer.peer)
    made = Contribution(0, head.hash, replica.anchors[0], change_N, 30, 1, encoded=encoded, tail=victim.tail(0))
    return made.frame(head, signer)


async def push(network, signer: Signer, victim, *frames: Frame) -> int:
    """Push frames as a stranger; how many the victim says it has handled."""
    handled = []
    async with network.transport(signer) as stranger:
        for frame in frames:
            on_handled = partial(handled.append, frame)
            await notify(stranger, victim.signer.peer, PUSH, frame.data, timeout=9, on_handled=on_handled)
    return len(handled)


def of_strangers(victim) -> int:
    members = victim.node.driver.head.members
    return sum(frame.header.sender not in members for frame in victim.node.driver.state.store._frames.values())


@slow_rounds(peers=3)
async def test_no_frame_of_a_stranger_is_kept_and_one_of_a_newcomer_that_asked_to_come_in(lab):
    victim = lab.members[0]
    for number in range(1, 21):
        frames = [contribution(key(number), victim, change) for change in (1.0, 2.0)]
        assert await push(lab.network, key(number), victim, *frames) == 0
    assert of_strangers(victim) == 0
    newcomer = key(0)
    victim.node.driver.machine.state.joiners[newcomer.peer] = JoinRequest(0, bytes(32), bytes(64))
    frames = [contribution(newcomer, victim, change) for change in (1.0, 2.0, 3.0)]
    assert await push(lab.network, newcomer, victim, *frames) == 1
    assert of_strangers(victim) == 1


async def flood(lab, victim, passed_on_by, kind: str) -> None:
    """Contributions of ever new keys, pushed by themselves, and by a member that passes them on."""
    number = 0
    while True:
        number += 1
        await push(lab.network, key(number, kind), victim, contribution(key(number, kind), victim, 1.0))
        forged = contribution(key(number, f"passed on {kind}"), victim, 1.0)
        await notify(passed_on_by.transport, victim.signer.peer, PUSH, forged.data, timeout=9)
        await anyio.sleep(0.1)


@slow_rounds(peers=3)
async def test_frames_of_made_up_keys_push_out_nothing_and_rounds_go_on(lab):
    for member in lab.members:
        state = member.node.driver.state  # the open round has room for two frames of each member, and no more
        state.store.capacity, state.frame_limit = 0, len(contribution(key(0), member, 1.0).data)
    began = min(member.rounds for member in lab.members)
    for victim, other in zip(lab.members, lab.members[1:] + lab.members[:1], strict=True):
        lab.group.start_soon(flood, lab, victim, other, f"of {victim.number}")
    await lab.until(lambda: min(member.rounds for member in lab.members) >= began + 4, limit=6 * STEP)
    assert all(len(commit.record.frames) == 3 for commit in lab.members[0].log[-2:])


# ---- what is said ----


def asks(signer: Signer, head) -> JoinRequest:
    """To come in, at ``head``."""
    return JoinRequest(head.round, head.hash, signer.sign(join_text(head.run, head.round, head.hash)))


async def control(network, signer: Signer, victim, *messages) -> None:
    async with network.transport(signer) as sender:
        for message in messages:
            await notify(sender, victim.signer.peer, CONTROL, encode(message), timeout=9)
        await anyio.sleep(0.5)  # on their way


@slow_rounds(peers=3)
async def test_a_key_without_a_lease_is_not_let_in_and_one_with_a_lease_is(lab):
    victim, run = lab.members[0], lab.manifest.digest
    joiners = victim.node.driver.machine.state.joiners
    head = victim.node.driver.head
    await control(lab.network, key(0), victim, asks(key(0), head))
    assert key(0).peer not in joiners
    await ask_around(lab.network, key(1), victim, run)
    assert victim.node.directory.has_answered(key(1).peer)
    await control(lab.network, key(1), victim, asks(key(1), head))
    assert key(1).peer in {*joiners, *victim.node.driver.head.members}


def count_received(victim) -> Counter:
    """What reaches a peer's machine from now on, by its kind."""
    machine = victim.node.driver.machine
    came, receive = Counter(), machine.receive

    def counted(sender, message, now):
        came[sender, type(message).__name__] += 1
        return receive(sender, message, now)

    machine.receive = counted
    return came


@pytest.mark.parametrize("message", ["Prepare", "Behind", "JoinRequest"])
@slow_rounds(peers=3)
async def test_a_member_that_says_one_thing_all_the_time_is_heard_now_and_then(lab, message):
    victim, liar = lab.members[0], lab.members[1]
    came = count_received(victim)
    head = victim.node.driver.head
    given = {
        "Prepare": Prepare(head.epoch, head.round + 1, 10),
        "Behind": Behind(0),
        "JoinRequest": asks(liar.signer, head),
    }[message]
    began = anyio.current_time()
    for _ in range(100):
        await notify(liar.transport, victim.signer.peer, CONTROL, encode(given), timeout=9)
        await anyio.sleep(STEP / 100)
    at_once = PREPARES_AT_ONCE if message == "Prepare" else FEW_AT_ONCE
    rounds = 1 + victim.node.driver.head.round - head.round
    seconds = anyio.current_time() - began
    assert came[liar.signer.peer, message] <= rounds * at_once + seconds + 1
    assert victim.node.driver.frames.passed_over[message] >= 50
    assert victim.happened("flooded") == [{"peer": peer_name(liar.signer.peer), "what": message}]


@slow_rounds(peers=4, step=0.2)
async def test_nothing_that_honest_members_say_is_passed_over_at_five_rounds_a_second(lab):
    began = anyio.current_time()
    await lab.rounds(15)
    assert anyio.current_time() - began <= 15 / 2, "fast ones"
    assert all(not member.node.driver.frames.passed_over for member in lab.members)


# ---- the upload ----

LINE = 250e3  # bytes/s: 2 Mbit/s


async def leech(network, number: int, victims) -> None:
    """Fetch the newest snapshot of each again and again, four chunks at a time."""
    async with network.transport(key(number, "leech")) as stranger, anyio.create_task_group() as group:
        for victim in victims:
            group.start_soon(fetch_forever, stranger, victim)


async def fetch_forever(stranger, victim) -> None:
    while True:
        with suppress(TransportError, PayloadError):
            index = await request(stranger, victim.signer.peer, INDEX, b"", limit=1 << 24, timeout=30)
            name = hashlib.blake2b(index, digest_size=32).digest()
            async with anyio.create_task_group() as group:
                for chunk in range(4):
                    group.start_soon(fetch_chunk, stranger, victim, CHUNK.pack(name, chunk))
        await anyio.sleep(0.05)


async def fetch_chunk(stranger, victim, asked: bytes) -> None:
    with suppress(TransportError, PayloadError):
        await request(stranger, victim.signer.peer, STATE, asked, limit=1 << 20, timeout=30)


def larger_model() -> torch.nn.Module:
    return torch.nn.Linear(512, 1024)  # 2 MB: eight chunks


@slow_rounds(peers=3, make_model=larger_model)
async def test_rounds_go_on_beside_eight_that_fetch_all_day_and_a_newcomer_is_let_in(lab):
    for member in lab.members:
        lab.network.set_uplink(member.signer.peer, LINE)
    await lab.rounds(2)
    began = anyio.current_time()
    await lab.rounds(4)
    quiet = anyio.current_time() - began
    sent = [member.transport.traffic.total.sent for member in lab.members]
    for number in range(8):
        lab.group.start_soon(leech, lab.network, number, lab.members)
    await lab.rounds(1)
    began = anyio.current_time()
    await lab.rounds(4)
    assert anyio.current_time() - began <= 1.5 * quiet
    assert all(len(commit.record.frames) == 3 for commit in lab.members[0].log[-3:])
    for member, before in zip(lab.members, sent, strict=True):
        assert member.transport.traffic.total.sent - before > 8 * CHUNK_NBYTES, "they are given what is left"
    newcomer = lab.add()  # invited by one that they fetch from
    await lab.until(lambda: newcomer.signer.peer in lab.members[0].node.driver.head.members, limit=120.0)


# ---- honest peers ----


@pytest.mark.parametrize("count", [12, pytest.param(24, marks=pytest.mark.long)])
@slow_rounds(step=4 * STEP)
async def test_a_swarm_that_grows_within_a_minute_is_whole_and_knows_everybody(lab, count):
    lab.add()
    await lab.rounds(1)
    for _ in range(count - 1):
        lab.add()
        await anyio.sleep(MINUTE / count)
    began = anyio.current_time()
    await lab.all_members()
    assert anyio.current_time() - began <= 2 * lab.step
    for member in lab.members:
        assert len(member.node.directory.live()) == count - 1
    before = len(lab.members[0].log)
    await anyio.sleep(2 * lab.step)
    contributors = {ref.peer for commit in lab.members[0].log[before:] for ref in commit.record.frames}
    assert len(contributors) == count
    assert all(not member.node.driver.frames.passed_over for member in lab.members), "nothing honest is refused"
    lab.check_equal()


# ---- streams ----

SYBILS, STREAMS = 4, 8
LIMITS = Limits(peer_streams=STREAMS, total_streams=16, outsider_streams=8)  # fewer than they ask for, and all faster
WITHHELD = (64).to_bytes(4, "little")


async def pester(network, number, victim) -> None:
    """Hold streams to ``victim`` that say how long their body is, and then nothing; again whenever they are closed."""
    sybil = network.transport(key(number, "sybil"))

    async def hold() -> None:
        while True:
            with suppress(TransportError):
                stream = await sybil.open(victim.peer, PUSH)
                await stream.send(WITHHELD)
                await stream.receive_exactly(1)
            await anyio.sleep(2.0)

    async with sybil, anyio.create_task_group() as nursery:
        await sybil.connect(victim.peer, victim.addresses())
        for _ in range(STREAMS):
            nursery.start_soon(hold)


@scene(peers=3, make_model=tiny_model)
async def test_rounds_go_on_and_a_newcomer_is_let_in_beside_streams_that_say_nothing(lab):
    began = anyio.current_time()
    await lab.rounds(5)
    quiet = anyio.current_time() - began
    beset = lab.members[0].transport
    beset.budget = Budget(LIMITS)
    beset.budget.prefer(RunMembers(lab.members[0].node.driver))
    for number in range(SYBILS):
        lab.group.start_soon(pester, lab.network, number, beset)
    await anyio.sleep(2.0)
    began = anyio.current_time()
    await lab.rounds(5)
    assert anyio.current_time() - began <= 1.5 * quiet
    assert all(len(commit.record.frames) == 3 for commit in lab.members[0].log[-4:])
    lab.add()  # invited by the one that they beset
    await lab.until(lambda: len(lab.members[0].node.driver.head.members) == 4, limit=60.0)
    lab.check_equal()
