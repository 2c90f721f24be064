"""A small dose of ``make powerloss``: real SIGKILLs of a process that only writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_real_kills_tear_nothing_and_lose_nothing_acknowledged():
    command = [sys.executable, "-m", "tests.faults.powerloss", "--kills", "40", "--seed", "7"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["kills"], report["torn"], report["lost"]) == (40, 0, 0)
    assert report["in_checkpoint"] >= 5, "not aimed, 3 of 40 hit; aimed, 35, and 12 on a busy machine"
    assert report["half_written"], "no kill left a half-written file"
