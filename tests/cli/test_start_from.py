"""`decentral start --from`: a run that begins from what another one made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decentral.cli.training_context import set_up
from decentral.errors import ConfigError
from decentral.tasks.language_model import build_language_model, put_in
from decentral.tasks.sizing import LanguageModelConfig
from decentral.tasks.trained_model import open_trained
from tests.cli.conftest import Run, small
from tests.kit.exports import kept


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """What a run of ``small()`` exported, other weights than its seed gives."""
    config = LanguageModelConfig(hidden=16, layers=1, heads=2, context=16)
    kept(tmp_path / "before", build_language_model(config, seed=77), "causal-lm")
    assert run("export", "before", "--to", "model").exit_code == 0
    return tmp_path / "model"


def test_a_run_begins_from_the_folders_weights(tmp_path: Path, text: Path, folder: Path) -> None:
    context = set_up(small(), tmp_path / "out", text, folder)
    there = dict(open_trained(folder).module.named_parameters())
    assert all(torch.equal(value, there[name]) for name, value in context.model.named_parameters())
    context.metrics.close()


def test_a_run_that_goes_on_needs_the_folder_no_more(tmp_path: Path, text: Path, folder: Path) -> None:
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    (folder / "model.safetensors").unlink()
    set_up(small(), tmp_path / "out", text, folder).metrics.close()


def test_another_model_is_refused_with_what_would_fit_and_nothing_is_made(run: Run, text: Path, folder: Path) -> None:
    Path("run.toml").write_text(small(model={"hidden": 32, "layers": 1, "heads": 2, "context": 16}).to_toml())
    result = run("start", "run.toml", "--from", folder, "--data", text, "--solo")
    assert result.exit_code == ConfigError.exit_code
    (said,) = result.stderr.splitlines()
    assert "is (256, 16), and (256, 32) in this model" in said
    assert "[model] hidden = 16, layers = 1, heads = 2, context = 16" in said
    assert not Path("decentral-run").exists()


def test_a_folder_without_a_model_is_refused(run: Run, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    Path("run.toml").write_text(small().to_toml())
    result = run("start", "run.toml", "--from", "empty", "--data", text, "--solo")
    assert result.exit_code == 2
    assert "no model.safetensors there" in result.stderr


def test_tensors_that_do_not_fit_leave_a_model_as_it_was() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    for tensors, why in (
        ({"weight": torch.ones(2, 2)}, "bias .* is missing"),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, "weight is"),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(2), "more": torch.ones(1)}, "more .* is no tensor"),
    ):
        with pytest.raises(ConfigError, match=why):
            put_in(model, tensors)
    assert torch.equal(model.weight, before)
