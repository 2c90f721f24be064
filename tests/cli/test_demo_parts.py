"""The demo's own logic, without its processes; the whole of it runs in tests/faults and in ``make demo``."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from decentral.cli.demo import MARKER, MIN_ROUNDS, DemoPlan, clear, collect, demo_manifest, make_plan
from decentral.cli.demo_processes import Churn, DemoProcess, DemoProgress, Family, _look, watch
from decentral.cli.group import Stop
from decentral.errors import ConfigError, DecentralError, UsageError
from decentral.manifest import check_methods
from decentral.observe.metrics import MetricsLog
from decentral.observe.status import ProcessInfo, Status, write_status
from decentral.optimizers import presets
from tests.kit.patience import PATIENCE


def ended(folder: Path, name: str, *, killed: bool = False) -> DemoProcess:
    directory = folder / name
    directory.mkdir()
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    return DemoProcess(name, directory, process, killed=killed)


def plan(rounds: int = 12) -> DemoPlan:
    manifest = demo_manifest("sparseloco", seed=0)
    return DemoPlan("sparseloco", manifest, rounds, 5.5, 8.0, 0.05, 60.0, 75.0)


@pytest.mark.parametrize("algorithm", sorted(presets()))
def test_every_algorithm_has_a_demo_manifest_that_fits_together(algorithm: str) -> None:
    manifest = demo_manifest(algorithm, seed=3)
    check_methods(manifest)
    assert manifest.outer.method == algorithm
    assert manifest.run.seed == 3


def test_a_third_and_a_half_of_the_fewest_rounds_are_different_rounds() -> None:
    assert len({-(-MIN_ROUNDS // 3), -(-MIN_ROUNDS // 2), MIN_ROUNDS}) == 3


def test_one_peer_is_killed_at_a_third_and_one_comes_at_half(tmp_path: Path) -> None:
    comings: list[int] = []
    with Family() as family:
        victim = family.start_command("v", tmp_path / "v", [sys.executable, "-c", "input()"])
        churn = Churn(rounds=12, ends=1e9, victim=victim, add=lambda: comings.append(1) or victim)  # type: ignore[func-returns-value]
        for round_ in range(4):
            churn.act(round_, 0.0)
        assert not churn.killed
        churn.act(4, 0.0)
        churn.act(5, 0.0)
        assert churn.killed == ["v"]
        assert not comings
        for round_ in (6, 7, 8):
            churn.act(round_, 0.0)
        assert comings == [1]


def test_on_a_slow_machine_the_time_since_the_first_round_decides(tmp_path: Path) -> None:
    with Family() as family:
        victim = family.start_command("v", tmp_path / "v", [sys.executable, "-c", "input()"])
        churn = Churn(rounds=1000, ends=190.0, victim=victim, add=None)
        churn.act(0, 80.0)
        churn.act(1, 100.0)
        churn.act(2, 129.0)
        assert not churn.killed
        churn.act(2, 130.0)
        assert churn.killed == ["v"]


def test_a_newcomer_that_finds_the_run_over_is_sent_home_and_not_counted(tmp_path: Path) -> None:
    with Family() as family:
        peer = family.start_command("peer-0", tmp_path / "peer-0", [sys.executable, "-c", ""])
        solo = family.start_command("solo", tmp_path / "solo", [sys.executable, "-c", ""])
        assert family.wait([peer, solo], PATIENCE)
        forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        newcomer = family.start_command("newcomer", tmp_path / "newcomer", forever)
        stream, churn = io.StringIO(), Churn(12, 1e9, None, None, newcomer=newcomer)
        watch([peer], solo, churn, DemoProgress(stream, 12), stop=Stop(), deadline=time.monotonic() + PATIENCE)
        assert churn.newcomer is None
        assert not newcomer.running
    assert "the newcomer came too late, the run is over" in stream.getvalue()


def test_without_churn_nobody_dies_and_nobody_comes() -> None:
    churn = Churn(rounds=3, ends=1e9, victim=None, add=None)
    for round_ in range(4):
        churn.act(round_, 0.0)
    assert (churn.killed, churn.newcomer) == ([], None)


def test_a_peer_that_fails_ends_the_demo_with_its_last_words(tmp_path: Path) -> None:
    with Family() as family:
        bad = family.start_command("peer-0", tmp_path / "peer-0", [sys.executable, "-c", "exit('error: no text')"])
        solo = family.start_command("solo", tmp_path / "solo", [sys.executable, "-c", ""])
        progress = DemoProgress(io.StringIO(), 12)
        with pytest.raises(DecentralError, match=r"peer-0 ended with exit code 1: error: no text"):
            watch([bad], solo, Churn(12, 1e9, None, None), progress, stop=Stop(), deadline=time.monotonic() + PATIENCE)


def test_a_demo_that_takes_too_long_says_who_is_late(tmp_path: Path) -> None:
    forever = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    with Family() as family:
        peer = family.start_command("peer-0", tmp_path / "peer-0", forever)
        solo = family.start_command("solo", tmp_path / "solo", forever)
        progress = DemoProgress(io.StringIO(), 12)
        with pytest.raises(DecentralError, match="peer-0, solo still run; try fewer --peers"):
            watch([peer], solo, Churn(12, 1e9, None, None), progress, stop=Stop(), deadline=time.monotonic())


def test_the_lines_say_how_long_a_killed_peer_is_waited_for(tmp_path: Path) -> None:
    """Rounds that took seconds longer than the others had no reason in the demo's lines."""
    with Family() as family:
        first, victim = (
            family.start_command(name, tmp_path / name, [sys.executable, "-c", "input()"]) for name in ("peer-0", "v")
        )
        write_status(victim.directory, Status(peer="12D3v"), ProcessInfo())
        churn, stream = Churn(rounds=12, ends=1e9, victim=victim, add=None), io.StringIO()
        for round_, live in ((3, True), (4, True), (5, True), (6, False), (7, False)):
            members = ({"peer": "12D3v", "live": live},)
            write_status(first.directory, Status(round=round_, members=members), ProcessInfo())
            _look(first, churn, DemoProgress(stream, 12))
    said = [line for line in stream.getvalue().splitlines() if not line.startswith("round")]
    assert said == [
        "v was killed (SIGKILL) in round 4; nobody told the others, so they wait for it",
        "the lease of v has run out: the others go on without it from round 6 on",
    ]


