"""How ``start`` begins with two, and how it and ``join`` end when the run is over: as people type them."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.cli.demo_processes import Family
from decentral.observe.status import read_status
from decentral.state.checkpoint import load_newest
from tests.cli.conftest import Run
from tests.kit.families import INVITE, NET, OVER, status_of, write_terms
from tests.kit.patience import PATIENCE, until


@pytest.fixture
def terms(tmp_path: Path) -> list[str]:
    """Terms of three rounds."""
    write_terms(tmp_path, 3, inner={"steps": 4})
    return ["--data", str(tmp_path / "text"), *NET]


def test_a_finished_run_is_told_at_once_when_it_is_started_again_and_keeps_its_summary(
    family: Family, terms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = family.start("first", tmp_path / "first", ["start", "run.toml", *terms, "--alone", "--out", "out"])
    assert first.process.wait(PATIENCE) == 0, first.last_words()
    assert OVER.format("out") in (tmp_path / "first/stderr.txt").read_text()
    kept = (tmp_path / "out/summary.json").read_text()
    summary = json.loads(kept)
    assert summary["round"] == read_status(tmp_path / "out").round == 3
    checkpoint = load_newest(tmp_path / "out/checkpoints")
    assert checkpoint is not None
    assert checkpoint.path.name.endswith("-round-000003")

    typed = ["start", "run.toml", *terms, "--out", "out", "--json"]  # without --alone: nobody is waited for
    again = family.start("again", tmp_path / "again", typed)
    assert again.process.wait(PATIENCE) == 0, again.last_words()
    assert OVER.format("out") in (tmp_path / "again/stderr.txt").read_text()
    assert json.loads((tmp_path / "again/stdout.txt").read_text()) == summary
    assert (tmp_path / "out/summary.json").read_text() == kept
    assert read_status(tmp_path / "out").inner_steps == summary["inner_steps"]


@pytest.mark.long
def test_who_comes_late_gets_the_run_from_a_peer_that_keeps_serving(
    family: Family, run: Run, terms: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "first"
    started = ["start", str(tmp_path / "run.toml"), *terms, "--alone", "--keep-serving", "--out", str(out)]
    first = family.start("first", out, started)
    invite = first.first_line(PATIENCE).split()[2]
    until(lambda: (out / "summary.json").exists())
    late = run("join", invite, *terms, "--out", "late")
    assert late.exit_code == 0, late.stderr
    assert OVER.format("late") in late.stderr
    assert late.stdout == ""  # it goes at once: its own invite would lead to nobody
    assert read_status(tmp_path / "late").inner_steps == 0
    assert run("export", "late", "--to", "model").exit_code == 0

    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(PATIENCE) == 130
    assert status_of(first).state == "done"


@pytest.mark.long
def test_the_first_peer_waits_for_a_second_one_and_hears_who_steers_it(
    family: Family, run: Run, terms: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "first"
    typed = ["start", str(tmp_path / "run.toml"), *terms, "--out", str(out)]
    first = family.start("first", out, typed)
    assert first.first_line(PATIENCE).startswith("decentral join ")
    until(lambda: status_of(first).state == "waiting")
    assert run("pause", "--out", out).exit_code == 0
    until(lambda: status_of(first).state == "paused")
    assert run("resume", "--out", out).exit_code == 0
    until(lambda: status_of(first).state == "waiting")
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(PATIENCE) == 130
    assert status_of(first).inner_steps == 0
    said = (out / "stderr.txt").read_text()
    assert "waiting: for a second peer, who joins with the invite; --alone goes on without" in said

    again = family.start("first", out, typed)
    until(lambda: status_of(again).pid == again.process.pid and status_of(again).state == "waiting")
    assert run("leave", "--out", out, "--wait", PATIENCE).exit_code == 0
    assert again.process.wait(PATIENCE) == 0
    assert status_of(again).inner_steps == 0


# ---- the script of a person's own loop ----

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.mark.long
def test_a_script_of_ones_own_is_joined_with_one_line(family: Family, run: Run, tmp_path: Path) -> None:
    folder = ["--out", str(tmp_path / "first"), "--rounds", "12"]
    with (tmp_path / "first.txt").open("w") as said:
        first = subprocess.Popen([sys.executable, EXAMPLE, *folder], stdout=said, stderr=said)
    try:
        until(lambda: "decentral join " in (tmp_path / "first.txt").read_text())
        invite = (tmp_path / "first.txt").read_text().split("decentral join ")[1].split()[0]
        out = tmp_path / "second"
        typed = ["join", invite, "--out", str(out), *NET, "--script", str(EXAMPLE), "--", "--seed", "7"]
        second = family.start("second", out, typed)
        assert second.process.wait(PATIENCE) == 0, (out / "stderr.txt").read_text()
        assert first.wait(PATIENCE) == 0, (tmp_path / "first.txt").read_text()
    finally:
        first.kill()
    assert "seed 7" in (out / "stdout.txt").read_text()
    assert status_of(second).rounds_contributed > 0
    ends = [read_status(tmp_path / name) for name in ("first", "second")]
    assert ends[0].anchor_digest == ends[1].anchor_digest
    assert [end.round for end in ends] == [12, 12]


SCRIPT = """
import sys
import decentral

def fails():
    raise ValueError(f"of my own: {sys.argv[1:]} as {__name__}")

fails()
"""


def test_an_error_of_the_script_is_shown_as_its_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = run("join", INVITE, "--script", "train.py", "--", "--batch", "8")
    assert result.exit_code == 1
    shown = result.stderr.splitlines()
    assert shown[0] == "Traceback (most recent call last):"
    assert shown[1].endswith('train.py", line 8, in <module>')
    assert shown[-1] == "ValueError: of my own: ['--batch', '8'] as __main__"


def test_what_a_script_asks_of_join_gives_way_to_the_command_line(run: Run, tmp_path: Path) -> None:
    script = """
import torch, decentral
model = torch.nn.Linear(2, 2)
decentral.join("no-such.toml", model, torch.optim.SGD(model.parameters(), lr=0.1), out="mine", relays=["here"])
"""
    (tmp_path / "train.py").write_text(script)
    result = run("join", INVITE, *NET, "--script", "train.py", "--out", "theirs", "--join-timeout", "0.2")
    assert result.exit_code == 20, result.stderr
    looks, refused = result.stderr.splitlines()
    assert looks == "decentral: looking for the run's peers ..."
    assert refused.startswith("error: no peer of run")
    assert not (tmp_path / "mine").exists()


WAITING = """
import threading
try:
    print("up", flush=True)  # the signal may come before this line has returned
    threading.Event().wait(120)
except KeyboardInterrupt:
    print("kept", flush=True)
    raise
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGTERM there")
def test_a_script_that_a_service_ends_leaves_as_after_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    typed = [sys.executable, "-m", "decentral", "join", INVITE, "--script", "train.py", "--out", "new"]
    with subprocess.Popen(typed, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        running.terminate()
        assert running.stdout.read() == "kept\n"
    assert running.returncode == 128 + signal.SIGTERM
