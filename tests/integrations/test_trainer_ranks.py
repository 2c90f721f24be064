from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.test_transformers import terms

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_trainer_of_two_processes_is_one_peer(tmp_path):
    (tmp_path / "run.toml").write_text(terms().to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, "-m", "tests.integrations.trainer_ranks", str(tmp_path / "run.toml"), str(tmp_path / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads((tmp_path / "out" / "ranks.json").read_text())
    assert len(found["ranks"]) == 2
    assert found["ranks"][0] == found["ranks"][1]
    assert found["ranks"][0][::2] == [12, 2]
    assert sorted(item for part in found["first_pass"] for item in part) == list(range(64))
    assert found["logs"][-1]["swarm/inner_steps"] == 12
