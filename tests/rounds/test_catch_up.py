"""What joining and catching up cost: seconds over links with a rate, bytes at the transport's counter."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch

from decentral.consensus.chain import LOCATOR
from decentral.consensus.learner import RECENT
from decentral.errors import PayloadError
from decentral.parameters import schema_of
from decentral.rounds.catch_up import split_commits
from decentral.rounds.frame_io import CONTROL
from decentral.rounds.snapshots import ANY_FORM, CHAIN, CHUNK, INDEX, LENGTH, PACKED, SHARED, STATE, WHERE
from decentral.state.snapshot import PLAIN, Layout, Snapshot, SnapshotIndex, chunk_hash, from_form
from decentral.transport.requests import notify, request, serve_requests
from decentral.wire.keys import Signer
from decentral.wire.messages import Behind, Certificate, Commit, encode
from tests.corpus.controls import GATHERED
from tests.kit.nodes import scene, small_terms

MBIT = 125_000.0  # bytes/s
NUMEL = 1 << 21  # 8.4 MB, 32 chunks
LARGER = 3 << 20  # takes longer than a round whose messages wait behind chunks


def one_tensor(numel: int):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(numel // 1024, 1024))
    return schema_of(model, 1)


slow_rounds = partial(
    scene, lambda: small_terms("sparseloco", lease=12.0, shrink_after=600.0, deadline_ceiling=30.0), step=8.0
)
not_given_up = partial(scene, lambda: small_terms("sparseloco", lease=20.0, shrink_after=600.0), peers=3, rounds=1)


async def three_in_step(lab, uplink: float) -> None:
    await lab.start(3, rounds=1)  # no chunk is as it was at the beginning
    for member in lab.members:
        lab.network.set_uplink(member.signer.peer, uplink)


@pytest.mark.parametrize(("uplink", "downlink"), [(1.6, 4.0), pytest.param(1.0, 4.0, marks=pytest.mark.long)])
@slow_rounds(schema=one_tensor(LARGER), spread=0.02)
async def test_a_join_takes_five_sixths_of_its_bytes_and_little_more_while_the_donors_train_on(lab, uplink, downlink):
    await three_in_step(lab, uplink * MBIT)
    began, round_ = anyio.current_time(), lab.members[0].rounds
    joiner = lab.add()
    lab.network.set_downlink(joiner.signer.peer, downlink * MBIT)
    await lab.until(lambda: joiner.node.ready.is_set())
    took = anyio.current_time() - began
    assert took <= 4 * LARGER / (min(3 * uplink, downlink) * MBIT), "1.2 times what is packed"
    assert lab.members[0].rounds > round_, "commits came meanwhile"
    assert joiner.transport.traffic.total.received <= 0.88 * 4 * LARGER
    await lab.one_head()
    lab.check_equal()


@slow_rounds(schema=one_tensor(NUMEL // 4))
async def test_a_donor_that_lies_is_named_and_the_joiner_stands_where_the_others_do(lab):
    await three_in_step(lab, 1.6 * MBIT)
    liar = lab.members[1].node
    await liar.catch_up.donor._snapshot()
    for made in liar.catch_up.donor._snapshots.values():
        made._row[:] = bytes(len(made._row))
    joiner = lab.add()
    await lab.until(lambda: joiner.node.ready.is_set())
    await lab.one_head()
    lab.check_equal()
    assert len(joiner.happened("donor_dropped")) == 1


def becomes_of_before(member) -> None:
    """As peers were that served chunks as they are, and nothing else."""
    del member.transport.services.handlers[PACKED]


@pytest.mark.parametrize("earlier", [1, 3])
@slow_rounds(schema=one_tensor(NUMEL // 4), spread=0.02)
async def test_a_newcomer_joins_from_donors_of_before_chunks_were_packed(lab, earlier):
    await three_in_step(lab, 1.6 * MBIT)
    for member in lab.members[:earlier]:
        becomes_of_before(member)
    joiner = lab.add()
    await lab.until(lambda: joiner.node.ready.is_set())
    await lab.one_head()
    lab.check_equal()
    assert [fields for event, fields in joiner.events if event in ("donor_dropped", "sync_failed")] == []
    size = joiner.transport.traffic.total.received / NUMEL
    assert 0.85 < size < 1.0 if earlier == 1 else 1.0 <= size < 1.05


@scene(schema=one_tensor(NUMEL // 8), spread=0.02)
async def test_a_peer_of_before_chunks_were_packed_gets_them_as_they_are(lab):
    donor = lab.add()
    await lab.rounds(1)
    donor.idle = True
    await anyio.sleep(2 * lab.step)
    stranger = lab.network.transport(Signer(bytes([9]) * 32))
    async with stranger:
        await stranger.connect(donor.signer.peer, donor.transport.addresses())
        ask = partial(request, stranger, donor.signer.peer, limit=1 << 22, timeout=5.0)
        shared = donor.node.replica.shared_tensors()
        index = SnapshotIndex.from_bytes(await ask(INDEX, b""), Layout.of(shared))
        chunk = await ask(STATE, CHUNK.pack(index.digest, 0))
        assert chunk_hash(chunk) == index.hashes[0]
        assert await ask(PACKED, ANY_FORM.pack(index.digest, 0, 0)) == bytes([PLAIN]) + chunk
        packed = await ask(PACKED, ANY_FORM.pack(index.digest, 0, 0xFF))
        assert len(packed) < 0.9 * len(chunk)
        assert from_form(packed, len(chunk)) == chunk


async def fall_behind(lab, rounds: int):
    """The last member misses some rounds, then nobody trains any more."""
    away, others = lab.members[-1], lab.members[:-1]
    lab.cut([away], others)
    await lab.reach(others, away.rounds + rounds)
    for member in lab.members:
        member.idle = True
    await anyio.sleep(5.0)
    return away, others


async def come_back(lab, away, others) -> int:
    """Bytes it took until it stood where the others do."""
    before = away.transport.traffic.total.received + away.transport.traffic.total.sent
    lab.heal([away], others)
    await lab.until(lambda: away.node.driver.head.hash == others[0].node.driver.head.hash)
    await anyio.sleep(10.0)  # whatever it goes on fetching counts
    lab.check_equal()
    return away.transport.traffic.total.received + away.transport.traffic.total.sent - before


@not_given_up(schema=one_tensor(NUMEL // 2))
async def test_a_peer_five_rounds_behind_catches_up_for_a_twentieth_of_a_snapshot(lab):
    away, others = await fall_behind(lab, 5)
    assert others[0].rounds - away.rounds >= 5
    assert await come_back(lab, away, others) <= 0.05 * 4 * NUMEL // 2
    assert not away.happened("resynced")


def spoilt(commit, **fields):
    return replace(commit, record=replace(commit.record, **fields))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda commits: [spoilt(commit, fragment=77) for commit in commits],  # one flipped bit: the peer ended of it
        lambda commits: [spoilt(commit, outer_step=2**63 - 1) for commit in commits],
        lambda commits: [replace(commit, certificate=Certificate(0, ())) for commit in commits],
        lambda commits: commits[::-1],
    ],
    ids=["fragment", "step", "votes", "order"],
)
@not_given_up(schema=one_tensor(NUMEL // 2))  # so large that missed commits are worth their frames
async def test_a_peer_that_is_told_a_wrong_chain_goes_on_and_asks_another(lab, spoil):
    away, (liar, honest) = await fall_behind(lab, 3)
    recent, head = liar.node.driver.machine.state.recent, away.node.driver.head
    wrong = spoil([commit for number, commit in recent.items() if number > head.round])
    bodies = [encode(commit) for commit in wrong]
    answer = b"".join(LENGTH.pack(len(body)) + body for body in bodies)
    liar.node.catch_up.donor._commits_after = lambda round_, room: answer
    lab.network.heal(away.signer.peer, liar.signer.peer)
    await lab.until(lambda: away.happened("catch_up_failed"))
    assert await come_back(lab, away, (honest,)) > 0
    assert not away.happened("resynced")


class Stranger:
    """Not of the run's members: it says that its own chain is far ahead, of which nothing can be checked."""

    def __init__(self, lab, victim) -> None:
        self.transport = lab.network.transport(Signer(bytes([9]) * 32))
        self.victim, self.asked, self.chain = victim, 0, b""
        limits = {CHAIN: LOCATOR * WHERE.size, INDEX: 0, STATE: CHUNK.size, PACKED: ANY_FORM.size}
        for protocol, limit in limits.items():
            serve_requests(self.transport, protocol, partial(self.answer, protocol), limit=limit)

    async def answer(self, protocol, peer, data):
        self.asked += 1
        if protocol == INDEX:
            replica, head = self.victim.node.replica, self.victim.node.driver.head
            tensors = {name: torch.full_like(found, 7.0) for name, found in replica.shared_tensors().items()}
            anchor = replica.digest_of(tensors)
            claimed = replace(head, round=2**59, tokens=2**59, hash=bytes(32), anchor=anchor)
            self.snapshot = Snapshot(tensors, {"head": claimed.to_dict()})
            return self.snapshot.index.to_bytes()
        if protocol == STATE:
            return self.snapshot.chunk(CHUNK.unpack(data)[1])
        return self.chain if protocol == CHAIN else bytes([PLAIN]) + self.snapshot.chunk(ANY_FORM.unpack(data)[1])


