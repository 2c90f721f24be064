"""A real peer whose process is stopped, as every reader of its folder finds it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from decentral.cli.demo_processes import Family
from decentral.cli.ports import health_of
from tests.cli.conftest import Run
from tests.kit.families import status_of
from tests.kit.patience import PATIENCE, until
from tests.kit.site import looked

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="the system stops no process by a signal")


@pytest.mark.long
def test_a_stopped_peer_is_frozen_for_all_who_look_and_well_again_when_it_goes_on(
    family: Family, terms: list[str], tmp_path: Path, run: Run
) -> None:
    """It was "healthy" for as long as its process was there."""
    out = tmp_path / "first"
    command = ["start", str(tmp_path / "run.toml"), *terms, "--alone", "--out", str(out)]
    peer = family.start("first", out, command)
    peer.first_line(PATIENCE)
    until(lambda: status_of(peer).round > 0)
    assert run("status", "--out", out).exit_code == 0
    peer.process.send_signal(signal.SIGSTOP)
    until(lambda: run("status", "--out", out).exit_code == 1)
    said = run("status", "--out", out).stdout.splitlines()[0]
    assert said.startswith("frozen: nothing was written for ")
    assert said.endswith(f"it is stopped: kill -CONT {peer.process.pid} lets it go on")
    told = json.loads(run("status", "--out", out, "--json").stdout)
    assert told["alive"] is True
    assert told["frozen_seconds"] > 3
    assert told["health"].startswith("frozen: ")
    well, line = health_of(out)
    assert (well, line.partition(":")[0]) == (False, "frozen")
    assert looked(out)["now"]["word"] == "frozen"
    numbers = run("status", "--out", out, "--prometheus").stdout.splitlines()
    assert any(float(row.split()[1]) > 3 for row in numbers if row.startswith("decentral_peer_frozen_seconds "))
    peer.process.send_signal(signal.SIGCONT)
    until(lambda: run("status", "--out", out).exit_code == 0)
    peer.process.send_signal(signal.SIGINT)
    assert peer.process.wait() == 130
