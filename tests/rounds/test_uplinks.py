"""Frames over thin uplinks, or over those that need longer than any deadline: they go out once, and are waited for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch

from decentral.benchmarks.exchange import gather_bound
from decentral.consensus.round_state import Fetch
from decentral.consensus.timing import SLACK
from decentral.dissemination import pull
from decentral.dissemination.reassembly import PAUSE
from decentral.flow.pacing import SECONDS
from decentral.manifest import preset_manifest
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.transport import memory
from decentral.wire.pieces import Want
from tests.kit.nodes import run_in_lab, scene, small_terms
from tests.kit.partitions import DENSE


def one_tensor(numel: int):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(numel // 1024, 1024))
    return schema_of(model, 1)


async def swarm_of(lab, uplinks, known: bool = True) -> None:
    """A member with each of ``uplinks``, which their leases say where it is known; nobody trains."""
    await lab.start(len(uplinks))
    await lab.rest()
    for member, uplink in zip(lab.members, uplinks, strict=True):
        lab.network.set_uplink(member.signer.peer, uplink)
        member.node.uplink = lambda uplink=uplink: uplink if known else None
    await anyio.sleep(15.0)  # every lease says the new rate


async def tell(lab, estimates) -> None:
    """Each says another uplink than it has."""
    for member, uplink in zip(lab.members, estimates, strict=True):
        member.node.uplink = lambda uplink=uplink: uplink
    await anyio.sleep(15.0)


async def measured_swarm_of(lab, uplinks, bursts) -> None:
    """The same, where lines let bursts through, and all tell what they measured themselves."""
    await lab.start(len(uplinks))
    await lab.rest()
    for member, uplink, burst in zip(lab.members, uplinks, bursts, strict=True):
        lab.network.set_uplink(member.signer.peer, uplink, burst=burst)
        member.node.uplink = lambda meter=member.transport.meter: meter.bytes_per_second
    for _ in range(3):
        await one_round(lab)
        await anyio.sleep(15.0)  # every lease says what it told


async def one_round(lab, late: float = 0.0) -> float:
    """Seconds from the offers of all to the last commit; the first member's is ``late``."""
    began, goal = anyio.current_time(), lab.members[0].rounds + 1
    async with anyio.create_task_group() as nursery:
        for member in lab.members:
            driver = member.node.driver
            anchor = member.node.replica.anchors[0]
            delta = 0.3 * (anchor - member.target(0))
            change = Contribution(0, driver.head.hash, anchor - delta, delta, lab.manifest.inner.steps, 1)
            nursery.start_soon(contribute_after, 0.0 if member is not lab.members[0] else late, driver, change)
    while any(member.rounds < goal for member in lab.members):
        await anyio.sleep(0.01)
    return anyio.current_time() - began


async def contribute_after(seconds: float, driver, change: Contribution) -> None:
    await anyio.sleep(seconds)
    await driver.contribute(change)


async def copies_sent(lab, late: float = 0.0) -> list[float]:
    """How many times the bytes of a frame each sent in one round."""
    before = [traffic(member).sent for member in lab.members]
    await one_round(lab, late)
    state, record = lab.members[0].node.driver.state, lab.members[0].log[-1].record
    nbytes = len(state.find_stored(record.frames[0].frame).data)
    return [(traffic(member).sent - was) / nbytes for member, was in zip(lab.members, before, strict=True)]


def traffic(member):
    return member.transport.traffic.total


# ---- one thin uplink among fast ones: the others pass the frame on ----

FAST = 625_000.0  # bytes/s
NUMEL = 1 << 16
NBYTES = 4 * NUMEL
ONE_THIN = [FAST] * 4 + [FAST / 10]


def plain():
    limits = {"lease": 12.0, "shrink_after": 600.0, "deadline_floor": 30.0, "deadline_ceiling": 60.0}
    return small_terms("sparseloco", **limits).changed(compressor=DENSE)


of_plain_terms = partial(scene, plain, schema=one_tensor(NUMEL), step=2.0)


@pytest.mark.parametrize("thin", [0.1, pytest.param(0.25, marks=pytest.mark.long), 1.0])
@of_plain_terms()
async def test_a_round_with_one_thin_uplink_takes_little_more_than_the_links_need(lab, thin):
    uplinks = [FAST] * 7 + [FAST * thin]
    await swarm_of(lab, uplinks)
    took = [await one_round(lab) for _ in range(3)]
    assert max(took) <= 1.35 * gather_bound(NBYTES, uplinks, [1e12] * 8)
    assert all(len(commit.record.frames) == 8 for commit in lab.members[0].log[-3:])
    lab.check_equal()


EITHER_WAY = [(2, 1, 1, 1, 1, 1), (0.5, 1, 1, 1, 1, 1), (2, 0.5) * 3, (2, 2, 0.5, 0.5, 0.5, 0.5), (2, 2, 0.5, 0.5)]


