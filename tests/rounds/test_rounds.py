"""The course of rounds on real nodes: who asks, who looks, who is waited for, what is sent on, and what is booked."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
import torch

from decentral.consensus import learner
from decentral.consensus.chain import VOTING, contributions
from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import PIECED
from decentral.flow.waiting import inline
from decentral.manifest import Manifest
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution, header_after
from decentral.rounds.driver import JOIN_LONGEST
from decentral.rounds.peer_watch import PeerWatch
from decentral.wire.frames import FrameKind, seal
from tests.kit.gossip_learners import Learner
from tests.kit.machines import START, A, record, ref
from tests.kit.nodes import Lab, scene, signer_of, small_terms, tiny_model
from tests.kit.partitions import DENSE, exact_terms

SECONDS = 60


@scene(lambda: small_terms("sparseloco", lease=600.0, shrink_after=1200.0), peers=3, rounds=1, make_model=tiny_model)
async def test_a_newcomer_asks_more_and_more_rarely_and_is_let_in_all_the_same(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked everybody every second: of 64 peers that began at once, each was asked two hundred times."""
    asked: list[float] = []
    take_join = learner.take_join

    def noted(state: Any, sender: bytes, request: Any, now: float) -> None:
        asked.append(now)
        take_join(state, sender, request, now)

    members = list(lab.members)
    lab.cut(members[:1], members[1:])  # alone it is no majority
    await anyio.sleep(5)
    monkeypatch.setattr(learner, "take_join", noted)
    newcomer = lab.add()
    lab.cut([newcomer], members[1:])
    await anyio.sleep(SECONDS)
    assert not newcomer.node.driver.state.is_member
    lab.heal(members[:1], members[1:])
    await lab.until(lambda: newcomer.node.driver.state.is_member, limit=2 * JOIN_LONGEST)
    before = [now for now in asked if now < asked[0] + SECONDS]
    assert 5 <= len(before) <= 4 + SECONDS / JOIN_LONGEST + 1
    waits = [later - now for now, later in pairwise(before)]
    assert waits == pytest.approx(sorted(waits)), "each as long as the one before, or longer"


@pytest.mark.parametrize(("lease", "looks"), [(600.0, 20), (3.0, 80)])
@scene(lambda lease: small_terms("sparseloco", lease=lease, shrink_after=2 * lease), peers=1, make_model=tiny_model)
async def test_a_driver_looks_who_is_here_once_a_second_however_long_leases_are(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, lease: float, looks: int
) -> None:
    seen: list[float] = []
    absent = PeerWatch.absent

    def counted(watch: PeerWatch, now: float) -> Any:
        seen.append(now)
        return absent(watch, now)

    await anyio.sleep(5)
    monkeypatch.setattr(PeerWatch, "absent", counted)
    await anyio.sleep(20)
    assert len(seen) == pytest.approx(looks, abs=2)


@scene(peers=3, rounds=5, make_model=tiny_model)
async def test_a_commit_names_the_leader_of_its_own_round_and_not_of_the_next(lab: Lab) -> None:
    history = lab.members[0].node.driver.machine.state.history
    seen = [update for update in lab.members[0].all_updates if update.record is not None]
    for update in seen:
        assert update.record is not None
        assert update.decision is not None
        before = history.at((update.record.round - 1, update.record.previous))
        assert before is not None
        leaders = VOTING.leaders(before)
        assert update.decision.leader == leaders[update.decision.ballot % len(leaders)]
    assert len(seen) > 5


@scene(peers=2, rounds=4, make_model=tiny_model)
async def test_progress_that_is_too_old_is_not_offered_and_a_summary_is_in_the_record_of_every_peer(lab: Lab) -> None:
    await lab.rest()
    drivers = [each.node.driver for each in lab.members]
    await lab.until(lambda: all(d.head.anchor is not None for d in drivers))
    driver, head, anchor_N = drivers[0], drivers[0].head, lab.members[0].node.replica.anchors[0]

    def made(**said: Any) -> Contribution:
        learnt_N = torch.full_like(anchor_N, 0.01)
        return Contribution(0, driver.head.hash, anchor_N - learnt_N, learnt_N, 1, 1, **said)

    assert not await driver.contribute(made(begun_from=head.outer_step - 3))
    assert driver.state.pending is None
    assert await driver.contribute(made(summary=b"norm"))
    await lab.until(lambda: all(d.head.outer_step > head.outer_step for d in drivers))
    for each in drivers:
        (told,) = contributions(each.machine.state.recent[head.round + 1].record)
        assert (told.peer, told.based, told.summary) == (driver.state.me, head.outer_step, b"norm")


