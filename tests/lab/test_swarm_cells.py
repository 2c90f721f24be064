"""A cell of the laboratory by real peers, each a process with a daemon: they end where its replicas do."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentral.lab.cells import Cell
from decentral.lab.running import run_cell
from decentral.manifest import preset_manifest
from tests.lab.declared import SIZE

run = pytest.importorskip("experiments.swarm_cells.run", reason="not part of a source distribution")


@pytest.mark.long
@pytest.mark.parametrize("preset", ["diloco", "sparseloco", "noloco"])
def test_a_swarm_of_processes_has_the_loss_of_its_cell(preset: str, tmp_path: Path) -> None:
    manifest = preset_manifest(
        preset,
        run={"name": "lab", "salt": "lab", "seed": 1, "rounds": 4},
        model=SIZE,
        data={"batch_size": 2},
        inner={"steps": 6, "warmup": 4, "learning_rate": 0.01},
    )
    cell = Cell.of("swarm", "language", 2, manifest, steps=24, points=1, windows=16, text="")
    ended = run.as_swarm(cell, tmp_path)
    assert [(one.rank, one.rounds, one.steps) for one in ended] == [(0, 4, 24), (1, 4, 24)]
    found = run_cell(cell).curve
    assert found is not None
    assert run.held_out(cell, ended).loss == pytest.approx(found.points[-1].loss, abs=1e-4)
