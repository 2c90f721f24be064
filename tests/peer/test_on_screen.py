"""What a script with `decentral.join` shows of itself: on stderr, and to the commands of another terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from decentral.observe.requests import ask
from decentral.observe.status import ENDED, read_status
from decentral.transport.native.transport import NativeTransport
from decentral.transport.paths import SPEED_NBYTES, measure_speed
from decentral.wire.keys import Signer, peer_from_name
from tests.kit.patience import until
from tests.kit.problems import LOOPBACK, Problem, alone, joined, run_terms, train

SCRIPT = """
import logging, sys
import torch
from decentral.peer import join
from tests.kit.problems import LOOPBACK, Problem, run_terms

logging.basicConfig(level=logging.WARNING, format="user: %(message)s")
manifest, commands = run_terms("sparseloco", run={"rounds": 3}, inner={"steps": 2}), sys.argv[1] == "commands"
for folder in sys.argv[2:]:
    print(file=sys.stderr)
    problem = Problem(0)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=1e-3, weight_decay=0.1)  # the manifest's
    settings = dict(listen=LOOPBACK, transport="native", lan=False, alone=True, commands=commands)
    with join(manifest, problem.model, problem.optimizer, out=folder, quiet=folder == "quiet", **settings) as peer:
        while not peer.done:
            peer.log(loss=problem.step())
"""


def said(folder: Path, *arguments: str, script: str = SCRIPT) -> list[list[str]]:
    """Its lines on stderr, of each run."""
    command = [sys.executable, "-c", script, *arguments]
    run = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return [part.splitlines() for part in ("\n" + run.stderr).split("\n\n")[1:]]


@pytest.mark.parametrize("commands", ["commands", pytest.param("none", marks=pytest.mark.long)])
def test_a_script_says_how_it_is_on_stderr_in_lines_that_say_who_speaks_or_gets_quiet(
    tmp_path: Path, commands: str
) -> None:
    lines, quiet = said(tmp_path, commands, "run", "quiet")
    assert lines[0].startswith("decentral: to stop: ")
    assert ("decentral leave --out run" in lines[0]) is (commands == "commands")
    assert lines[-1].startswith("decentral: done: 3 rounds, ")
    assert all(line.startswith("decentral: ") for line in lines)
    assert len(lines) == len(set(lines))
    assert quiet == []


def test_what_is_logged_says_who_speaks_where_logging_is_not_configured(tmp_path: Path) -> None:
    """Python prints a warning without a handler bare: two lines for one thing, and one of them from nobody."""
    script = SCRIPT.replace("logging.basicConfig(", "dict(").replace("weight_decay=0.1", "weight_decay=0.3")
    lines, quiet = said(tmp_path, "commands", "run", "quiet", script=script)
    assert all(line.startswith("decentral: ") for line in lines)
    told = [line for line in lines if "weight_decay is 0.1 in the manifest and 0.3 in this loop" in line]
    assert [line.startswith("decentral: warning: inner optimizer: ") for line in told] == [True]
    assert quiet == []


def test_the_way_to_a_member_is_told_as_soon_as_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decentral.transport.paths.LOOK_EVERY", 1e6)  # s: only who asks for it gets a look
    terms = run_terms("sparseloco", run={"rounds": 10**6})
    with joined(terms, Problem(0), tmp_path / "a") as host, joined(host.invite, Problem(1), tmp_path / "b") as joiner:
        for peer in (host, joiner):
            until(lambda peer=peer: {member.get("path") for member in peer.status().members} == {None, "direct"})


def test_a_script_that_is_paused_trains_on_and_its_status_says_so(tmp_path: Path) -> None:
    problem, manifest = Problem(0), run_terms("sparseloco", run={"rounds": 10**6}, inner={"steps": 2})
    with alone(tmp_path, manifest, problem) as peer:
        assert read_status(tmp_path).trains_while_paused
        assert read_status(tmp_path).own_loop
        ask(tmp_path, "pause")
        until(lambda: read_status(tmp_path).state == "paused", problem.step)
        assert "your loop trains on, and contributes nothing" in read_status(tmp_path).health
        steps, at = peer.inner_steps, peer.round
        for _ in range(6):
            problem.step()
        assert (peer.inner_steps, peer.round) == (steps + 6, at)


def test_the_status_has_both_losses_and_how_long_the_run_still_takes(tmp_path: Path) -> None:
    problem, manifest = Problem(0), run_terms("sparseloco", run={"rounds": 100}, inner={"steps": 2})
    with alone(tmp_path, manifest, problem) as peer:
        assert peer.status().seconds_left is None
        train(peer, problem, rounds=3)
        peer.log(loss=2.5, held_out_loss=2.75)
        status = peer.status()
    assert (status.loss, status.held_out_loss) == (2.5, 2.75)
    assert status.seconds_left is not None
    assert 0 < status.seconds_left < 97 * 60


def test_a_run_that_ends_by_time_has_no_more_left_than_that(tmp_path: Path) -> None:
    manifest = run_terms("sparseloco", run={"rounds": 10**6, "minutes": 2.0})
    with alone(tmp_path, manifest, Problem(0)) as peer:
        left = peer.status().seconds_left
    assert left is not None
    assert 0 < left <= 120


def test_a_script_that_failed_has_no_last_word(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone(tmp_path, run_terms("sparseloco"), Problem(0)):
        raise ZeroDivisionError
    assert read_status(tmp_path).state not in ENDED


def test_bytes_that_strangers_cause_by_measuring_are_not_the_runs_cost(tmp_path: Path) -> None:
    with joined(run_terms("sparseloco"), Problem(0), tmp_path) as peer:
        before = peer.status()

        async def measure() -> None:
            async with NativeTransport(Signer.generate(), listen=LOOPBACK) as stranger:
                other = peer_from_name(before.peer)
                await stranger.connect(other, before.addresses)
                await measure_speed(stranger, other)

        anyio.run(measure)
        after = peer.status()
    assert after.bytes_measuring == SPEED_NBYTES + 2
    assert after.bytes_sent - before.bytes_sent < 10_000
    assert after.bytes_received - before.bytes_received < 10_000