@pytest.mark.parametrize("wrong", EITHER_WAY)
@of_plain_terms()
async def test_whatever_rate_is_wrong_by_a_factor_of_two_no_round_is_slower_than_sending_to_everybody(lab, wrong):
    """The first one that is slower than planned is the last."""
    await swarm_of(lab, [FAST] * len(wrong))
    usual = max([await one_round(lab) for _ in range(3)])
    await tell(lab, [FAST * times for times in wrong])
    took = [await one_round(lab) for _ in range(6)]
    assert max(took[1:]) <= 1.1 * usual


@pytest.mark.parametrize("bursts", [(65_536,) * 6, (262_144,) * 6, (262_144, 0, 0, 0, 0, 0), (0, *(262_144,) * 5)])
@of_plain_terms()
async def test_on_equal_lines_nobody_passes_anything_on_whatever_bursts_they_let_through(lab, bursts):
    await measured_swarm_of(lab, [FAST] * 6, bursts)
    for _ in range(3):
        assert max(await copies_sent(lab)) <= 1.15 * 5
    assert max(member.node.uplink() for member in lab.members) <= 1.5 * FAST


QUARTER = [FAST] * 5 + [FAST / 4]


@of_plain_terms()
async def test_rounds_that_a_late_peer_makes_long_stop_no_other_from_having_its_frame_passed_on(lab):
    await swarm_of(lab, QUARTER)
    for _ in range(6):
        assert (await copies_sent(lab, late=8.0))[-1] < 3


@of_plain_terms()
async def test_rounds_that_a_slow_peer_makes_long_stop_no_other_for_more_than_one_frame(lab):
    """Above all those that it leads."""
    await swarm_of(lab, QUARTER)
    assert (await copies_sent(lab))[-1] < 3
    frames = lab.members[0].node.driver.frames
    take = frames.take

    async def take_slowly(data, wanted=None):
        await anyio.sleep(8.0)
        await take(data, wanted)

    frames.take = take_slowly
    went = [(await copies_sent(lab))[-1] < 3 for _ in range(6)]
    assert went.count(False) <= 1


@of_plain_terms()
async def test_a_thin_peer_sends_its_frame_hardly_more_than_once_and_it_is_not_fetched_while_it_is_checked(lab):
    """Who waited for the last piece, and did not find the frame kept yet, had it twice."""
    await swarm_of(lab, ONE_THIN)
    slow, *_, thin = lab.members
    frames = slow.node.driver.frames
    came, take = [], frames.take

    async def checked_slowly(data, wanted=None):
        came.append(data)
        await anyio.sleep(1.5)
        await take(data, wanted)

    frames.take = checked_slowly
    received, sent = traffic(slow).received, traffic(thin).sent
    await one_round(lab)
    assert traffic(slow).received - received < 1.1 * 4 * len(came[0])
    assert traffic(thin).sent - sent < 1.2 * NBYTES


@of_plain_terms()
async def test_a_frame_is_not_asked_of_its_owner_while_that_one_s_push_stands_still(lab, monkeypatch):
    """It would come twice by the same way: a thin peer had most frames so, its full uplink held up what they need."""
    asked = []

    async def fetch(transport, holder, want, limit):
        asked.append(holder)

    await swarm_of(lab, [FAST] * 3)
    driver, owner, other = (member.node.driver for member in lab.members)
    monkeypatch.setattr(pull, "fetch", fetch)
    wanted = Fetch(b"f" * 32, owner.state.me, driver.head.round + 1, (owner.state.me, other.state.me))
    with driver.frames.arrivals.push(owner.state.me):
        await driver.frames.fetcher.fetch(wanted)
    assert asked == [other.state.me]
    await driver.frames.fetcher.fetch(wanted)
    assert asked == [other.state.me, owner.state.me, other.state.me]


@of_plain_terms()
async def test_who_is_sending_its_frame_in_pieces_sends_it_to_nobody_again_before_it_stands_still(lab):
    """Four of seven who lacked some of a thin peer's frame had all of it once more: that round took 94 s."""
    await swarm_of(lab, ONE_THIN)
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


@of_plain_terms()
async def test_of_a_frame_of_which_some_did_not_come_only_that_is_fetched(lab):
    await swarm_of(lab, ONE_THIN)
    silent = lab.members[0].node.driver.frames.broadcast.forwarder
    silent.take = lambda piece, others: None  # takes them, and that is all
    before = [traffic(member).received for member in lab.members]
    await one_round(lab)
    assert len(lab.members[1].log[-1].record.frames) == 5
    taken = [traffic(member).received - was for member, was in zip(lab.members, before, strict=True)]
    assert max(taken) < 3.6 * NBYTES  # four frames of 0.83 of it


