"""Machine code is compiled before training begins, and a person sees that it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from decentral.cli import progress
from decentral.cli.runs import compile_for
from decentral.manifest import preset_manifest
progress._QUIET_SECONDS = 0.0
compile_for(preset_manifest(sys.argv[1]), sys.stderr)
"""


def said(cache: Path, preset: str) -> list[str]:
    env = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", PROGRAM, preset], env=env, capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


@pytest.mark.timeout(300)
def test_the_first_time_is_told_to_its_end_and_the_second_says_nothing(tmp_path: Path) -> None:
    first = said(tmp_path, "diloco")
    assert first[-1].startswith("compiling machine code, once on this machine: 100% done")
    assert len(first) >= 5
    assert said(tmp_path, "diloco") == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_sparse_runs_need_is_counted_as_it_is(tmp_path: Path) -> None:
    assert "100% done" in said(tmp_path, "sparseloco")[-1]
