"""A day's upload: counted over restarts, anew at midnight; who has used it up rests, follows, and comes back."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from decentral.errors import ConfigError, DiskError
from decentral.node.node import TIMELY, URGENT, throttle
from decentral.node.upload import DAY, PAUSED, SAVE_EVERY, UPLOAD_FILE, DailyUpload
from decentral.peer.saved import redundancy_of
from decentral.pipeline.group import GroupSide
from decentral.redundancy.keeper import KEEP, KEPT
from decentral.rounds.snapshots import PACKED
from decentral.state.durable import Disk
from decentral.swarm.admission import ADMISSION
from decentral.transport.memory import MemoryNetwork
from decentral.transport.paths import SPEED
from decentral.transport.throttle import Caps
from decentral.wire.groups import GROUP
from decentral.wire.keys import Signer
from tests.kit.nodes import scene, small_terms, tiny_model

NOON = 20_000 * DAY + DAY / 2


class Days:
    """A wall clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> Days:
    return Days()


def test_what_was_sent_before_a_restart_counts_on_until_the_next_day(tmp_path: Path, wall: Days) -> None:
    daily = DailyUpload(tmp_path, 1000, wall=wall)
    daily.count(400)
    daily.count(500)
    assert daily.is_due
    daily.save()
    assert not daily.is_due
    wall.now += SAVE_EVERY
    assert daily.is_due
    again = DailyUpload(tmp_path, 1000, wall=wall)
    assert again.sent == 500
    again.count(100)
    assert again.sent == 600
    assert DailyUpload(tmp_path, 500, wall=wall).used_up, "another limit counts what was sent before"
    assert not DailyUpload(tmp_path, 2000, wall=wall).used_up
    assert not DailyUpload(tmp_path, 500, wall=wall).may_upload
    wall.now += DAY
    assert DailyUpload(tmp_path, 500, wall=wall).sent == 0


