"""A peer with a thin uplink among fast ones: its frame goes out once, and the others pass it on."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
import torch

from decentral.benchmarks.exchange import gather_bound
from decentral.consensus.round_state import Fetch
from decentral.dissemination import pull
from decentral.dissemination.reassembly import PAUSE
from decentral.flow.pacing import SECONDS
from decentral.manifest import preset_manifest
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.wire.pieces import Want

FAST = 625_000.0  # bytes/s
NUMEL = 1 << 16
NBYTES = 4 * NUMEL


def one_tensor():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(NUMEL // 1024, 1024))
    return schema_of(model, 1)


async def swarm_of(lab, uplinks) -> None:
    for _ in uplinks:
        lab.add()
    await lab.all_members()
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: all(m.node.driver.pending is None for m in lab.members))
    for member, uplink in zip(lab.members, uplinks, strict=True):
        lab.network.set_uplink(member.signer.peer, uplink)
        member.node.uplink = lambda uplink=uplink: uplink
    await anyio.sleep(15.0)  # every lease says the new rate


async def one_round(lab) -> float:
    """Seconds from the offers of all to the last commit."""
    began, goal = anyio.current_time(), lab.members[0].rounds + 1
    async with anyio.create_task_group() as nursery:
        for member in lab.members:
            driver = member.node.driver
            anchor = member.node.replica.anchors[0]
            delta = 0.3 * (anchor - member.target(0))
            pull = Contribution(0, driver.head.hash, anchor - delta, delta, lab.manifest.inner.steps, 1)
            nursery.start_soon(driver.contribute, pull)
    while any(member.rounds < goal for member in lab.members):
        await anyio.sleep(0.01)
    return anyio.current_time() - began


def plain():
    limits = {"lease": 12.0, "shrink_after": 600.0, "deadline_floor": 30.0, "deadline_ceiling": 60.0, "min_peers": 1}
    compressor = {"chain": "none", "feedback": "none"}
    return preset_manifest("sparseloco", run={"rounds": 1000, "salt": "thin"}, swarm=limits, compressor=compressor)


@pytest.mark.parametrize("thin", [0.1, 0.25, 1.0])
def test_a_round_with_one_thin_uplink_takes_little_more_than_the_links_need(run_lab, thin):
    uplinks = [FAST] * 7 + [FAST * thin]

    async def script(lab):
        await swarm_of(lab, uplinks)
        took = [await one_round(lab) for _ in range(3)]
        assert max(took) <= 1.35 * gather_bound(NBYTES, uplinks, [1e12] * 8)
        assert all(len(commit.record.frames) == 8 for commit in lab.members[0].log[-3:])
        lab.check_equal()

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_a_thin_peer_sends_its_frame_hardly_more_than_once(run_lab):
    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        thin = lab.members[4]
        before = thin.transport.traffic.total.sent
        await one_round(lab)
        assert thin.transport.traffic.total.sent - before < 1.2 * NBYTES

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_a_frame_that_came_in_pieces_is_not_fetched_while_it_is_checked(run_lab):
    """Who waited for the last piece, and did not find the frame kept yet, had it twice."""

    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        slow = lab.members[0]
        frames = slow.node.driver.frames
        came, take = [], frames.take

        async def checked_slowly(data, wanted=None):
            came.append(data)
            await anyio.sleep(1.5)
            await take(data, wanted)

        frames.take = checked_slowly
        before = slow.transport.traffic.total.received
        await one_round(lab)
        assert slow.transport.traffic.total.received - before < 1.1 * 4 * len(came[0])

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_a_frame_is_not_asked_of_its_owner_while_that_one_s_push_stands_still(run_lab, monkeypatch):
    """It would come twice by the same way: a thin peer had most frames so, its full uplink held up what they need."""
    asked = []

    async def fetch(transport, holder, want, limit):
        asked.append(holder)

    async def script(lab):
        await swarm_of(lab, [FAST] * 3)
        driver, owner, other = (member.node.driver for member in lab.members)
        monkeypatch.setattr(pull, "fetch", fetch)
        wanted = Fetch(b"f" * 32, owner.me, (owner.me, other.me))
        with driver.frames.arrivals.push(owner.me):
            await driver.frames.fetcher.fetch(wanted, driver.head.round + 1)
        assert asked == [other.me]
        await driver.frames.fetcher.fetch(wanted, driver.head.round + 1)
        assert asked == [other.me, owner.me, other.me]

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_who_is_sending_its_frame_in_pieces_sends_it_to_nobody_again_before_it_stands_still(run_lab):
    """Four of seven who lacked some of a thin peer's frame had all of it once more: that round took 94 s."""

    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        thin, first = lab.members[4].node.driver.frames, lab.members[0].signer.peer
        async with anyio.create_task_group() as nursery:
            nursery.start_soon(one_round, lab)
            while not thin.broadcast.under_way:
                await anyio.sleep(0.01)
            frame = thin.broadcast.under_way[0]
            await anyio.sleep(1.0)
            assert await thin.fetcher.answer(first, Want(frame).to_bytes()) == b""
            lab.network.set_uplink(lab.members[4].signer.peer, 1.0)
            await anyio.sleep(SECONDS + PAUSE)  # until what left has arrived, and then so long without an answer
            assert thin.broadcast.under_way
            assert await thin.fetcher.answer(first, Want(frame, ((0, 100),)).to_bytes())
            nursery.cancel_scope.cancel()

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_of_a_frame_of_which_some_did_not_come_only_that_is_fetched(run_lab):
    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        lab.members[0].node.driver.frames.broadcast.forwarder.take = lambda piece, others: (
            None
        )  # takes them, and that is all
        before = [member.transport.traffic.total.received for member in lab.members]
        await one_round(lab)
        assert len(lab.members[1].log[-1].record.frames) == 5
        taken = [member.transport.traffic.total.received - was for member, was in zip(lab.members, before, strict=True)]
        assert max(taken) < 3.6 * NBYTES  # four frames of 0.83 of it

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_who_should_pass_on_and_is_not_reached_is_made_up_for_by_the_others(run_lab):
    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        *fast, thin = lab.members
        while thin.node.driver.machine.state.leader_of(0) == thin.signer.peer:
            await one_round(lab)
        leader = thin.node.driver.machine.state.leader_of(0)
        lab.cut([next(member for member in fast if member.signer.peer != leader)], [thin])
        await one_round(lab)
        assert thin.signer.peer in {ref.peer for ref in thin.log[-1].record.frames}
        lab.check_equal()

    run_lab(plain(), script, schema=one_tensor(), step=2.0)


def test_a_peer_that_passes_on_something_else_stops_no_round_and_changes_no_bit(run_lab):
    async def script(lab):
        await swarm_of(lab, [FAST] * 4 + [FAST / 10])
        liar = lab.members[0].node.driver.frames.broadcast.forwarder
        take = liar.take
        liar.take = lambda piece, others: take(replace(piece, data=bytes(len(piece.data))), others)
        await one_round(lab)
        assert len(lab.members[1].log[-1].record.frames) == 5
        lab.check_equal()

    run_lab(plain(), script, schema=one_tensor(), step=2.0)
