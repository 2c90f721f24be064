"""What a volunteer asks and prefers, against a peer that only notes what it is told: time and machine are given."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from decentral.errors import ConfigError, DiskError
from decentral.observe.requests import Request
from decentral.observe.status import Status
from decentral.preferences import Hours, Preferences
from decentral.preferences.controls import (
    SETTINGS_FILE,
    Computer,
    Controls,
    KeptSettings,
    OthersLoad,
    keep_setting,
    read_settings,
    unused_seconds,
    write_settings,
)
from decentral.preferences.preferences import SETTINGS, Seen, reasons_to_wait, spell, with_setting

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


class Noted:
    """A peer that is there to be steered."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.wanted: Preferences | None = None

    def leave(self) -> None:
        self.told.append("leave")

    def finish(self) -> None:
        self.told.append("finish")

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")

    def limit(self, wanted: Preferences) -> None:
        self.wanted = wanted


class Room(Computer):
    """A computer whose state is set."""

    def __init__(self) -> None:
        self.seen, self.held = Seen(), 0

    def look(self, *, battery: bool, use: bool) -> Seen:
        return self.seen if battery or use else Seen()

    def memory(self) -> int:
        return self.held


class Story:
    """Controls, and everything around them."""

    def __init__(self, **wanted: Any) -> None:
        self.peer, self.room, self.now = Noted(), Room(), NOON
        self.controls = Controls(self.peer, Preferences(**wanted), machine=self.room, wall=lambda: self.now)

    def look(self, state: str = "training") -> Status:
        return self.controls.look(Status(state=state))

    def ask(self, name: str, **values: Any) -> None:
        self.controls.obey(Request(name, values))


def test_a_pause_for_some_time_ends_by_itself_and_says_when() -> None:
    story = Story()
    story.ask("pause", until=(NOON + timedelta(hours=2)).timestamp())
    assert story.look("paused").paused_because == ("as asked, until 14:00",)
    story.now += timedelta(hours=1, minutes=59)
    story.look("paused")
    assert story.peer.told == ["pause"]
    story.now += timedelta(minutes=1)
    story.look("paused")
    assert story.peer.told == ["pause", "resume"]


def test_a_pause_without_an_end_lasts_until_resume() -> None:
    story = Story()
    story.ask("pause")
    story.now += timedelta(days=30)
    assert story.look("paused").paused_because == ("as asked, until decentral resume",)
    story.ask("resume")
    assert story.peer.told == ["pause", "resume"]


def test_a_peer_trains_within_its_hours_only_and_is_told_once() -> None:
    story = Story(schedule=Hours.parse("22:00-07:00"))
    for _ in range(3):
        assert story.look("training").paused_because == ()  # it was told just now, and has not stopped yet
    assert story.look("paused").paused_because == ("outside its hours until 22:00",)
    assert story.peer.told == ["pause"]
    story.now += timedelta(hours=10)
    story.look("paused")
    assert story.peer.told == ["pause", "resume"]


def test_resume_does_not_overrule_the_schedule_and_schedule_always_does() -> None:
    story = Story(schedule=Hours.parse("22:00-07:00"))
    story.look()
    story.ask("resume")
    assert story.peer.told == ["pause"]
    story.ask("set", key="schedule", value="always")
    assert story.peer.told == ["pause", "resume"]


def test_a_laptop_without_mains_power_waits_when_it_is_asked_to() -> None:
    careless, careful = Story(), Story(on_battery="pause")
    for story in (careless, careful):
        story.room.seen = Seen(on_battery=True)
        story.look()
    assert careless.peer.told == []
    assert careful.look("paused").paused_because == ("on battery until there is mains power",)


@pytest.mark.parametrize(
    ("seen", "waits"),
    [
        (Seen(), False),  # a machine that does not tell stands against nothing
        (Seen(unused_seconds=179.0), True),
        (Seen(unused_seconds=181.0, others_share=0.2), False),
        (Seen(unused_seconds=181.0, others_share=0.3), True),
        (Seen(others_share=0.3), True),
    ],
)
def test_a_machine_in_use_is_left_to_who_uses_it(seen: Seen, waits: bool) -> None:
    assert bool(reasons_to_wait(Preferences(only_when_idle=True), seen, NOON)) is waits
    assert not reasons_to_wait(Preferences(), seen, NOON)


def test_a_peer_that_holds_too_much_memory_leaves_once_and_says_why() -> None:
    story = Story(max_memory=2_000_000_000)
    story.room.held = 2_000_000_000
    assert not story.look().problem
    story.room.held += 10_000_000
    for _ in range(2):
        assert "holds 2.01 GB, more than the 2.00 GB of max-memory" in story.look().problem
    assert story.peer.told == ["leave"]


def test_nothing_is_asked_of_a_peer_that_has_not_begun_or_has_ended() -> None:
    story = Story(schedule=Hours.parse("22:00-07:00"), max_memory=1)
    story.room.held = 2
    for state in ("starting", "syncing", "leaving", "left", "done"):
        story.look(state)
    assert story.peer.told == []


