"""Frames that take far longer than any deadline of the manifest: what was offered has the time that its bytes need."""

from __future__ import annotations

import anyio
import pytest
import torch

from decentral.consensus.timing import SLACK
from decentral.dissemination.reassembly import PAUSE
from decentral.manifest import preset_manifest
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.transport import memory

NUMEL = 1 << 18
NBYTES = 4 * NUMEL  # of a contribution
UPLINK = NBYTES / 8  # bytes/s: 8 s for one body, about 1 Mbit/s
PRESET = {"gather": "sparseloco", "reduce": "diloco", "pair": "noloco"}


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch):
    """A window of a frame's sixteenth, as that of the daemon is of 16 MB: else messages wait behind whole frames."""
    monkeypatch.setattr(memory, "WINDOW", NBYTES // 16)


def one_tensor():
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(NUMEL // 1024, 1024))
    return schema_of(model, 1)


def manifest_of(kind, **run):
    compressor = {"chain": "none", "feedback": "none"}
    limits = {"deadline_ceiling": 10.0}
    return preset_manifest(
        PRESET[kind], run={"rounds": 1000, "salt": "long", **run}, compressor=compressor, swarm=limits
    )


async def swarm_of(lab, size, known):
    for _ in range(size):
        lab.add()
    await lab.all_members()
    for member in lab.members:
        member.idle = True
    await lab.until(lambda: all(m.node.driver.pending is None for m in lab.members))
    for member in lab.members:
        lab.network.set_uplink(member.signer.peer, UPLINK)
        member.node.uplink = lambda: UPLINK if known else None
    await anyio.sleep(15.0)  # every lease says so


async def offer_all(lab, members):
    async with anyio.create_task_group() as nursery:
        for member in members:
            driver = member.node.driver
            anchor = member.node.replica.anchors[0]
            local = anchor + 0.3 * (member.target(0) - anchor)
            pull = Contribution(0, driver.head.hash, local, anchor - local, lab.manifest.inner.steps, 1)
            nursery.start_soon(driver.contribute, pull)


async def one_round(lab):
    """Seconds from the offers of all to the last commit."""
    began, goal = anyio.current_time(), lab.members[0].rounds + 1
    await offer_all(lab, lab.members)
    while any(member.rounds < goal for member in lab.members):
        await anyio.sleep(0.01)
    return anyio.current_time() - began


@pytest.mark.parametrize(("kind", "known"), [("gather", True), ("reduce", False), ("reduce", True)])
def test_a_round_whose_frames_take_longer_than_the_deadline_names_everybody_and_sends_nothing_twice(
    run_lab, kind, known
):
    bound = {"gather": 3 * NBYTES, "reduce": 2 * 3 / 4 * NBYTES}[kind] / UPLINK

    async def script(lab):
        await swarm_of(lab, 4, known)
        for _ in range(2):
            before = sum(member.transport.traffic.total.sent for member in lab.members)
            took = await one_round(lab)
            record = lab.members[0].log[-1].record
            assert len(record.contributors or record.frames) == 4
            assert took < 1.3 * bound
            sent = sum(member.transport.traffic.total.sent for member in lab.members) - before
            assert sent < 1.05 * 4 * bound * UPLINK
        lab.check_equal()

    run_lab(manifest_of(kind), script, schema=one_tensor(), step=2.0)


def test_who_offers_to_a_reduce_and_sends_no_slices_is_left_out_after_twice_the_time_that_they_need(run_lab):
    async def script(lab):
        await swarm_of(lab, 4, known=True)
        leader = lab.members[0].node.driver.machine.state.leader_of(0)
        mute = next(member for member in lab.members if member.signer.peer != leader)

        async def keep_all(pending, plan, head):
            pass

        mute.node.driver.reducer.send_slices = keep_all
        took = await one_round(lab)
        named = {ref.peer for ref in lab.members[0].log[-1].record.contributors}
        assert named == {member.signer.peer for member in lab.members} - {mute.signer.peer}
        alone = 2 * NBYTES / UPLINK
        assert SLACK * alone / 2 < took < 2.0 + SLACK * alone / 2 + PAUSE + 1.5 * alone

    run_lab(manifest_of("reduce"), script, schema=one_tensor(), step=2.0)


def test_a_pair_swaps_frames_that_take_longer_than_the_deadline(run_lab):
    """They gave up each other at every step, and both went on alone."""

    async def script(lab):
        pair = [lab.add(), lab.add()]
        await lab.all_members()
        for member in pair:
            lab.network.set_uplink(member.signer.peer, UPLINK)
            member.node.uplink = lambda: UPLINK
        await anyio.sleep(60.0)  # the last quick swaps are over
        before = [len(member.swaps) for member in pair]
        await lab.until(lambda: all(len(m.swaps) >= count + 3 for m, count in zip(pair, before, strict=True)))
        assert all(swap.partner is not None for member in pair for swap in member.swaps[-3:])

    run_lab(manifest_of("pair"), script, schema=one_tensor(), step=2.0)
