"""What trackers of accelerate are told, read back from TensorBoard's own files."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from tests.kit.problems import Problem, alone, run_terms


@pytest.mark.parametrize("preset", ["diloco", pytest.param("noloco", marks=pytest.mark.long)])
def test_tensorboard_has_round_bytes_and_figures_after_every_round(tmp_path, preset):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator, problem = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path), Problem(0)
    problem.model, problem.optimizer = accelerator.prepare(problem.model, problem.optimizer)
    with alone(tmp_path / "run", run_terms(preset, run={"rounds": 3}), problem, accelerator=accelerator) as peer:
        accelerator.init_trackers("swarm")
        while not peer.done:
            accelerator.log({"loss": problem.step()}, step=peer.inner_steps)
        bytes_sent = peer.status().bytes_sent
    accelerator.end_training()
    found = EventAccumulator(str(tmp_path / "swarm")).Reload()
    assert [(one.step, one.value) for one in found.Scalars("swarm/round")] == [(6, 1), (12, 2), (18, 3)]
    assert found.Scalars("swarm/bytes_sent")[-1].value == bytes_sent
    assert [one.step for one in found.Scalars("loss")] == list(range(1, 19))
    if preset == "diloco":
        assert found.Scalars("swarm/never_sent")[-1].value < 0.5


def test_an_accelerator_without_trackers_is_told_nothing(tmp_path):
    accelerator, problem = Accelerator(cpu=True), Problem(0)
    with alone(tmp_path, run_terms("diloco", run={"rounds": 1}), problem, accelerator=accelerator) as peer:
        while not peer.done:
            problem.step()
    assert torch.isfinite(problem.flat()).all()