# ---- who is slow, and who is left alone ----

FLOOR, ROUNDS = 2.0, 10


class Slow(Learner):
    pace = 4 * Learner.pace


def waiting() -> Manifest:
    limits = {"deadline_floor": FLOOR, "deadline_ceiling": 30.0, "lease": 6.0, "shrink_after": 60.0}
    return exact_terms(small_terms, DENSE).changed(swarm=limits, outer={"weighting": "tokens"})


@scene(waiting, peers=[Learner, Learner, Learner, Slow], rounds=4, make_model=tiny_model)
async def test_a_slow_peer_offers_fewer_steps_and_the_rounds_do_not_wait_for_the_ceiling(lab: Lab) -> None:
    """At a quarter of the others' speed it is in nearly every round."""
    before, began = lab.members[0].rounds, anyio.current_time()
    await lab.until(lambda: lab.members[0].rounds >= before + ROUNDS)
    assert anyio.current_time() - began < ROUNDS * (Learner.interval * Learner.pace + FLOOR)
    slow = lab.members[3].signer.peer
    records = [commit.record for commit in lab.members[0].log if commit.record.frames][-ROUNDS:]
    taken = [ref for record in records for ref in record.frames if ref.peer == slow]
    assert len(taken) >= 0.9 * ROUNDS
    assert all(1 <= ref.steps < Learner.interval for ref in taken)
    assert all(ref.tokens == Learner.tokens * ref.steps for ref in taken)
    lab.check_equal()


UPLINK = 625_000.0  # bytes/s


def in_pieces() -> Any:
    """A model whose frames go in pieces."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(2 * PIECED // 1024, 256))
    return schema_of(model, 1)


def dense() -> Manifest:
    return small_terms("sparseloco").changed(compressor=DENSE)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@scene(dense, schema=in_pieces())
async def test_a_peer_left_alone_goes_on_round_after_round_with_frames_that_go_in_pieces(lab: Lab, size: int) -> None:
    """It knew its uplink from when others were there, and divided it by the number of those who were left."""
    for _ in range(size):
        member = lab.add()
        lab.network.set_uplink(member.signer.peer, UPLINK)
        member.node.uplink = lambda: UPLINK
    await lab.all_members()
    await lab.rounds(2)
    last, *others = lab.members
    for member in others:
        member.kill()
    await lab.until(lambda: last.node.driver.head.members == (last.signer.peer,))
    sent = last.transport.traffic.total.sent
    await lab.rounds(5)
    assert all(len(commit.record.frames) == 1 for commit in last.log[-5:])
    newest = last.log[-1].record.frames[0].frame
    assert len(last.node.driver.state.find_stored(newest).data) >= PIECED
    assert last.transport.traffic.total.sent - sent < PIECED, "it sent its frames to somebody"
    lab.check_equal()


@scene(dense, schema=in_pieces())
async def test_a_peer_that_was_left_alone_knows_its_uplink_still_when_somebody_comes(lab: Lab) -> None:
    """Frames for nobody counted as frames of which nothing arrived, and sixteen of them were all that it remembered."""
    for _ in range(2):
        lab.network.set_uplink(lab.add().signer.peer, UPLINK)
    await lab.all_members()
    alone, other = lab.members
    await lab.until(lambda: alone.transport.meter.bytes_per_second)
    other.kill()
    await lab.until(lambda: alone.node.driver.head.members == (alone.signer.peer,))
    known = alone.transport.meter.bytes_per_second
    await lab.rounds(20)
    assert alone.transport.meter.bytes_per_second == known


# ---- what is sent on, and what is booked ----


@scene(make_model=tiny_model)
async def test_frames_that_a_commit_passes_by_do_not_slow_the_next_round(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Still on its way when its round ends, a frame is sent on if the commit names it, else given up."""
    ended = []

    async def crawl(transport: Any, peers: Any, data: bytes, *how: Any) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(data)

    monkeypatch.setattr(broadcast, "push", crawl)
    member = lab.add()
    member.idle = True
    await lab.until(lambda: member.node.driver.state.running)
    driver = member.node.driver
    header = header_after(replace(driver.head, anchor=bytes(32)), FrameKind.CONTRIBUTION, 0, driver.state.me)
    named, late, next_one = (
        seal(replace(header, round=round_, tokens=n), b"", signer_of(0)) for n, round_ in enumerate((5, 5, 6))
    )
    for frame in (named, late, next_one):
        lab.group.start_soon(driver.frames.pushes.push, frame, (A,))
    await anyio.sleep(1)
    frames = (ref(driver.state.me, named.hash),)
    over = replace(record(START, {A: 1}), round=5, frames=frames)
    driver.frames.pushes.end_round(over, anyio.current_time())
    await anyio.sleep(1)
    assert ended == [late.data]
    assert driver.frames.pushes.count == 2


