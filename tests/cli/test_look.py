"""`decentral compare`: from what peers of two runs left behind to a table and a figure."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from decentral.manifest import preset_manifest
from decentral.observe.compare import BITS, LOSS, read_run
from decentral.observe.events import EventLog
from decentral.observe.metrics import MetricsLog
from decentral.observe.status import ProcessInfo, Status, write_status
from tests.cli.conftest import Run


def left_behind(folder: Path, preset: str, bits: Sequence[float], nbytes: int, **inner: object) -> None:
    """A run directory of ``start``: a round every ten seconds and every 30 steps."""
    folder.mkdir()
    (folder / "run.toml").write_text(preset_manifest(preset, run={"name": folder.name}, inner=inner).to_toml())
    now = iter(10.0 * n for n in range(100))
    log = MetricsLog(folder, monotonic=lambda: next(now))
    for round, value in enumerate(bits, 1):
        log.outer(30 * round, round=round, bytes_sent=nbytes * round, bits_per_byte=value)
    log.close()
    status = Status(round=len(bits), rounds=100, rounds_seen=len(bits), rounds_contributed=len(bits) - 1)
    write_status(folder, status, ProcessInfo())


def own_loop(folder: Path, losses: Sequence[float]) -> None:
    """That of a script: two losses a round."""
    folder.mkdir()
    (folder / "run.toml").write_text(preset_manifest("diloco", model={"task": "custom"}, inner={"steps": 4}).to_toml())
    now = iter(100.0 + n for n in range(100))
    log = EventLog(folder, wall=lambda: next(now))
    log("joined", round=0)
    for step, loss in enumerate(losses):
        log("metrics", inner_step=step + 1, loss=loss)
        if step % 2:
            log("commit", round=step, outer_step=(step + 1) // 2)
    log.close()


def test_two_runs_are_one_table_and_one_figure(run: Run, tmp_path: Path) -> None:
    left_behind(tmp_path / "sparse", "sparseloco", [3.5, 3.0, 3.1], 10_000)
    left_behind(tmp_path / "dense", "diloco", [3.4, 2.9], 500_000, steps=50)
    result = run("compare", "sparse", "dense", "--figure", "both.png")
    assert result.exit_code == 0, result.stderr
    table = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert table[:2] == ["sparse dense", "method sparseloco diloco"]
    assert "held-out bits per byte, best 3.0000 2.9000" in table
    assert "sent by this peer 30.0 kB 1.0 MB" in table
    assert "rounds contributed to 67% 50%" in table
    assert "inner.steps 30 50" in table
    assert not any("salt" in line for line in table)
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_the_numbers_of_the_table_are_in_json(run: Run, tmp_path: Path) -> None:
    left_behind(tmp_path / "a", "sparseloco", [3.5, 3.0, 3.1], 10_000)
    left_behind(tmp_path / "b", "sparseloco", [3.4], 10_000)
    told = json.loads(run("compare", "a", "b", "--json").stdout)
    assert told["compared"] == BITS
    assert told["runs"][0] | {"best": 3.0, "last": 3.1, "bytes_sent": 30_000, "inner_steps": 90} == told["runs"][0]
    assert told["terms"] == {}
    assert (tmp_path / "compare.png").exists()


def test_a_loop_of_ones_own_is_compared_by_its_losses(run: Run, tmp_path: Path) -> None:
    own_loop(tmp_path / "a", [4, 2, 1, 1])
    own_loop(tmp_path / "b", [4, 4])
    told = json.loads(run("compare", "a", "b", "--json").stdout)
    assert told["compared"] == LOSS
    assert [(one["best"], one["last"], one["inner_steps"]) for one in told["runs"]] == [(1, 1, 4), (4, 4, 2)]
    assert [one["bytes_sent"] for one in told["runs"]] == [None, None]


def test_seconds_and_bytes_of_a_peer_that_came_back_add_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left_behind(folder, "sparseloco", [3.0, 2.0], 100)  # at 10 and 20 s
    again = iter([0.0, 5.0])
    log = MetricsLog(folder, monotonic=lambda: next(again))
    log.outer(90, round=3, bytes_sent=100, bits_per_byte=1.0)
    log.close()
    points = read_run(folder).curves[BITS]
    assert [(p.seconds, p.nbytes) for p in points] == [(10, 100), (20, 200), (25, 300)]


def test_what_cannot_be_compared_is_refused_in_one_line_and_draws_nothing(run: Run, tmp_path: Path) -> None:
    left_behind(tmp_path / "a", "sparseloco", [3.5], 10_000)
    own_loop(tmp_path / "b", [4, 2])
    (tmp_path / "empty").mkdir()
    for named, why in ((["a"], "name 2 to 8"), (["a", "empty"], "no run directory"), (["a", "b"], "no number")):
        result = run("compare", *named)
        assert result.exit_code == 2
        assert why in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "compare.png").exists()
    assert run("compare", "a", "a", "--figure", "a/run.toml/x.png").exit_code in (2, 50)


def test_without_matplotlib_there_is_a_table_and_a_word_instead_of_the_figure(run: Run, tmp_path: Path) -> None:
    left_behind(tmp_path / "one", "sparseloco", [3.0, 2.0], 10)
    left_behind(tmp_path / "two", "diloco", [3.0, 2.5], 20)
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "importlib.util.find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more)
        )
        told = run("compare", "one", "two")
        assert told.exit_code == 0, told.stderr
        assert "pip install 'matplotlib>=3.9'" in told.stdout
        assert json.loads(run("compare", "one", "two", "--json").stdout)["figure"] is None
    assert not (tmp_path / "compare.png").exists()
