"""SIGKILL, then start again in the same folder: checkpoint and journal give back the last commit, bit for bit."""

from __future__ import annotations

import json
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
def test_a_peer_killed_between_checkpoints_resumes_at_the_digest_of_its_last_commit(run_until, tmp_path, preset):
    first = run_until(tmp_path, preset, 7, 1000)
    last = first[-1]
    again = run_until(tmp_path, preset, None, last["round"] + 2)
    began = again[0]
    digests = {said["round"]: said["digest"] for said in first}
    assert began["round"] >= last["round"], "a durable commit was lost"
    if began["round"] in digests:
        assert began["digest"] == digests[began["round"]]
    assert 0 < began["steps"] <= last["steps"]
    assert again[-1]["round"] == last["round"] + 2


def test_a_corrupted_newest_checkpoint_is_passed_over_and_the_digest_is_still_reached(run_until, tmp_path):
    first = run_until(tmp_path, "sparseloco", 11, 1000)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1] / "tensors.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(bytes(data))
    began = run_until(tmp_path, "sparseloco", 0, 1000)[0]
    digests = {said["round"]: said["digest"] for said in first}
    assert began["round"] >= first[-1]["round"]
    if began["round"] in digests:
        assert began["digest"] == digests[began["round"]]
    events = (tmp_path / "events.jsonl").read_text()
    assert "checkpoint_passed_over" in events
