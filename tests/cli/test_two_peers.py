"""The commands as people type them: two real peers with real daemons on loopback, steered and ended from outside."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from decentral.cli.demo_processes import Family
from decentral.swarm.invite import PREFIX
from tests.cli.conftest import Run
from tests.kit.families import documented_files, status_of
from tests.kit.patience import PATIENCE, until


@pytest.mark.timeout(300)
def test_a_swarm_of_two_is_started_watched_paused_left_and_exported(
    family: Family, terms: list[str], tmp_path: Path, run: Run
) -> None:
    """One has no daemon and one has."""
    found = ["start", str(tmp_path / "run.toml"), *terms, "--transport", "native", "--out", str(tmp_path / "first")]
    first = family.start("first", tmp_path / "first", found)
    line = first.first_line(PATIENCE)
    assert line.startswith("decentral join ")
    assert line.endswith(" --data PATH/TO/foxes")
    invite = line.split()[2]
    limits = ["--json", "--max-upload", "8mbit", "--max-download", "2.5MB/s", "--daily-upload", "20GB"]
    out = tmp_path / "second"
    second = family.start("second", out, ["join", invite, *terms, *limits, "--transport", "daemon", "--out", str(out)])
    until(lambda: (second.directory / "status.json").exists() and status_of(second).rounds_contributed >= 2)
    until(lambda: status_of(second).sent_today > 0)
    until(lambda: status_of(first).rounds_contributed >= 2)
    assert not any(child.name() == "p2pd" for child in psutil.Process(first.process.pid).children(recursive=True))
    shown = run("status", "--out", second.directory).stdout
    assert "limits    8 Mbit/s up, 20 Mbit/s down, " in shown
    assert "of 20.0 GB sent today (UTC)" in shown

    until(lambda: "you contributed to" in status_of(second).health)
    told: dict[str, Any] = json.loads(run("status", "--out", second.directory, "--json").stdout)
    assert told["alive"] is True
    assert len(told["members"]) == 2
    until(lambda: len(status_of(first).members) == 2)  # each peer writes its status now and then
    members = json.loads(run("peers", "--out", first.directory, "--json").stdout)["members"]
    assert {member["peer"] for member in members} == {status_of(first).peer, status_of(second).peer}

    assert run("pause", "--out", second.directory).exit_code == 0
    until(lambda: status_of(second).state == "paused")
    assert run("resume", "--out", second.directory).exit_code == 0
    until(lambda: status_of(second).state != "paused")

    assert run("leave", "--out", second.directory, "--wait", PATIENCE).exit_code == 0
    assert second.process.wait() == 0
    assert json.loads((second.directory / "stdout.txt").read_text())["peer"] == status_of(second).peer
    assert f"decentral join {PREFIX}" in (second.directory / "stderr.txt").read_text()
    assert "an open run: " in (first.directory / "stderr.txt").read_text()
    assert "an open run: " not in (second.directory / "stderr.txt").read_text()
    until(lambda: len(status_of(first).members) == 1)

    began = time.monotonic()
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait() == 130
    assert time.monotonic() - began < 10
    assert "the same command goes on from there" in (first.directory / "stderr.txt").read_text()
    assert "start it again with the same --out to resume" in run("status", "--out", first.directory).stdout
    assert family.count_strays() == 0
    for child in (first, second):  # the shipped loop trains as the manifest says, each peer on windows of its own
        told = (child.directory / "events.jsonl").read_text()
        assert '"joined"' in told
        assert not {word for word in ("inner_differs", "outlier", "twins") if f'"{word}"' in told}

    left = {path.name for path in (*first.directory.iterdir(), *second.directory.iterdir())}
    assert left - {"stdout.txt", "stderr.txt"} <= documented_files(), "what is left is in docs/run-directory.md"
    exported = run("export", first.directory, "--to", "model")
    assert exported.exit_code == 0, exported.stderr
    assert (tmp_path / "model/model.safetensors").exists()
