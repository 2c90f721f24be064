"""What `decentral export` says of what it wrote, and that it is true; packed, and back."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from decentral.state.checkpoint import name_in_adapter_file
from decentral.state.export import export, unpack
from decentral.training.live_model import LiveModel, description_of
from tests.cli.conftest import Run
from tests.kit.exports import kept, small_model


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


class Layer(nn.Module):
    """A linear map with an adapter, named as peft names it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})


class Adapted(nn.Module):
    """What peft makes of a model, as far as an export looks at it."""

    __module__ = "peft.peft_model"
    active_adapter = "default"

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = Layer()
        kind = {"r": 2, "target_modules": {"q_proj"}, "inference_mode": False}
        self.peft_config = {"default": SimpleNamespace(to_dict=lambda: kind)}


def test_adapters_are_exported_alone_as_peft_opens_them(run: Run, tmp_path: Path) -> None:
    model = Adapted()
    kept(tmp_path / "run", model, "custom")
    result = run("export", "run", "--to", "adapter")
    assert 'PeftModel.from_pretrained(base, "adapter")' in result.stdout
    assert sorted(path.name for path in Path("adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    tensors = safetensors.torch.load_file("adapter/adapter_model.safetensors")
    assert sorted(tensors) == ["q_proj.lora_A.weight", "q_proj.lora_B.weight"]
    assert torch.equal(tensors["q_proj.lora_A.weight"], model.q_proj.lora_A["default"].weight)
    told = json.loads(Path("adapter/adapter_config.json").read_text())
    assert told == {"r": 2, "target_modules": ["q_proj"], "inference_mode": True}
    assert run("export", "run", "--to", "packed", "--packed").exit_code == 2


def test_adapters_beside_what_else_is_trained_are_left_to_the_script() -> None:
    model = Adapted()
    assert description_of(model, LiveModel(model, 1, None).trained) is not None
    model.more = nn.Linear(2, 2)
    assert description_of(model, LiveModel(model, 1, None).trained) is None


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("m.q_proj.lora_A.default.weight", "m.q_proj.lora_A.weight"),
        ("m.embed.lora_embedding_A.default", "m.embed.lora_embedding_A"),
        ("m.score.modules_to_save.default.weight", "m.score.weight"),
        ("m.q_proj.lora_A.defaults.weight", None),
        ("m.default.weight", None),
        ("m.norm.weight", None),
    ],
)
def test_names_in_a_model_become_those_of_pefts_files(name: str, saved: str | None) -> None:
    assert name_in_adapter_file(name, "default") == saved


# ---- packed and back ----


def test_a_packed_model_is_unpacked_by_the_same_command(run: Run, tmp_path: Path) -> None:
    kept(tmp_path / "run", nn.Linear(3, 4), "custom")
    assert run("export", "run", "--to", "plain").exit_code == 0
    told = run("export", "run", "--to", "packed", "--packed")
    assert "open it with decentral export packed --to FOLDER" in told.stdout
    unpacked = run("export", "packed", "--to", "model", "--json")
    assert json.loads(unpacked.stdout) == {"packed": "packed", "to": "model"}
    name = "model.safetensors"
    assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_an_export_tells_how_far_it_is_and_ends_at_the_whole(tmp_path: Path) -> None:
    kept(tmp_path / "run", nn.Sequential(*(nn.Linear(40, 50) for _ in range(6))), "custom")
    for to, given in (("plain", {}), ("packed", {"packed": True})):
        shares: list[float] = []
        export(tmp_path / "run" / "checkpoints", tmp_path / to, on_share=shares.append, **given)
        assert len(shares) > 5
        assert 0.99 < max(shares) == shares[-1] <= 1.0  # the file's header is read, and not told
    shares = []
    unpack(tmp_path / "packed", tmp_path / "model", shares.append)
    assert 0.8 < shares[-1] <= 1.0, "how small it was packed is a guess"