@of_plain_terms()
async def test_who_should_pass_on_and_is_not_reached_is_made_up_for_by_the_others(lab):
    await swarm_of(lab, ONE_THIN)
    *fast, thin = lab.members
    while thin.node.driver.machine.state.leader_of(0) == thin.signer.peer:
        await one_round(lab)
    leader = thin.node.driver.machine.state.leader_of(0)
    lab.cut([next(member for member in fast if member.signer.peer != leader)], [thin])
    await one_round(lab)
    assert thin.signer.peer in {ref.peer for ref in thin.log[-1].record.frames}
    lab.check_equal()


@of_plain_terms()
async def test_a_peer_that_passes_on_something_else_stops_no_round_and_changes_no_bit(lab):
    await swarm_of(lab, ONE_THIN)
    liar = lab.members[0].node.driver.frames.broadcast.forwarder
    take = liar.take
    liar.take = lambda piece, others: take(replace(piece, data=bytes(len(piece.data))), others)
    await one_round(lab)
    assert len(lab.members[1].log[-1].record.frames) == 5
    lab.check_equal()


# ---- frames that take longer than any deadline of the manifest: they have the time that their bytes need ----

LONG_NUMEL = 1 << 18
LONG = 4 * LONG_NUMEL  # bytes of a contribution
UPLINK = LONG / 8  # bytes/s: 8 s for one body, about 1 Mbit/s
PRESET = {"gather": "sparseloco", "reduce": "diloco", "pair": "noloco"}


@pytest.fixture
def little_in_flight(monkeypatch):
    """A window of a frame's sixteenth, as that of the daemon is of 16 MB: else messages wait behind whole frames."""
    monkeypatch.setattr(memory, "WINDOW", LONG // 16)


def of_long_frames(kind: str):
    run = {"rounds": 1000, "salt": "long"}
    manifest = preset_manifest(PRESET[kind], run=run, compressor=DENSE, swarm={"deadline_ceiling": 10.0})
    return partial(run_in_lab, manifest, schema=one_tensor(LONG_NUMEL), step=2.0)


@pytest.mark.usefixtures("little_in_flight")
@pytest.mark.parametrize(
    ("kind", "known"), [("gather", True), ("reduce", False), pytest.param("reduce", True, marks=pytest.mark.long)]
)
def test_a_round_whose_frames_take_longer_than_the_deadline_names_everybody_and_sends_nothing_twice(kind, known):
    bound = {"gather": 3 * LONG, "reduce": 2 * 3 / 4 * LONG}[kind] / UPLINK

    async def script(lab):
        await swarm_of(lab, [UPLINK] * 4, known)
        for _ in range(2):
            before = sum(traffic(member).sent for member in lab.members)
            took = await one_round(lab)
            record = lab.members[0].log[-1].record
            assert len(record.contributors or record.frames) == 4
            assert took < 1.3 * bound
            assert sum(traffic(member).sent for member in lab.members) - before < 1.05 * 4 * bound * UPLINK
        lab.check_equal()

    of_long_frames(kind)(script)


@pytest.mark.usefixtures("little_in_flight")
def test_who_offers_to_a_reduce_and_sends_no_slices_is_left_out_after_twice_the_time_that_they_need():
    async def keep_all(pending, plan, head):
        pass

    async def script(lab):
        await swarm_of(lab, [UPLINK] * 4)
        leader = lab.members[0].node.driver.machine.state.leader_of(0)
        mute = next(member for member in lab.members if member.signer.peer != leader)
        mute.node.driver.reducer.send_slices = keep_all
        took = await one_round(lab)
        named = {ref.peer for ref in lab.members[0].log[-1].record.contributors}
        assert named == {member.signer.peer for member in lab.members} - {mute.signer.peer}
        alone = 2 * LONG / UPLINK
        assert SLACK * alone / 2 < took < 2.0 + SLACK * alone / 2 + PAUSE + 1.5 * alone

    of_long_frames("reduce")(script)


@pytest.mark.usefixtures("little_in_flight")
def test_a_pair_swaps_frames_that_take_longer_than_the_deadline():
    """They gave up each other at every step, and both went on alone."""

    async def script(lab):
        await lab.start(2)
        for member in lab.members:
            lab.network.set_uplink(member.signer.peer, UPLINK)
            member.node.uplink = lambda: UPLINK
        await anyio.sleep(60.0)  # the last quick swaps are over
        before = [len(member.swaps) for member in lab.members]
        await lab.until(lambda: all(len(m.swaps) >= count + 3 for m, count in zip(lab.members, before, strict=True)))
        assert all(swap.partner is not None for member in lab.members for swap in member.swaps[-3:])

    of_long_frames("pair")(script)
