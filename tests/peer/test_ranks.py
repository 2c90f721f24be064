from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from decentral.manifest import preset_manifest

SCRIPT = Path(__file__).parent / "two_ranks.py"


def test_both_processes_of_a_peer_hold_the_anchor_after_the_last_round(tmp_path):
    runs = {"sparseloco": tmp_path / "a.toml", "noloco": tmp_path / "b.toml", "diloco": tmp_path / "c.toml"}
    for preset, manifest in runs.items():
        averages = {"optimizer": "gpa", "averaging": 0.9} if preset == "diloco" else {}
        inner = {"steps": 5, "learning_rate": 0.01, **averages}
        plain = {"momentum": 0.0, "learning_rate": 1.0} if averages else {}  # an average does not go with momentum
        terms = preset_manifest(preset, run={"rounds": 3, "salt": "ranks"}, inner=inner, outer=plain)
        manifest.write_text(terms.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    run = subprocess.run(
        [*command, str(SCRIPT), *map(str, runs.values())],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=280,  # two processes of torch on a machine that does other things
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    for preset, manifest in runs.items():
        found = json.loads((manifest.with_suffix("") / "ranks.json").read_text())
        assert len(found["ranks"]) == 2, preset
        assert found["ranks"][0] == found["ranks"][1], preset
        assert found["ranks"][0][1] == 15, preset
        assert found["live"] == found["ranks"][0][0], preset
        assert found["alike"] == [[3, found["anchor"]]] * 2, preset
        assert found["seeds"][0] == found["seeds"][1] > 0, preset
        assert [len(part) for part in found["parts"]] == [60, 60], preset
        (told, seen), (told_1, seen_1) = found["seen"]
        assert told == told_1
        assert [round_ for round_, _, _ in told] == [1, 2, 3]
        assert seen == seen_1, preset
        assert seen[8] is True, "what trained came back"
        assert [one[1] for one in seen[:7]] == [step / 15 for step in range(1, 8)]
        assert not set(found["parts"][0]) & set(found["parts"][1]), preset
