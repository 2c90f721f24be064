from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decentral.training.processes import _count_processes, warn_if_alone

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("/bin/python /bin/accelerate launch --num_processes 2 train.py", 2),
        ("/bin/python /bin/accelerate launch --cpu --num_processes=3 train.py", 3),
        ("accelerate-launch --num_processes 4 train.py", 4),
        ("python -m accelerate.commands.launch --num-processes 2 train.py", 2),
        ("accelerate launch train.py", 0),
        ("accelerate launch --num_processes many train.py", 0),
        ("python train.py --num_processes 2", 0),
        ("bash accelerate.sh launch --num_processes 2", 0),
        ("", 0),
    ],
)
def test_a_launchers_command_line_says_how_many_processes_were_asked_for(typed: str, wanted: int) -> None:
    assert _count_processes(typed.split()) == wanted


@pytest.mark.long
def test_one_process_that_accelerate_started_instead_of_two_is_warned(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from decentral.training.processes import warn_if_alone\nprint(warn_if_alone())\n")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("accelerate launch was asked for 2 processes, and this is the only one")
    assert "ACCELERATE_USE_CPU=true torchrun --standalone --nproc_per_node 2" in done.stdout


@pytest.mark.parametrize("size", ["", "two"])
def test_a_word_in_the_environment_that_is_no_number_is_no_size(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert warn_if_alone() == ""
