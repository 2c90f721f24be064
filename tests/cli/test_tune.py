"""``decentral tune``: terms for one's own model, found on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from decentral.lab.command import Script
from decentral.manifest import load_manifest
from tests.cli.conftest import Run
from tests.kit import own_problems
from tests.kit.patience import PATIENCE

ROOT = Path(__file__).parents[2]
SOURCE = Path(own_problems.__file__)
RATES = ("--outer-rate", 1, "--outer-rate", 30)
QUICK = ("--rounds", 4, "--inner-steps", 5, "--preset", "local_sgd", *RATES, "--processes", 1)


def test_the_table_has_every_candidate_beside_a_peer_alone_and_the_best_terms_are_written(
    run: Run, tmp_path: Path
) -> None:
    result = run("tune", f"{SOURCE}:build", *QUICK, "--out", "run.toml")
    assert result.exit_code == 0, result.stderr
    head, *rows, verdict = result.stdout.splitlines()
    assert head.split() == ["held-out", "loss", "after", "round", "2", "round", "3", "round", "4"]
    assert {row[:15].strip() for row in rows[:2]} == {"local_sgd at 1", "alone"}
    assert rows[2].startswith("local_sgd at 30 ")
    assert "written to run.toml." in verdict
    manifest = load_manifest(tmp_path / "run.toml")
    assert (manifest.outer.learning_rate, manifest.run.rounds, manifest.model.task) == (1.0, 4, "custom")
    assert "round 4 of 4: alone " in result.stderr


def test_programs_get_one_object(run: Run) -> None:
    told = json.loads(run("tune", f"{SOURCE}:build", *QUICK, "--json").stdout)
    assert told["best"] == "local_sgd at 1"
    assert set(told["losses"]) == {"local_sgd at 1", "local_sgd at 30"}
    assert told["gain"] == pytest.approx(told["alone"][-1] - told["losses"]["local_sgd at 1"][-1])


def test_the_best_at_the_edge_of_what_was_tried_is_said(run: Run) -> None:
    said = run("tune", f"{SOURCE}:build", *QUICK).stdout
    assert "It is the smallest rate that was tried: --outer-rate 1 --outer-rate 0.83 goes on from there." in said


def test_the_terms_of_a_run_of_text_keep_all_but_how_peers_learn_together(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "one.txt").write_text("To be, or not to be, that is the question. " * 2000)
    sizes = ("--model-size", "60k", "--rounds", 4, "--inner-steps", 2, "--data", "text")
    assert run("init", "run.toml", *sizes).exit_code == 0
    result = run(
        "tune", "run.toml", "--data", "text", "--preset", "local_sgd", *RATES, "--processes", 1, "--out", "best.toml"
    )
    assert result.exit_code == 0, result.stderr
    before, best = load_manifest(tmp_path / "run.toml"), load_manifest(tmp_path / "best.toml")
    assert best.outer.method == "local_sgd"
    assert best.outer.learning_rate in {1.0, 30.0}
    assert [best.run, best.model, best.data, best.inner] == [before.run, before.model, before.data, before.inner]
    assert "name your copy of it with --data" in run("tune", "run.toml").stderr


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("ends", ["SIGINT", "SIGKILL", "SIGTERM"])
def test_a_search_that_is_ended_leaves_no_trial_behind(tmp_path: Path, ends: str) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nfrom tests.kit.own_problems import build as plain\n\n"
        "def build(number):\n    with open('pids', 'w') as file:\n        print(os.getpid(), file=file)\n"
        "    return plain(number)\n"
    )
    os.mkfifo(tmp_path / "pids")
    process = subprocess.Popen(
        [sys.executable, "-m", "decentral", "tune", "train.py:build", "--rounds", "1000000", "--preset", "local_sgd"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    pids: set[int] = set()
    try:
        with open(os.open(tmp_path / "pids", os.O_RDWR)) as built:  # a reader that sees no end between two writers
            while len(pids) < 3:  # itself, a trial alone, and one together
                pids.add(int(built.readline()))
        trials = [psutil.Process(pid) for pid in pids - {process.pid}]
        process.send_signal(getattr(signal, ends))
        assert process.wait(PATIENCE) != 0
        _, left = psutil.wait_procs(trials, timeout=PATIENCE)
        assert not left
    finally:
        for pid in {process.pid, *pids}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_script_is_loaded_without_its_main_part_and_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_the_script.py").write_text("NUMBER = 41")
    script = tmp_path / "main_part.py"
    script.write_text(
        "import beside_the_script\n\ndef build(number):\n    return beside_the_script.NUMBER + number\n\n"
        "if __name__ == '__main__':\n    raise SystemExit('trained')\n"
    )
    assert Script.of(f"{script}:build")(1) == 42
