"""A member that claims a heavier chain: a lie costs time, and nobody's model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch

from decentral.consensus import learner
from decentral.consensus.chain import Head
from decentral.rounds.catch_up import CatchUp, split_commits, split_oldest
from decentral.rounds.snapshots import CHAIN, INDEX, LENGTH, OLDEST, PACKED, STATE, Donor
from decentral.state.snapshot import Snapshot
from decentral.swarm.directory import Directory
from decentral.transport.base import Respond
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId
from decentral.wire.messages import Behind, Certificate, encode
from tests.kit.liars import at_a_head, honest, say, swarm_of
from tests.kit.nodes import Member, tiny_model
from tests.kit.tables import long_but


class Pretender:
    """A key that was a member, and from now on shows a chain that nobody made."""

    def __init__(self, lab, liar, head, tensors) -> None:
        self.transport = lab.network.transport(liar.signer)
        self.directory = Directory(self.transport, liar.signer, lab.manifest.digest, ttl=lab.manifest.swarm.lease)
        self.head = head
        self.snapshot = Snapshot(tensors, {"head": head.to_dict()})
        self.bootstrap = [a for member in honest(lab, liar) for a in member.transport.addresses()]
        serve_requests(self.transport, CHAIN, self._nothing, limit=1 << 16)
        serve_requests(self.transport, INDEX, self._index, limit=0)
        serve_requests(self.transport, STATE, self._chunk, limit=36)
        serve_requests(self.transport, PACKED, self._packed, limit=37)

    async def _nothing(self, peer, data):
        return b""

    async def _index(self, peer, data):
        return self.snapshot.index.to_bytes()

    async def _chunk(self, peer, data):
        return self.snapshot.chunk(int.from_bytes(data[32:36], "little"))

    async def _packed(self, peer, data):
        return b"\0" + self.snapshot.chunk(int.from_bytes(data[32:36], "little"))

    async def live(self) -> None:
        async with self.transport, anyio.create_task_group() as group:
            group.start_soon(self.directory.run)
            self.directory.add_bootstrap(self.bootstrap)
            self.directory.own.update(epoch=self.head.epoch, round=self.head.round, digest=self.head.hash)
            await anyio.sleep_forever()


@pytest.mark.parametrize("n", long_but([3], [3, 4, 5]))
@pytest.mark.parametrize("weight", ["heavier", "a round ahead"])
def test_a_claimed_chain_that_nobody_else_knows_is_adopted_by_nobody(run_lab, terms, n, weight):
    async def script(lab) -> None:
        await swarm_of(lab, n, rounds=3)
        liar = lab.members[-1]
        head = await at_a_head(liar)
        more = 10_000 if weight == "heavier" else 2
        claimed = replace(
            head,
            round=head.round + more,
            outer_step=head.outer_step + more,
            tokens=head.tokens * 1000 + 10**9,
            contributions=head.contributions + 10**6,
            hash=hashlib.blake2b(b"nobody made this", digest_size=32).digest(),
        )
        tensors = {name: tensor.clone() for name, tensor in liar.node.replica.shared_tensors().items()}
        liar.kill()
        lab.members.remove(liar)
        before = [member.rounds for member in lab.members]
        lab.group.start_soon(Pretender(lab, liar, claimed, tensors).live)
        await anyio.sleep(40.0)
        for member, rounds in zip(lab.members, before, strict=True):
            told = [event for event, _ in member.events]
            assert "resynced" not in told
            assert "healed" not in told
            assert member.rounds >= rounds + 5
            assert member.node.driver.head.round < claimed.round or weight != "heavier"
        lab.check_equal()

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


# ---- who was away for longer than records are kept ----


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "RECENT", 4)


def told(member: Member, event: str) -> list[dict[str, object]]:
    return [fields for name, fields in member.events if name == event]


async def one_far_behind(lab) -> Member:
    """Four peers, of which one was away for so long that nobody has the record after its head any more."""
    await swarm_of(lab, 4)
    away, others = lab.members[-1], lab.members[:-1]
    lab.cut([away], others)
    goal = away.rounds + 12
    await lab.until(lambda: all(member.rounds >= goal for member in others), 120.0)
    return away


@pytest.mark.usefixtures("few_kept")
def test_who_was_away_for_longer_than_records_are_kept_checks_all_that_lead_to_the_head_it_takes(run_lab, terms):
    async def script(lab) -> None:
        away = await one_far_behind(lab)
        lab.heal([away], lab.members[:-1])
        await lab.all_members()
        (unchecked,) = told(away, "unchecked")
        assert unchecked["records"] >= learner.RECENT - 1  # the oldest may go while they are asked for
        await lab.rounds(2)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


LIARS = {"first": (0,), "second": (1,), "third": (2,), "all": (0, 1, 2)}


@pytest.mark.usefixtures("few_kept")
@pytest.mark.parametrize("which", long_but(["first", "all"], [*LIARS]))
def test_the_word_of_who_holds_records_that_do_not_lead_to_its_head_does_not_count(run_lab, terms, which):
    liars = LIARS[which]

    async def script(lab) -> None:
        away = await one_far_behind(lab)
        for member in (lab.members[number] for number in liars):
            donor = member.node.catch_up.donor
            donor._commits_after = partial(without_votes, donor)
        lab.heal([away], lab.members[:-1])
        if len(liars) == 1:
            await lab.all_members()
            assert told(away, "unchecked")
        else:
            await anyio.sleep(20.0)
            assert told(away, "catch_up_failed")
            assert not told(away, "unchecked")

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def without_votes(donor: Donor, round_: int, room: int) -> bytes:
    """The commits that it keeps after a round, as if it had made them up."""
    commits = split_commits(Donor._commits_after(donor, round_, room))
    bodies = [encode(replace(commit, certificate=Certificate(0, ()))) for commit in commits]
    return b"".join(LENGTH.pack(len(body)) + body for body in bodies)


@pytest.mark.usefixtures("few_kept")
def test_who_reaches_several_does_not_go_by_the_word_of_the_one_that_it_asks_first(run_lab, terms):
    async def script(lab) -> None:
        away = await one_far_behind(lab)
        liar, *others = lab.members[:-1]
        head = await at_a_head(liar)
        shows(liar, replace(head, round=head.round + 1000, tokens=10**15, hash=bytes(32)))
        catch_up = away.node.catch_up

        async def of_the_liar_first(_: PeerId) -> bool:
            await lab.until(lambda: {m.signer.peer for m in (liar, *others)} <= set(away.node.directory.live()))
            return await CatchUp._catch_up(catch_up, liar.signer.peer)

        catch_up._catch_up = of_the_liar_first
        lab.heal([away], [liar, *others])
        await lab.until(lambda: told(away, "unchecked"))
        assert told(away, "unchecked")[0]["named"] == len(others)
        await lab.until(lambda: told(away, "resynced"), 10.0)
        assert away.node.driver.head.round < 1000
        assert float(away.node.replica.anchors[0].max()) < 10.0

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


# ---- those who answer late, or chose the moment ----


def answers(member: Member, protocol: str, respond: Respond, limit: int) -> None:
    """A running peer says something else from now on."""
    services = member.transport.services
    services.fixed = False
    services.handlers.pop(protocol, None)
    serve_requests(member.transport, protocol, respond, limit=limit)


async def nothing(peer: PeerId, data: bytes) -> bytes:
    return b""


def shows(liar: Member, claimed: Head, oldest: Respond = nothing) -> None:
    """A running peer claims a head that nobody made, and gives a state of its own for it."""
    tensors = {name: torch.full_like(t, 77.0) for name, t in liar.node.replica.shared_tensors().items()}
    made = Snapshot(tensors, {"head": replace(claimed, anchor=liar.node.replica.digest_of(tensors)).to_dict()})

    async def index(peer: PeerId, data: bytes) -> bytes:
        return made.index.to_bytes()

    async def chunk(peer: PeerId, data: bytes) -> bytes:
        return b"\0" + made.chunk(int.from_bytes(data[32:36], "little"))

    answers(liar, CHAIN, nothing, 1 << 16)
    answers(liar, OLDEST, oldest, 0)
    answers(liar, INDEX, index, 0)
    answers(liar, PACKED, chunk, 37)


def applies_slowly(member: Member) -> None:
    """As with a slow disk, or a large model: nobody can be told of a state meanwhile."""
    state = member.node.driver.state
    offload, append = state.offload, state.ledger.append

    async def slowly(work, *given):
        if work is append:
            await anyio.sleep(0.3)
        return await offload(work, *given)

    state.offload = slowly


@pytest.mark.parametrize("n", long_but([3], [3, 5]))
def test_a_head_that_is_claimed_while_all_others_apply_a_commit_is_adopted_by_nobody(run_lab, terms, n):
    async def script(lab) -> None:
        await swarm_of(lab, n)
        liar = lab.members[-1]
        others = honest(lab, liar)
        for member in others:
            applies_slowly(member)
        head = await at_a_head(liar)

        async def until_the_next_commit(peer, data):
            before = liar.node.driver.head.hash
            while liar.node.driver.head.hash == before:
                await anyio.sleep(0.01)
            return b""

        shows(liar, replace(head, round=head.round + 1000, tokens=10**15, hash=bytes(32)), until_the_next_commit)
        with anyio.move_on_after(25.0):
            while True:
                for member in others:
                    lab.group.start_soon(say, liar, member, Behind(member.node.driver.head.round + 50))
                await anyio.sleep(0.2)
        assert not any(told(member, "unchecked") for member in others)
        assert all(member.rounds < 100 for member in others)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


@pytest.mark.parametrize("pace", ["29 s an answer", "bytes that trickle"])
def test_a_member_that_answers_slowly_keeps_nobody_back(run_lab, terms, pace):
    async def script(lab) -> None:
        await swarm_of(lab, 4)
        away, *others = lab.members
        slow = others[-1]

        async def late(peer, data):
            await anyio.sleep(29.0)
            return b""

        async def trickle(stream):
            await stream.send((1 << 23).to_bytes(4, "little"))
            while True:
                await stream.send(bytes(5000))
                await anyio.sleep(1.0)

        for protocol, limit in ((CHAIN, 1 << 16), (OLDEST, 0), (INDEX, 0)):
            answers(slow, protocol, late, limit)
            if pace == "bytes that trickle" and protocol != INDEX:
                slow.transport.services.handlers[protocol] = trickle
        lab.cut([away], others)
        goal = away.rounds + 5
        await lab.until(lambda: all(member.rounds >= goal for member in others))
        lab.heal([away], others)
        began = anyio.current_time()
        while away.rounds < min(member.rounds for member in others) - 1:
            await say(slow, away, Behind(away.node.driver.head.round + 50))
            await anyio.sleep(0.2)
            assert anyio.current_time() - began < 30.0

    run_lab(terms("sparseloco", shrink_after=60.0), script, make_model=tiny_model)


# ---- what was before ----


@pytest.mark.parametrize("donors", ["honest", "without votes"])
def test_a_newcomer_learns_the_way_to_where_it_stands_and_none_that_was_made_up(run_lab, terms, donors):
    async def script(lab) -> None:
        await swarm_of(lab, 2, rounds=4)
        for member in lab.members:
            if donors == "without votes":
                answers(member, OLDEST, partial(unsigned, member.node.catch_up.donor), 0)
        newcomer = lab.add()
        await lab.all_members()
        await anyio.sleep(6.0)
        begins = learner.find_oldest_head(newcomer.node.driver.machine.state).round
        assert (begins == 0) is (donors == "honest")
        assert bool(told(newcomer, "catch_up_failed")) is (donors != "honest")
        lab.check_equal()

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


async def unsigned(donor: Donor, peer: PeerId, data: bytes) -> bytes:
    """Its oldest head, and the commits after it without their votes."""
    start, commits = split_oldest(await donor._on_oldest(peer, data))
    bare = [encode(replace(commit, certificate=Certificate(0, ()))) for commit in commits]
    return b"".join(LENGTH.pack(len(body)) + body for body in (json.dumps(start.to_dict()).encode(), *bare))
