"""A study that ends, however it ends, goes on where it was: no cell that is there is run again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.lab.cells import Cell
from decentral.lab.laboratory import Store, Workers, run_study
from decentral.lab.running import Outcome, failure, run_cell
from tests.kit.patience import PATIENCE
from tests.lab.declared import TEXT, Here, ended, of, plan


def started(folder: Path) -> subprocess.Popen[str]:
    """The command, with two cells done."""
    (folder / "study.toml").write_text(TEXT)
    typed = [sys.executable, "-m", "decentral", "lab", "study.toml", "--out", "found", "--workers", "1"]
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(typed, cwd=folder, env=given, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    for _ in range(2):
        assert " of 13 cells, " in process.stderr.readline()
    return process


@pytest.mark.long
def test_a_killed_study_goes_on_without_running_a_cell_twice(tmp_path: Path) -> None:
    process = started(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=PATIENCE)
    _, left = psutil.wait_procs(workers, timeout=PATIENCE)
    assert not left, "workers end with the one that started them"

    lines = (tmp_path / "found/cells.jsonl").read_bytes().splitlines()
    there = Store(tmp_path / "found").known()
    mine, here = plan(), Here()
    known = run_study(mine, Store(tmp_path / "found"), here)
    assert len(there) >= 2
    assert not there.keys() & set(here.ran)
    assert len(known) == len(there) + len(here.ran) == mine.size()
    assert (tmp_path / "found/cells.jsonl").read_bytes().splitlines()[: len(there)] == lines[: len(there)]
    assert run_study(mine, Store(tmp_path / "found"), again := Here()).keys() == known.keys()
    assert again.ran == []


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_study_that_is_stopped_ends_with_the_signals_code_and_leaves_no_process(
    tmp_path: Path, number: int, code: int
) -> None:
    process = started(tmp_path)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)  # as a terminal does
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in told
    assert {outcome.status for outcome in Store(tmp_path / "found").known().values()} == {"done"}
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]


def test_a_line_that_was_cut_off_costs_its_own_cell_and_no_other(tmp_path: Path) -> None:
    store, (first, second, third) = Store(tmp_path), plan().due_cells({})[:3]
    store.keep(first, ended(1.0))
    store.keep(second, ended(None))
    path = tmp_path / "cells.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert store.known().keys() == {first.id}
    store.keep(third, ended(3.0))
    assert {name: outcome.loss for name, outcome in store.known().items()} == {first.id: 1.0, third.id: 3.0}


def test_a_second_process_on_a_studys_folder_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(TEXT)
    first = Store(tmp_path / "found")
    first.begin(TEXT)
    typed = ["lab", str(tmp_path / "study.toml"), "--out", str(tmp_path / "found")]
    told = CliRunner().invoke(main, typed)
    assert (told.exit_code, told.stdout) == (2, "")
    assert "found is in use by another decentral lab; wait for its end" in told.stderr
    first.end()
    Store(tmp_path / "found").begin(TEXT)


def test_a_folder_that_was_carried_to_another_place_has_all_its_cells(tmp_path: Path) -> None:
    mine, here, again = plan(), Here(), Here()
    run_study(mine, Store(tmp_path / "here"), here)
    (tmp_path / "there").mkdir()
    shutil.copy(tmp_path / "here/cells.jsonl", tmp_path / "there/cells.jsonl")
    assert len(run_study(mine, Store(tmp_path / "there"), again)) == len(here.ran) == mine.size()
    assert again.ran == []


def test_what_is_kept_reads_back_as_it_was(tmp_path: Path) -> None:
    cell, store = plan().due_cells({})[0], Store(tmp_path)
    found = run_cell(cell)
    store.keep(cell, found)
    assert of(store.known()[cell.id]) == of(found)


def bad(cell: Cell) -> Outcome:
    """What workers run here: one cell breaks the process, the others the run."""
    if cell.kind == "swarm" and cell.manifest.inner.learning_rate == 0.003:
        os._exit(9)
    return failure("two\nlines")


def test_a_process_that_dies_takes_its_cell_with_it_and_the_study_goes_on(tmp_path: Path) -> None:
    mine, store = plan(), Store(tmp_path)
    with Workers(1, bad) as workers:
        known = run_study(mine, store, workers)
    died, *others = [known[cell.id].reason for cell in mine.due_cells({})]
    assert died.startswith("its process ended with code 9")
    assert others == ["two lines"] * 3
    assert len(known) == 4  # no search found anything: nothing is reported