def test_progress_is_one_line_per_round_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with DemoProgress(stream, 12) as progress:
        for round_ in (0, 0, 1, 1, 1, 2):
            progress.show(Status(round=round_, loss=2.5, bytes_sent=300_000))
    assert stream.getvalue().splitlines() == [
        f"round {i} of 12: 0 members, loss 2.500, 0.3 MB sent by peer-0" for i in range(3)
    ]


def end_of(child: DemoProcess, **values: Any) -> None:
    summary = {
        "algorithm": "sparseloco",
        "num_parameters": 1000,
        "inner_steps": 100,
        "round": 12,
        "tokens": 5000,
        "seconds": 60.0,
        "utilisation": 0.9,
        "bits_per_byte": 2.0,
        "loss": 1.4,
        "bytes_sent": 4000,
        "bytes_received": 5000,
        "anchor_digest": "ab",
        **values,
    }
    (child.directory / "summary.json").write_text(json.dumps(summary))


def test_the_summary_counts_the_dead_and_the_newcomer(tmp_path: Path) -> None:
    first, lost = ended(tmp_path, "peer-0"), ended(tmp_path, "peer-1", killed=True)
    newcomer, solo = ended(tmp_path, "newcomer"), ended(tmp_path, "solo")
    end_of(first)
    end_of(newcomer, inner_steps=40, bytes_sent=1000, bytes_received=2000)
    end_of(solo, bits_per_byte=2.5, loss=1.7)
    write_status(lost.directory, Status(inner_steps=30, bytes_sent=500, bytes_received=600), ProcessInfo())
    churn = Churn(12, 1e9, None, None, newcomer=newcomer, killed=["peer-1"])
    result = collect(plan(), [first, lost, newcomer], solo, churn, strays=0)
    summary = result.summary
    assert (summary.peers, summary.killed, summary.joined, summary.stray_processes) == (2, 1, 1, 0)
    assert summary.anchor_digests == {"peer-0": "ab", "newcomer": "ab"}
    assert (summary.bytes_sent, summary.bytes_received) == (5500, 7600)
    dense = 2 * (2 - 1) / 2 * 4 * 1000 * (100 + 40 + 30)
    assert summary.bytes_dense_fp32_every_step == dense
    assert summary.reduction == pytest.approx(dense / 5500, abs=0.1)
    assert summary.loss_last < summary.loss_solo < summary.loss_first


def test_the_curve_counts_what_everybody_had_trained_and_sent_by_then(tmp_path: Path) -> None:
    first, lost = ended(tmp_path, "peer-0"), ended(tmp_path, "peer-1", killed=True)
    newcomer, solo = ended(tmp_path, "newcomer"), ended(tmp_path, "solo")
    log = MetricsLog(first.directory)
    log.inner(1, loss=5.0)
    log.outer(10, round=1, tokens=100, bytes_sent=10, bits_per_byte=5.0)
    log.outer(20, round=2, tokens=200, bytes_sent=30)  # not evaluated: no time for it
    log.outer(30, round=3, tokens=300, bytes_sent=40, bits_per_byte=4.0)
    log.close()
    dead = MetricsLog(lost.directory)
    dead.outer(10, round=1, tokens=90, bytes_sent=9)
    dead.outer(20, round=2, tokens=180, bytes_sent=18)
    dead.close()
    late = MetricsLog(newcomer.directory)
    late.outer(10, round=3, tokens=70, bytes_sent=7)
    late.close()
    for child in (first, newcomer, solo):
        end_of(child)
    churn = Churn(12, 1e9, None, None, newcomer=newcomer, killed=["peer-1"])
    swarm, alone = collect(plan(), [first, lost, newcomer], solo, churn, strays=0).curves
    assert list(swarm.tokens) == [0, 100 + 90, 300 + 180 + 70]
    assert list(swarm.nbytes) == [0, 10 + 9, 40 + 18 + 7]
    assert list(swarm.bits_per_byte) == [8.0, 5.0, 4.0]
    assert swarm.seconds[0] == 0.0
    assert list(swarm.seconds) == sorted(swarm.seconds), "it began with the first inner step"
    assert list(alone.bits_per_byte) == [8.0]


def test_a_peer_without_a_summary_is_named(tmp_path: Path) -> None:
    first, solo = ended(tmp_path, "peer-0"), ended(tmp_path, "solo")
    with pytest.raises(DecentralError, match=r"peer-0/summary.json: no summary was left"):
        collect(plan(), [first], solo, Churn(12, 1e9, None, None), strays=0)


def test_an_earlier_demo_is_replaced_and_anything_else_is_kept(tmp_path: Path) -> None:
    clear(tmp_path / "demo")
    (tmp_path / "demo/old").touch()
    clear(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [MARKER]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo").touch()
    with pytest.raises(UsageError, match="not empty and no earlier demo made it"):
        clear(tmp_path / "mine")


def test_a_method_by_which_no_run_is_founded_is_refused_before_anybody_starts():
    with pytest.raises(ConfigError, match="for replicas that begin apart"):
        make_plan("variance_corrected", num_peers=2, minutes=1, seed=0)
