import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decentral.errors import ConfigError, DiskError, UsageError
from decentral.parameters import gather, schema_of
from decentral.state.checkpoint import load_newest, save
from decentral.state.export import anchor_parameters, export
from decentral.state.snapshot import anchor_name


def make_model(tie):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def store(directory, model, document, num_fragments=2):
    schema = schema_of(model, num_fragments)
    parameters = dict(model.named_parameters())
    anchors = {anchor_name(f.index): gather(parameters, f) for f in schema.fragments}
    save(directory, "round-1", anchors, {"parameters": schema.to_json(), "model": document})


@pytest.mark.parametrize("tie", [True, False])
def test_an_exported_language_model_opens_with_transformers_and_says_the_same(tmp_path, tie):
    model = make_model(tie)
    config = json.loads(model.config.to_json_string())
    store(tmp_path / "checkpoints", model, {"task": "causal-lm", "config": config})
    used = export(tmp_path / "checkpoints", tmp_path / "model")
    assert used.path.name == "00000000-round-1"
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, opened(tokens).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_any_other_model_is_a_safetensors_file_with_its_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    store(tmp_path / "c", model, None, num_fragments=1)
    (tmp_path / "to").mkdir()  # an empty folder is fine
    export(tmp_path / "c", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]
    model.load_state_dict(load_file(tmp_path / "to" / "model.safetensors"))


def test_a_folder_in_use_is_never_written_into(tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="not an empty folder"):
        export(tmp_path / "c", tmp_path / "to")
    assert (tmp_path / "to" / "thesis.tex").read_text() == "precious"


def test_no_checkpoint_is_said_in_one_line(tmp_path):
    with pytest.raises(DiskError, match="no checkpoint in"):
        export(tmp_path / "c", tmp_path / "to")


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    save(tmp_path / "c", "other", {"x": torch.zeros(2)}, {"round": 1})
    with pytest.raises(ConfigError, match="holds no anchor of a run"):
        export(tmp_path / "c", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_the_anchor_has_the_models_shapes(tmp_path):
    model = torch.nn.Linear(3, 4)
    store(tmp_path / "c", model, None, num_fragments=1)
    found = anchor_parameters(load_newest(tmp_path / "c"))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {"weight": (4, 3), "bias": (4,)}