@asynccontextmanager
async def stranger_beside(lab):
    """A stranger that all know of; however it went, none of them follows it."""
    stranger = Stranger(lab, lab.members[0])
    async with stranger.transport:
        for member in lab.members:
            await stranger.transport.connect(member.signer.peer, member.transport.addresses())
        yield stranger
    assert all(member.node.driver.head.round < 100 for member in lab.members)
    assert all(float(member.node.replica.anchors[0].mean()) < 6.0 for member in lab.members)
    lab.check_equal()


@scene(peers=3, rounds=1, schema=one_tensor(NUMEL // 64))
async def test_what_a_stranger_says_of_rounds_is_no_reason_to_ask_it_for_them(lab):
    """It replaced the model and the chain of a whole swarm: the others followed whom it had told."""
    async with stranger_beside(lab) as stranger:
        victim = lab.members[0].signer.peer
        await notify(stranger.transport, victim, CONTROL, encode(Behind(2**59)), timeout=5.0)
        await lab.rounds(2)
        assert stranger.asked == 0


@scene(peers=3, rounds=1, schema=one_tensor(NUMEL // 64))
async def test_a_chain_that_nobody_can_check_is_believed_of_no_stranger_while_most_stand_on_ours(lab):
    async with stranger_beside(lab) as stranger:
        victim = lab.members[0]
        before = victim.node.driver.head.round
        with suppress(PayloadError):
            await victim.node.catch_up._catch_up(stranger.transport.peer)
        assert not victim.happened("resynced")
        assert victim.node.driver.head.round in (before, before + 1)
        await lab.rounds(1)
        assert stranger.asked > 0


@scene(peers=3, rounds=1, schema=one_tensor(NUMEL // 64))
async def test_a_chain_that_goes_on_for_as_long_as_it_is_asked_for_ends_with_the_first_answer_that_is_made_up(lab):
    async with stranger_beside(lab) as stranger:
        victim = lab.members[0]
        first = next(iter(victim.node.driver.machine.state.recent.values()))
        places = [SHARED.pack(first.record.round - 1)]
        for round_ in range(first.record.round, first.record.round + 200):
            body = encode(spoilt(first, round=round_))
            places.append(LENGTH.pack(len(body)) + body)
        stranger.chain = b"".join(places)
        with pytest.raises(PayloadError, match=r"votes|does not follow"):
            await victim.node.catch_up._catch_up(stranger.transport.peer)
        assert stranger.asked <= 3
        await lab.rounds(1)


@not_given_up(schema=one_tensor(NUMEL // 64))
async def test_a_snapshot_is_taken_of_who_showed_its_chain_and_not_of_who_was_asked_first(lab):
    """Laggards asked a newcomer, which knows no place of theirs, again and again."""
    away, others = await fall_behind(lab, 3)
    newcomer = Stranger(lab, others[0])
    async with newcomer.transport:
        lab.heal([away], others)
        await newcomer.transport.connect(away.signer.peer, away.transport.addresses())
        away.node.catch_up.is_cheap = lambda commits: False
        await lab.until(lambda: len(away.node.directory.live()) == 2 or away.rounds == others[0].rounds)
        await away.node.catch_up._catch_up(newcomer.transport.peer)
        assert away.node.driver.head.hash == others[0].node.driver.head.hash
        assert newcomer.asked <= 1
        lab.check_equal()


@scene(lambda: small_terms("diloco", shrink_after=600.0), peers=3, rounds=1, schema=one_tensor(6 * 4096))
async def test_a_snapshot_is_fetched_when_replaying_would_cost_more(lab):
    away, others = await fall_behind(lab, 20)
    state, inbox = away.node.driver.state, away.node.driver.frames.inbox
    inbox.plans[state.head.round + 1, 0] = ()  # of the round that it missed first
    book, plans = state.on_update, []

    def booked(update):
        if update.record is None:
            plans.append(list(inbox.plans))
        book(update)

    state.on_update = booked
    assert await come_back(lab, away, others) <= 1.5 * 2 * 4 * 6 * 4096
    assert away.happened("resynced")
    assert plans == [[]], "what the past had is kept after the snapshot was taken over"


@scene(lambda: small_terms("sparseloco", shrink_after=600.0), peers=3, rounds=1)
async def test_a_snapshot_is_fetched_when_the_frames_to_replay_are_nowhere_any_more(lab):
    away, others = await fall_behind(lab, 3)
    for member in others:
        member.node.driver.state.store.forget_before(10**6)
    await come_back(lab, away, others)
    assert away.happened("resynced")
    assert not away.happened("healed"), "nothing of it was given up"


@scene(lambda: small_terms("sparseloco", lease=12.0, shrink_after=600.0), schema=one_tensor(NUMEL // 4), spread=0.02)
async def test_a_join_that_is_cut_off_goes_on_where_it_was(lab):
    donor = lab.add()
    await lab.rounds(1)
    donor.idle = True
    await anyio.sleep(2 * lab.step)
    joiner = lab.add()
    lab.network.set_uplink(donor.signer.peer, 1.6 * MBIT)
    await anyio.sleep(6.0)  # more than half of it
    lab.network.cut(donor.signer.peer, joiner.signer.peer)
    await anyio.sleep(2.0)
    assert not joiner.node.ready.is_set()
    assert joiner.happened("sync_failed")
    lab.network.heal(donor.signer.peer, joiner.signer.peer)
    here, whole = joiner.node.catch_up.snapshots.under_way
    assert whole / 3 < here < whole == NUMEL
    await lab.until(lambda: joiner.node.ready.is_set())
    assert joiner.node.catch_up.snapshots.under_way == (0, 0), "it is taken, and nothing is held of it"
    assert joiner.transport.traffic.total.received <= 1.2 * NUMEL


@scene(schema=one_tensor(NUMEL // 4))
async def test_the_longer_of_two_branches_fetches_nothing_of_the_shorter(lab):
    shorter = lab.add()
    longer = lab.add(founder=True)
    lab.network.cut(shorter.signer.peer, longer.signer.peer)
    await lab.until(lambda: shorter.rounds >= 2)
    shorter.idle = True
    await lab.until(lambda: longer.rounds >= shorter.rounds + 3)
    longer.idle = True
    await anyio.sleep(2.0)
    before = longer.transport.traffic.total.received
    lab.network.heal(shorter.signer.peer, longer.signer.peer)
    longer.node.driver.state.catch_up.ask(shorter.signer.peer)
    await anyio.sleep(2.0)
    assert longer.transport.traffic.total.received - before <= 0.1 * NUMEL
    await lab.until(lambda: shorter.node.replica.digest == longer.node.replica.digest)
    assert shorter.happened("resynced")


@scene("diloco", peers=2, rounds=1)
async def test_a_commit_that_came_by_itself_while_it_was_asked_for_leaves_no_plan_behind(lab):
    one, other = (member.node for member in lab.members)
    commits = list(other.driver.machine.state.recent.values())
    assert any(commit.record.contributors for commit in commits)
    assert await one.catch_up.replay(other.driver.state.me, commits)
    assert [round_ for round_, _ in one.driver.frames.inbox.plans if round_ <= one.driver.head.round] == []


def test_an_answer_of_more_commits_than_anybody_keeps_is_refused_before_they_are_read():
    """Eight megabytes of records of one vote each took the loop of whoever looked at them for ten seconds."""
    body = encode(Commit(GATHERED, Certificate(0, ())))
    one = LENGTH.pack(len(body)) + body
    assert len(split_commits(one * RECENT)) == RECENT
    with pytest.raises(PayloadError, match="more than 256 commits"):
        split_commits(one * (RECENT + 1))
