"""Settings that outlive the process: one life after another in one folder, with a peer that notes what it is told."""

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
    Controls,
    KeptSettings,
    keep_setting,
    read_settings,
    write_settings,
)
from tests.preferences.test_controls import WRITTEN, Noted, Room

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


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