def test_finish_is_told_and_shown() -> None:
    story = Story()
    story.ask("finish")
    assert story.peer.told == ["finish"]
    assert story.look().finishing
    story.ask("pause")
    assert story.peer.told == ["finish", "pause", "finish"], "the round that it waited for does not come"


WRITTEN = {
    **{"max-upload": "5mbit", "max-download": "2.5MB/s", "daily-upload": "20GB", "max-writes": "1GB"},
    **{
        "threads": "3",
        "max-memory": "8GB",
        "max-compute": "70%",
        "schedule": "22:00-07:00",
        "on-battery": "pause",
        "only-when-idle": "on",
    },
}


@pytest.mark.parametrize(("key", "value"), list(WRITTEN.items()))
def test_every_setting_changes_what_it_names_and_nothing_else(key: str, value: str) -> None:
    story = Story()
    story.ask("set", key=key, value=value)
    before, after = Preferences(), story.peer.wanted
    assert after is not None
    differing = {name for name in Preferences.__slots__ if getattr(before, name) != getattr(after, name)}
    assert differing == {key.replace("-", "_")}
    own_fields = ("max-upload", "max-download", "daily-upload", "max-writes")  # a status has them anyway
    assert spell(after) == ({} if key in own_fields else {key: value.replace("8GB", "8000MB")})


def test_the_settings_of_these_tests_are_all_there_are() -> None:
    assert list(WRITTEN) == list(SETTINGS)


@pytest.mark.parametrize(
    "key", ["max-upload", "max-download", "daily-upload", "max-writes", "threads", "max-memory", "max-compute"]
)
def test_none_lifts_a_limit(key: str) -> None:
    limited = with_setting(Preferences(), key, WRITTEN[key])
    assert with_setting(limited, key, "none") == Preferences()


@pytest.mark.parametrize(
    ("key", "value"),
    [("threads", "0"), ("schedule", "night"), ("explode", "1"), ("max-upload", "1"), ("max-compute", "120%")],
)
def test_a_request_that_cannot_be_obeyed_changes_nothing(key: str, value: str) -> None:
    story = Story()
    story.ask("set", key=key, value=value)
    assert story.controls.wanted == Preferences()


def test_other_programs_share_leaves_out_our_own_work() -> None:
    busy, own, clock = [0.0], [0.0], [0.0]
    load = OthersLoad(lambda: busy[0], lambda: own[0], lambda: clock[0], num_cpus=2)
    assert load.share() is None
    for _ in range(60):
        clock[0] += 2.0
        busy[0] += 3.0  # of four seconds of processor
        own[0] += 2.0
        share = load.share()
    assert share == pytest.approx(0.25)


def test_a_machine_on_which_nobody_is_logged_in_does_not_say_when_it_was_used() -> None:
    assert unused_seconds(1.0, lambda: []) is None
    assert unused_seconds(1.0, lambda: ["no/such/terminal"]) is None
    assert unused_seconds(0.0, lambda: ["null"]) == 0.0  # touched after 1970


def test_this_machine_can_be_looked_at() -> None:
    machine = Computer()
    machine.look(battery=True, use=True)
    assert 1e6 < machine.memory() < 1e12


# ---- test kept ----
#
# Settings that outlive the process: one life after another in one folder, with a peer that notes what it is told.


class Life:
    """One process in the folder, with these flags on its command line."""

    def __init__(self, folder: Path, now: datetime = NOON, **flags: Any) -> None:
        self.peer = Noted()
        self.controls = Controls(self.peer, Preferences(**flags), folder=folder, machine=Room(), wall=lambda: now)

    def ask(self, name: str, **values: Any) -> None:
        self.controls.obey(Request(name, values))

    def set(self, key: str, value: str) -> None:
        self.ask("set", key=key, value=value)

    def look(self, state: str = "training") -> Status:
        return self.controls.look(Status(state=state))


@pytest.mark.parametrize(("key", "value"), list(WRITTEN.items()))
def test_every_setting_is_there_in_the_next_life_and_is_obeyed_before_training(
    tmp_path: Path, key: str, value: str
) -> None:
    first = Life(tmp_path)
    first.set(key, value)
    second = Life(tmp_path)
    assert second.controls.wanted == first.controls.wanted != Preferences()
    assert second.peer.wanted == first.peer.wanted
    assert second.look().kept_settings == (key,)


def test_a_folder_in_which_nothing_was_set_gets_no_file(tmp_path: Path) -> None:
    Life(tmp_path, threads=2).look()
    assert not (tmp_path / SETTINGS_FILE).exists()


