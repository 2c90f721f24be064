"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.errors import DiskError
from decentral.peer.participation import WriteBehind
from decentral.state.checkpoint import load_newest
from decentral.state.durable import Disk
from tests.peer.test_absence import alone
from tests.peer.test_join import Problem, run_terms

LONG = 30.0  # s


class SlowDisk:
    """The tensors of a checkpoint are written when the gate is open; one that is full refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.is_full = threading.Event(), threading.Event(), False
        self.open.set()
        write = Disk.write

        def slowly(disk: Disk, path: Path, parts: Iterable[Any], at: int | None = None) -> None:
            if path.name == "tensors.safetensors":
                self.reached.set()
                assert self.open.wait(LONG)
                if self.is_full:
                    raise OSError(errno.ENOSPC, "no space left on device")
            write(disk, path, parts, at)

        monkeypatch.setattr(Disk, "write", slowly)

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    found = SlowDisk(monkeypatch)
    yield found
    found.open.set()


def test_a_slow_disk_does_not_hold_the_training_thread(tmp_path: Path, disk: SlowDisk) -> None:
    manifest, problem, events = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 2}), Problem(0), list[Any]()
    with alone(tmp_path, manifest, problem, checkpoint_every=1, observer=events.append) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 1)
        assert disk.reached.wait(LONG)
        train(peer, problem, rounds=peer.round + 4)
        live_N = problem.flat()
        assert peer.status().checkpoint_held_seconds is not None
        disk.open.set()
        train(peer, problem, rounds=peer.round + 4)
    told = [event for event in events if event["event"] == "checkpoint"]
    rounds = [event["round"] for event in told]
    assert rounds == sorted(rounds)
    assert {0, 1} < set(rounds)  # the first is waited for; while the disk stood still none was begun
    assert not {2, 3, 4} & set(rounds)
    assert all(event["bytes"] > live_N.nbytes and event["held"] >= 0.0 for event in told)
    kept = load_newest(tmp_path / "checkpoints")
    assert kept is not None
    assert torch.equal(kept.tensors["live/0"], problem.flat())  # the last one is waited for


def test_what_is_written_late_is_what_was_taken(tmp_path: Path, disk: SlowDisk) -> None:
    manifest, problem = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 2}), Problem(0)
    problem.optimizer = torch.optim.AdamW(problem.model.parameters(), lr=0.01)
    with alone(tmp_path, manifest, problem, checkpoint_every=1) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 1)
        assert disk.reached.wait(LONG)
        taken_N, steps = problem.flat(), peer.inner_steps
        moments = [problem.optimizer.state[one]["exp_avg"].clone() for one in problem.model.parameters()]
        train(peer, problem, rounds=peer.round + 3)
        disk.open.set()
        peer._part.behind.wait()
        kept = load_newest(tmp_path / "checkpoints")
    assert kept is not None
    assert kept.meta["inner_steps"] == steps
    assert torch.equal(kept.tensors["live/0"], taken_N)
    stored = [tensor for name, tensor in kept.tensors.items() if name.startswith("training/")]
    assert all(any(torch.equal(moment, tensor) for tensor in stored) for moment in moments)


def test_a_crash_in_the_middle_of_a_write_leaves_the_checkpoint_before_and_the_journal(
    tmp_path: Path, disk: SlowDisk
) -> None:
    manifest, problem = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 2}), Problem(0)
    with alone(tmp_path / "a", manifest, problem, checkpoint_every=1) as peer:
        disk.shut()
        train(peer, problem, rounds=peer.round + 3)
        assert disk.reached.wait(LONG)
        shutil.copytree(tmp_path / "a", tmp_path / "crashed")  # what a kill in this moment leaves
        anchor, steps = peer.anchor_digest, peer.inner_steps
        disk.open.set()
    before = load_newest(tmp_path / "crashed" / "checkpoints")
    assert before is not None
    assert before.meta["inner_steps"] < steps
    with alone(tmp_path / "crashed", manifest, Problem(0)) as again:
        assert again.anchor_digest == anchor


def test_a_disk_that_refuses_a_checkpoint_ends_the_loop_at_the_next_step(tmp_path: Path, disk: SlowDisk) -> None:
    manifest, problem = run_terms("diloco", run={"rounds": 1000}, inner={"steps": 2}), Problem(0)
    peer = alone(tmp_path, manifest, problem, checkpoint_every=1)

    def trains() -> None:
        with peer:
            disk.is_full = True
            train(peer, problem, rounds=1000)

    with pytest.raises(DiskError, match="no space left on device"):
        trains()
    assert peer.round < 10


def test_an_error_of_a_write_is_raised_once_and_the_next_one_goes_on() -> None:
    written, behind = list[int](), WriteBehind()
    behind.begin(lambda: written.append(1 // 0))
    with pytest.raises(ZeroDivisionError):
        behind.wait()
    behind.wait()
    behind.begin(lambda: written.append(1))
    behind.wait()
    assert written == [1]
    assert not behind.busy


def train(peer: Any, problem: Problem, rounds: int) -> None:
    while peer.round < rounds:
        problem.step()