@pytest.mark.parametrize(("first_frame", "took"), [(1.0, 10.0), (5.0, 2.0), (None, 2.0)])
@scene(lambda: small_terms("sparseloco"), make_model=tiny_model)
async def test_a_frame_took_until_its_commit_was_applied_and_no_longer_than_until_it_was_heard_of_on_a_thin_downlink(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, first_frame: float | None, took: float
) -> None:
    """A peer with a thin line each way applied commits 8 s after it heard of them, for want of the others' frames, and
    thought that its own had gone the wrong way.
    """
    member = lab.add()
    member.idle = True
    await lab.until(lambda: member.node.driver.state.running)
    driver, noted = member.node.driver, []
    monkeypatch.setattr(
        driver.frames.broadcast, "note_seconds_to_commit", lambda frame, seconds, late: noted.append((frame, seconds))
    )
    header = header_after(replace(driver.head, anchor=bytes(32)), FrameKind.CONTRIBUTION, 0, driver.state.me)
    named, late = (seal(replace(header, round=5, tokens=n), b"", signer_of(0)) for n in range(2))
    for frame in (named, late):
        await driver.frames.pushes.push(frame, ())
    began = anyio.current_time()
    if first_frame is not None:
        await anyio.sleep(first_frame)
        driver.frames.pushes.note_frame(4)  # of another round
        driver.frames.pushes.note_frame(5)
    await anyio.sleep_until(began + 10)
    frames = (ref(driver.state.me, named.hash),)
    driver.frames.pushes.end_round(replace(record(START, {A: 1}), round=5, frames=frames), began + 2)
    assert noted == [(named.hash, pytest.approx(took)), (late.hash, math.inf)]


@scene(lambda: small_terms("sparseloco", min_peers=2), make_model=tiny_model)
async def test_what_found_no_room_is_read_again_when_it_is_offered_again(lab: Lab) -> None:
    """It was taken for a frame that holds nothing, and the commit that named it could not be applied."""
    first = lab.add()
    first.node.replica.contents.unpacked.capacity = 1
    await anyio.sleep(6)  # alone it offers, and may not commit: a membership without it goes first
    assert first.node.driver.state.pending is not None
    lab.add().node.replica.contents.unpacked.capacity = 1
    await lab.all_members()
    await lab.rounds(2)
    lab.check_equal()


@scene("muloco")
async def test_the_feedback_of_a_reduce_is_not_put_together_on_the_event_loop(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as long as the model: no vote was answered, and no lease renewed, while it was copied."""
    where: list[bool] = []
    working: list[object] = []
    feedback_after = Contribution.feedback_after

    async def on_a_thread(work: Any, *args: Any) -> Any:
        def marked(*given: Any) -> Any:
            working.append(work)
            try:
                return work(*given)
            finally:
                working.pop()

        return await inline(marked, *args)

    def noted(made: Contribution, record: Any) -> Any:
        where.append(bool(working))
        return feedback_after(made, record)

    for _ in range(3):
        lab.add().node.driver.state.offload = on_a_thread
    await lab.all_members()
    monkeypatch.setattr(Contribution, "feedback_after", noted)
    await lab.rounds(2)
    lab.check_equal()
    assert where
    assert all(where)
