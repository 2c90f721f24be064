"""What `decentral export` says of what it wrote, and that it is true."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from click.testing import Result
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from decentral.manifest import preset_manifest
from decentral.state.checkpoint import save
from decentral.state.snapshot import anchor_name
from decentral.tasks.language_model import LanguageModelConfig, build_language_model
from decentral.training.live_model import LiveModel

Run = Callable[..., Result]


def kept(folder: Path, model: nn.Module, task: str) -> None:
    """A run directory with one checkpoint of ``model``."""
    live = LiveModel(model, 1, None)
    tensors = {anchor_name(f): flat for f, flat in enumerate(live.read_all())} | live.kept_buffers()
    folder.mkdir()
    (folder / "run.toml").write_text(preset_manifest("sparseloco", model={"task": task}).to_toml())
    meta = {"parameters": live.schema.to_json(), "model": live.description(), "buffers": "own"}
    save(folder / "checkpoints", "round-1", tensors, meta)


def small_model(experts: int | None = None) -> nn.Module:
    config = LanguageModelConfig(hidden=16, layers=1, heads=2, context=32, experts=experts)
    model: nn.Module = build_language_model(config, seed=0)
    return model


@pytest.mark.parametrize("experts", [None, 4])
def test_our_language_model_comes_with_a_tokenizer_and_generates(run: Run, tmp_path: Path, experts: int | None) -> None:
    kept(tmp_path / "run", small_model(experts), "causal-lm")
    result = run("export", "run", "--to", "model")
    assert result.exit_code == 0, result.stderr
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        assert f'{name}.from_pretrained("model")' in result.stdout
    tokenizer = AutoTokenizer.from_pretrained("model", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained("model", local_files_only=True)
    given = tokenizer("abc", return_tensors="pt")
    assert given.input_ids.tolist() == [list(b"abc")]
    with torch.no_grad():
        assert model.generate(**given, max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_a_model_of_ones_own_is_opened_as_the_script_builds_it(run: Run, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    kept(tmp_path / "run", model, "custom")
    said = run("export", "run", "--to", "model").stdout
    assert "Auto" not in said
    assert 'model.load_state_dict(safetensors.torch.load_file("model/model.safetensors"))' in said
    model.load_state_dict(safetensors.torch.load_file("model/model.safetensors"))


def test_a_transformers_model_of_a_script_keeps_its_own_tokenizer(run: Run, tmp_path: Path) -> None:
    kept(tmp_path / "run", small_model(), "custom")  # 256 tokens, that may be anything
    said = run("export", "run", "--to", "model").stdout
    assert 'open it with transformers: AutoModelForCausalLM.from_pretrained("model")\n' in said
    assert not (tmp_path / "model/tokenizer.json").exists()


def test_another_kind_of_transformers_model_is_opened_by_its_own_class(run: Run, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=256
    )
    kept(tmp_path / "run", BertForSequenceClassification(config), "custom")
    assert 'BertForSequenceClassification.from_pretrained("model")' in run("export", "run", "--to", "model").stdout
    BertForSequenceClassification.from_pretrained("model", local_files_only=True)
