"""``decentral set`` in a folder, whether a peer runs there or not, and a start where what is kept cannot be read."""

from __future__ import annotations

from pathlib import Path

from decentral.manifest import preset_manifest
from decentral.observe.status import ProcessInfo, Status, write_status
from decentral.preferences.controls import read_settings
from tests.cli.conftest import Run


def test_where_no_peer_runs_a_setting_is_kept_for_the_next_start(run: Run, tmp_path: Path) -> None:
    (tmp_path / "over").mkdir()
    write_status(tmp_path / "over", Status(state="left"), ProcessInfo(pid=2**22 + 1, created=0.0))
    told = run("set", "max-upload", "5mbit", "--out", "over")
    assert told.stdout == "no peer runs there now; kept for its next start: max-upload 5mbit\n"
    assert read_settings(tmp_path / "over").set_ == {"max-upload": "5mbit"}
    assert run("set", "max-upload", "5", "--out", "over").exit_code == 2
    for key in ("max-upload", "max-download"):
        too_little = run("set", key, "1kbit", "--out", "over")
        assert too_little.exit_code == 2
        assert "'1kbit' is too little" in too_little.stderr
    assert run("set", "max-upload", "5mbit", "--out", "nowhere").exit_code == 2


def test_a_start_where_the_settings_cannot_be_read_is_one_line_and_code_10(run: Run, tmp_path: Path) -> None:
    manifest = preset_manifest("sparseloco", run={"rounds": 1}, model={"hidden": 16, "layers": 1, "heads": 2})
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.json").write_text("{")
    told = run("start", "run.toml", "--solo", "--out", "out")
    assert told.exit_code == 10
    assert "settings.json: it cannot be read" in told.stderr.splitlines()[-1]
    assert (tmp_path / "out" / "settings.json").read_text() == "{"


def test_status_says_what_was_set_since_the_peer_ended(run: Run, tmp_path: Path) -> None:
    (tmp_path / "over").mkdir()
    ended = Status(state="left", preferences={"threads": "4", "max-compute": "70%"})
    write_status(tmp_path / "over", ended, ProcessInfo(pid=2**22 + 1, created=0.0))
    run("set", "max-memory", "8GB", "--out", "over")
    run("set", "max-compute", "none", "--out", "over")
    told = run("status", "--out", "over").stdout
    assert "settings  threads 4, max-memory 8000MB; kept over restarts: max-memory, max-compute\n" in told
    assert run("set", "max-memory", "1KB", "--out", "over").exit_code == 2, "less than Python takes"