def test_at_midnight_utc_it_begins_anew_and_what_was_sent_before_does_not_come_back(tmp_path: Path, wall: Days) -> None:
    daily = DailyUpload(tmp_path, 1000, wall=wall)
    daily.count(960)
    assert daily.used_up
    assert daily.may_upload
    wall.now += DAY / 2 - 1
    daily.count(990)
    assert daily.used_up
    wall.now += 1
    assert not daily.used_up
    assert daily.sent == 0
    daily.count(1000)
    assert daily.sent == 10


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"day": 1}', '{"day": "x", "sent": 1}', '{"day": 1, "sent": -5}', "\udcff", "[" * 10**5]
)
def test_a_damaged_count_is_a_day_that_begins(tmp_path: Path, wall: Days, text: str) -> None:
    (tmp_path / UPLOAD_FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert DailyUpload(tmp_path, 1000, wall=wall).sent == 0


def test_no_limit_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave it out for no limit"):
        DailyUpload(tmp_path, 0)


def limited(member, folder: Path, nbytes: int, midnight: float, disk: Disk | None = None) -> DailyUpload:
    """Give a member that was just added a daily upload; its day ends ``midnight`` seconds from now."""
    began = anyio.current_time()

    def wall() -> float:
        return 20_000 * DAY - midnight + anyio.current_time() - began

    member.node.daily_upload = DailyUpload(folder, nbytes, wall=wall, disk=disk or Disk())
    return member.node.daily_upload


def events(member) -> list[str]:
    return [event for event, _ in member.events if event.startswith("upload")]


@pytest.mark.long
@scene(make_model=tiny_model)
async def test_a_peer_that_used_up_its_day_rests_and_follows_and_contributes_again_the_next(lab, tmp_path):
    for _ in range(3):
        lab.add()
    daily = limited(lab.members[2], tmp_path, 40_000, midnight=45.0)
    await lab.all_members()
    tired, others = lab.members[2], lab.members[:2]
    await lab.until(lambda: events(tired) == ["upload_used_up"])
    assert 0.95 * daily.limit <= daily.sent
    await lab.until(lambda: all(len(m.node.driver.head.members) == 2 for m in others))
    was, steps = tired.rounds, tired.steps
    before = others[0].rounds
    await anyio.sleep(10)
    assert others[0].rounds - before >= 5, "nobody waits for it"
    assert tired.rounds >= was + 3, "it follows"
    assert tired.steps == steps, "and contributes nothing"
    assert daily.used_up
    await lab.until(lambda: events(tired) == ["upload_used_up", "upload_goes_on"])
    await lab.until(lambda: all(len(m.node.driver.head.members) == 3 for m in lab.members))
    await lab.until(lambda: tired.steps > steps + 2)
    await lab.rounds(2)
    lab.check_equal()


@scene(make_model=tiny_model)
async def test_a_paused_peer_does_not_come_back_only_because_a_new_day_begins(lab, tmp_path):
    for _ in range(3):
        lab.add()
    daily = limited(lab.members[2], tmp_path, 40_000, midnight=30.0)
    await lab.all_members()
    resting = lab.members[2].node.resting
    await lab.until(lambda: daily.used_up)
    await lab.until(lambda: bool(resting.reasons))
    await resting.begin("paused")
    await lab.until(lambda: not daily.used_up)
    await anyio.sleep(5)
    assert resting.reasons == {"paused"}
    assert len(lab.members[0].node.driver.head.members) == 2
    await resting.end("paused")
    await lab.until(lambda: len(lab.members[0].node.driver.head.members) == 3)


class Full(Disk):
    def write(self, path, parts, at=None):
        raise OSError(28, "No space left on device")


@scene(make_model=tiny_model)
async def test_a_count_that_cannot_be_written_is_said_and_ends_nothing(lab, tmp_path):
    lab.add()
    limited(lab.add(), tmp_path, 10**9, midnight=1000.0, disk=Full())
    await lab.all_members()
    await lab.rounds(3)
    assert "upload_not_saved" in events(lab.members[1])
    with pytest.raises(DiskError):
        DailyUpload(tmp_path, 1, disk=Full()).save()


def test_a_transport_refuses_bulk_when_the_day_is_used_up_to_the_last_byte(tmp_path: Path, wall: Days) -> None:
    inner = MemoryNetwork().transport(Signer.generate())
    daily = DailyUpload(tmp_path, 1000, wall=wall)
    transport = throttle(inner, Caps(), daily)
    inner.traffic.add(bytes(32), sent=999)
    assert transport.may_upload()
    inner.traffic.add(bytes(32), sent=1)
    assert not transport.may_upload()
    assert throttle(inner, Caps(), None).may_upload()


BULK = {f"/decentral/{name}/1" for name in ("frame", "piece", "fetch", "chain", "oldest", "index", "state")} | {
    SPEED,
    PACKED,
}


@scene()
async def test_everything_a_node_serves_is_urgent_or_known_bulk(lab):
    served = set(lab.add().transport.services.handlers)
    elsewhere = {"/decentral/pair/1", "/decentral/lane/1", ADMISSION}  # in gossip; where a run admits by token
    elsewhere |= {GROUP, *TIMELY}  # of a peer that shares a replica
    assert served - elsewhere == (set(URGENT) | BULK) - elsewhere
    assert not BULK & set(URGENT)


@scene()
async def test_what_a_peer_that_shares_serves_is_urgent_or_timely(lab):
    member = lab.add()
    before = set(member.transport.services.handlers)
    GroupSide(member.node)
    assert set(member.transport.services.handlers) - before == {GROUP, *TIMELY}
    assert GROUP in URGENT
    assert not set(TIMELY) & {*URGENT, *BULK}


@scene(lambda: small_terms("sparseloco", redundancy={"keepers": 3}))
async def test_what_is_kept_for_others_is_served_where_the_terms_say_so_and_is_bulk(lab):
    member = lab.add()
    assert redundancy_of(member.node) is not None
    served = member.transport.services.handlers
    assert {KEEP, KEPT} <= set(served)
    assert not {KEEP, KEPT} & set(URGENT)


@scene()
async def test_a_measured_uplink_is_in_the_lease_that_others_hold(lab):
    for _ in range(2):
        lab.add()
    lab.members[0].node.uplink = lambda: 623_456.0
    await lab.all_members()
    me = lab.members[0].signer.peer
    await lab.until(lambda: lab.members[1].node.directory.live()[me].uplink == 5_000_000)
    assert lab.members[0].node.directory.live()[lab.members[1].signer.peer].uplink == 0


# ---- test suspension ----
#
# Pausing and resuming, at whatever moment: who takes part again votes again.


@scene(make_model=tiny_model)
async def test_who_resumes_while_its_farewell_waits_for_a_step_votes_again(lab):
    """The farewell came after the return, and the peer was let in again and again, and never voted."""
    member = lab.add()
    lab.add()
    await lab.all_members()
    await lab.rounds(2)
    driver, resting = member.node.driver, member.node.resting
    async with anyio.create_task_group() as group, driver.steps.lock:  # as while a commit is written and applied
        group.start_soon(resting.begin, PAUSED)
        await anyio.sleep(0.2)
        group.start_soon(resting.end, PAUSED)
        await anyio.sleep(0.2)
    assert not resting.reasons
    assert not driver.machine.state.has_left
    await lab.all_members()
    epoch = driver.head.epoch
    await lab.rounds(5)
    assert driver.head.epoch == epoch


@scene(make_model=tiny_model)
async def test_a_pause_before_the_rounds_run_is_told_when_it_is_asked_for_again(lab):
    """Nobody was told: the others waited for a peer that held its contributions back."""
    lab.add()
    await lab.rounds(2)
    newcomer = lab.add()
    resting = newcomer.node.resting
    await resting.begin(PAUSED)
    assert resting.reasons
    assert not newcomer.node.driver.membership.stopping
    await lab.all_members()
    await resting.begin(PAUSED)  # as startup does
    assert newcomer.node.driver.machine.state.has_left
    await lab.until(lambda: len(lab.members[0].node.driver.head.members) == 1)
