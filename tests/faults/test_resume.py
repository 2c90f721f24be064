"""SIGKILL, then start again in the same folder: checkpoint and journal give back the last commit, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forks import Forks

RunUntil = Callable[..., list[dict[str, Any]]]


def has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("[!.]*/tensors.safetensors"))


@pytest.fixture
def run_until(forks: Forks) -> RunUntil:
    def run(folder: Path, preset: str, kill_at: int | None, last: int) -> list[dict[str, Any]]:
        """What the trainer said until it was killed at its ``kill_at``-th commit, or at the first one after that with a
        checkpoint on disk (they are written beside the training), or ended by itself."""
        said: list[dict[str, Any]] = []
        process = forks.start("trainer", folder, preset, last)
        with process.stdin, process.stdout, process.stderr:
            for line in process.stdout:
                said.append(json.loads(line))
                if kill_at is not None and len(said) > kill_at and has_checkpoint(folder):
                    process.kill()
                    break
            said += [json.loads(line) for line in process.stdout]
            stderr = process.stderr.read()
            process.wait()
        assert said, stderr
        return said

    return run


@pytest.mark.parametrize("preset", ["sparseloco", pytest.param("diloco", marks=pytest.mark.long)])
def test_a_peer_killed_between_checkpoints_resumes_at_the_digest_of_its_last_commit_even_by_an_older_checkpoint(
    run_until, tmp_path, preset
):
    """Once from what it left, and once where the newest checkpoint is corrupted, which is passed over."""
    killed, corrupted = tmp_path / "killed", tmp_path / "corrupted"
    said = run_until(killed, preset, 11, 1000)
    last, digests = said[-1], {one["round"]: one["digest"] for one in said}
    shutil.copytree(killed, corrupted, ignore=shutil.ignore_patterns("*.sock", "*.lock"))
    newest = sorted((corrupted / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    for folder, kill_at in ((killed, None), (corrupted, 0)):
        again = run_until(folder, preset, kill_at, last["round"] + 2)
        began = again[0]
        assert began["round"] >= last["round"], "a durable commit was lost"
        assert began["digest"] == digests.get(began["round"], began["digest"])
        assert 0 < began["steps"] <= last["steps"]
        assert kill_at is not None or again[-1]["round"] == last["round"] + 2
    assert "checkpoint_passed_over" in (corrupted / "events.jsonl").read_text()
