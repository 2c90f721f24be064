"""`decentral generate` and `evaluate` of a run that trained adapters of peft, and of what is exported of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.cli.conftest import Run
from tests.kit.exports import kept, small_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft


@pytest.fixture
def adapted(run: Run, tmp_path: Path) -> Path:
    """A folder with the base model, the run of its adapters, and what is exported of that."""
    kept(tmp_path / "ours", small_model(), "causal-lm")
    run("export", "ours", "--to", "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    kept(tmp_path / "run", model, "custom")
    assert run("export", "run", "--to", "adapter").exit_code == 0
    return tmp_path


def test_a_run_of_adapters_goes_on_alike_with_its_export_and_otherwise_than_its_base(run: Run, adapted: Path) -> None:
    typed = ("--prompt", "def ", "--tokens", 30, "--temperature", 0, "--json")
    told = {name: run("generate", name, *typed, "--base", "base") for name in ("run", "adapter")}
    assert [one.exit_code for one in told.values()] == [0, 0], told
    texts = {name: json.loads(one.stdout)["text"] for name, one in told.items()}
    texts["base"] = json.loads(run("generate", "base", *typed).stdout)["text"]
    assert texts["run"] == texts["adapter"] != texts["base"]


def test_the_base_is_found_where_it_was_and_asked_for_where_it_is_not(run: Run, adapted: Path) -> None:
    (adapted / "text").write_text("the swarm agrees on one small update. " * 2000)
    assert run("evaluate", "run", "--data", "text").exit_code == 0, "it is named in the adapters"
    shutil.move(adapted / "base", adapted / "moved")
    for name in ("run", "adapter"):
        refused = run("evaluate", name, "--data", "text")
        assert refused.exit_code == 2
        assert "name its own with --base" in refused.stderr
        assert run("evaluate", name, "--data", "text", "--base", "moved").exit_code == 0


def test_a_base_that_does_not_fit_is_one_line(run: Run, adapted: Path) -> None:
    (adapted / "nothing").mkdir()
    refused = run("generate", "adapter", "--prompt", "a", "--base", "nothing")
    assert refused.exit_code == 2
    assert "is no base that these adapters fit" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