def test_what_was_set_stands_above_a_command_line_that_stays_as_it_was(tmp_path: Path) -> None:
    """As a service's does: it starts with the same options every time."""
    flags = {"max_upload": 1e6, "schedule": Hours.parse("22:00-07:00")}
    Life(tmp_path, **flags).set("max-upload", "5mbit")
    for _ in range(3):
        wanted = Life(tmp_path, **flags).controls.wanted
        assert (wanted.max_upload, wanted.schedule) == (625_000, flags["schedule"])


def test_a_command_line_that_says_something_else_is_the_newer_word_for_good(tmp_path: Path) -> None:
    first = Life(tmp_path, max_upload=1e6)
    first.set("max-upload", "5mbit")
    first.set("threads", "3")
    assert Life(tmp_path, max_upload=2e6).controls.wanted == Preferences(max_upload=2e6, threads=3)
    assert Life(tmp_path, max_upload=1e6).controls.wanted == Preferences(max_upload=1e6, threads=3)


def test_a_limit_that_was_lifted_stays_lifted(tmp_path: Path) -> None:
    Life(tmp_path, max_upload=1e6).set("max-upload", "none")
    assert Life(tmp_path, max_upload=1e6).controls.wanted.max_upload is None


def test_a_pause_lasts_over_restarts_until_resume(tmp_path: Path) -> None:
    Life(tmp_path).ask("pause")
    second = Life(tmp_path)
    second.look()
    assert second.peer.told == ["pause"]
    second.ask("resume")
    third = Life(tmp_path)
    third.look()
    assert third.peer.told == []


def test_a_pause_with_an_end_has_ended_when_a_later_life_begins(tmp_path: Path) -> None:
    Life(tmp_path).ask("pause", until=(NOON + timedelta(hours=2)).timestamp())
    early, late = Life(tmp_path, NOON + timedelta(hours=1)), Life(tmp_path, NOON + timedelta(hours=3))
    early.look()
    late.look()
    assert (early.peer.told, late.peer.told) == (["pause"], [])
    assert read_settings(tmp_path).paused is None


def test_what_is_set_while_no_peer_runs_holds_for_the_next(tmp_path: Path) -> None:
    keep_setting(tmp_path, "max-compute", "70%")
    assert Life(tmp_path, max_upload=1e6).controls.wanted == Preferences(max_upload=1e6, max_compute=0.7)
    with pytest.raises(DiskError, match="no such folder"):
        keep_setting(tmp_path / "nowhere", "threads", "3")


BAD = {
    "": "cannot be read",
    "{": "cannot be read",
    "[" * 100_000: "cannot be read",
    "[]": "no object with version 1",
    '{"version": 2}': "no object with version 1",
    '{"version": 1, "set": []}': "something else than texts",
    '{"version": 1, "set": {"threads": 3}}': "something else than texts",
    '{"version": 1, "set": {"threads": "many"}}': "'threads': 'many' is no number of threads",
    '{"version": 1, "set": {"explode": "1"}}': "'explode': setting 'explode': unknown",
    '{"version": 1, "given": 7}': "of another kind",
    '{"version": 1, "paused": "soon"}': "neither a time nor",
    '{"version": 1, "paused": true}': "of another kind",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"): "cannot be read",
}


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_is_none_is_one_sentence_and_no_limit_is_forgotten(tmp_path: Path, text: str) -> None:
    path = tmp_path / SETTINGS_FILE
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        Life(tmp_path)
    assert BAD[text] in str(caught.value)
    assert "mend it, or remove it" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 10
    assert path.read_text(encoding="latin-1") == text


def test_a_request_that_cannot_be_obeyed_is_told_and_not_kept(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.set("threads", "many")
    assert "the request to set 'threads' was not obeyed: 'many' is no number" in life.look().problem
    assert not (tmp_path / SETTINGS_FILE).exists()
    life.set("threads", "3")
    assert life.look().problem == ""


def test_what_cannot_be_written_holds_until_the_process_ends_and_says_so(tmp_path: Path) -> None:
    life = Life(tmp_path / "gone")
    life.set("threads", "3")
    assert life.controls.wanted.threads == 3
    assert "holds until this process ends" in life.look().problem


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for kept in (
        KeptSettings(),
        KeptSettings({"threads": "3"}, {"threads": None}, float("inf")),
        KeptSettings({}, None, 1e9),
    ):
        write_settings(tmp_path, kept)
        assert read_settings(tmp_path) == kept
        assert json.loads((tmp_path / SETTINGS_FILE).read_text())["version"] == 1


@pytest.mark.parametrize("key", SETTINGS)
def test_none_lifts_every_limit(key: str) -> None:
    strict = Preferences(
        schedule=Hours.parse("22:00-07:00"),
        on_battery="pause",
        only_when_idle=True,
        max_memory=10**9,
        threads=1,
        max_compute=0.5,
        max_upload=1e6,
        max_download=1e6,
        daily_upload=10**9,
        max_writes=10**9,
    )
    name = key.replace("-", "_")
    assert getattr(strict, name) != getattr(Preferences(), name) == getattr(with_setting(strict, key, "none"), name)
