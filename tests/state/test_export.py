import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decentral.errors import ConfigError, DiskError, UsageError
from decentral.state.checkpoint import FROZEN, keep_frozen, load_newest, save
from decentral.state.export import MODEL, PACKED, anchor_parameters, export, pack_file, unpack, unpack_file
from decentral.state.snapshot import BUFFERS, CHUNK_NBYTES, anchor_name
from decentral.training.live_model import LiveModel


def make_model(tie):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tie,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def store(directory, model, document, num_fragments=2, **meta):
    live = LiveModel(model, num_fragments, None)
    tensors = {anchor_name(f): flat for f, flat in enumerate(live.read_all())} | live.buffers.copies()
    tensors |= {BUFFERS: live.read_buffers()} if live.schema.buffers else {}
    if live.schema.frozen:
        directory.parent.mkdir(exist_ok=True)
        keep_frozen(directory.parent, live.schema.frozen, live.frozen_parts)
    save(directory, "round-1", tensors, {"parameters": live.schema.to_json(), "model": document, **meta})


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("frozen", ["", "embed_tokens", "layers."])
def test_an_exported_language_model_opens_with_transformers_and_says_the_same(tmp_path, tie, frozen):
    model = make_model(tie)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    config = json.loads(model.config.to_json_string())
    store(tmp_path / "checkpoints", model, {"task": "causal-lm", "config": config}, num_fragments=1)
    used = export(tmp_path / "checkpoints", tmp_path / "model")
    assert used.path.name == "00000000-round-1"
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, opened(tokens).logits)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != FROZEN) == ["checkpoints", "model"]


def test_texts_that_belong_to_a_language_model_are_written_beside_its_config(tmp_path):
    model = make_model(tie=True)
    config = json.loads(model.config.to_json_string())
    store(tmp_path / "c", model, {"task": "causal-lm", "config": config})
    export(tmp_path / "c", tmp_path / "to", lambda config: {"tokens.txt": str(config["vocab_size"])})
    assert (tmp_path / "to/tokens.txt").read_text() == "64"


def test_any_other_model_is_a_safetensors_file_with_its_names(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    store(tmp_path / "c", model, None, num_fragments=1)
    (tmp_path / "to").mkdir()  # an empty folder is fine
    export(tmp_path / "c", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["model.safetensors"]
    shapes = {name: tensor.shape for name, tensor in anchor_parameters(load_newest(tmp_path / "c")).items()}
    assert shapes == {name: tensor.shape for name, tensor in model.state_dict().items()}
    model.load_state_dict(load_file(tmp_path / "to" / "model.safetensors"))


def test_a_folder_in_use_is_never_written_into(tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="not an empty folder"):
        export(tmp_path / "c", tmp_path / "to")
    assert (tmp_path / "to" / "thesis.tex").read_text() == "precious"


def test_where_there_is_no_anchor_of_a_run_one_line_says_so(tmp_path):
    with pytest.raises(DiskError, match="no checkpoint in"):
        export(tmp_path / "c", tmp_path / "to")
    save(tmp_path / "c", "other", {"x": torch.zeros(2)}, {"round": 1})
    with pytest.raises(ConfigError, match="holds no anchor of a run"):
        export(tmp_path / "c", tmp_path / "to")
    assert not (tmp_path / "to").exists()


class Mixed(torch.nn.Module):
    """A frozen half-precision base, a trained head, batch norm, a table of large whole numbers."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.base = torch.nn.Linear(3, 4).to(torch.bfloat16).requires_grad_(False)
            self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self.register_buffer("table", torch.tensor([2**40 + 1, 2**53 - 1]))


def test_the_whole_model_is_exported_in_its_own_dtypes(tmp_path):
    model = Mixed()
    model.norm(torch.randn(8, 4))
    store(tmp_path / "c", model, None, num_fragments=1)
    export(tmp_path / "c", tmp_path / "to")
    found = load_file(tmp_path / "to" / "model.safetensors")
    assert set(found) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("policy", "mean"), [("average", 9.0), ("own", 5.0)])
def test_buffers_are_those_that_peers_share_unless_each_keeps_its_own(tmp_path, policy, mean):
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    model[1].running_mean.fill_(5.0)
    store(tmp_path / "c", model, None, num_fragments=1, buffers=policy)
    kept = load_newest(tmp_path / "c")
    kept.tensors[BUFFERS][0] = 9.0
    save(tmp_path / "c", "later", kept.tensors, kept.meta)
    export(tmp_path / "c", tmp_path / "to")
    assert load_file(tmp_path / "to" / "model.safetensors")["1.running_mean"].item() == mean


def test_a_frozen_file_of_another_base_or_a_damaged_or_missing_one_is_not_exported(tmp_path):
    store(tmp_path / "c", Mixed(), None, num_fragments=1)
    whole = (tmp_path / FROZEN).read_bytes()
    for data, words in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), r"base\.bias is not the one that the run's peers agreed on"),
        (whole[:100], "cannot be read"),
        (None, r"frozen.safetensors is missing.*2 frozen tensors.*base.weight.*copy it from"),
    ):
        (tmp_path / FROZEN).unlink() if data is None else (tmp_path / FROZEN).write_bytes(data)
        with pytest.raises(DiskError, match=words):
            export(tmp_path / "c", tmp_path / "to")
        assert not (tmp_path / "to").exists()


def test_what_is_frozen_is_written_once_and_again_for_another_base(tmp_path):
    one, other = LiveModel(Mixed(0), 1, None), LiveModel(Mixed(1), 1, None)
    keep_frozen(tmp_path, one.schema.frozen, one.frozen_parts)
    keep_frozen(tmp_path, one.schema.frozen, lambda: pytest.fail("it was there"))
    keep_frozen(tmp_path, other.schema.frozen, other.frozen_parts)
    found = load_file(tmp_path / FROZEN)
    assert torch.equal(found["base.weight"], other.frozen_parts()["base.weight"])
    assert [path.name for path in tmp_path.iterdir()] == [FROZEN]


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def exported(tmp_path, packed):
    model = torch.nn.Linear(300, 301)
    model.load_state_dict({"weight": noise(301, 300), "bias": noise(301)})
    if not (tmp_path / "c").exists():
        store(tmp_path / "c", model, {"task": "causal-lm", "config": {"a": 1}}, num_fragments=1)
    to = tmp_path / ("packed" if packed else "plain")
    export(tmp_path / "c", to, packed=packed)
    return to


def test_a_packed_model_takes_five_sixths_and_comes_back_byte_for_byte(tmp_path):
    packed, plain = exported(tmp_path, True), exported(tmp_path, False)
    assert sorted(path.name for path in packed.iterdir()) == ["config.json", PACKED]
    assert (packed / PACKED).stat().st_size < 0.84 * (plain / MODEL).stat().st_size
    unpack(packed, tmp_path / "again")
    for path in plain.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_a_damaged_packed_model_is_said_in_one_line_and_leaves_nothing(tmp_path):
    """Every way of damage is in tests/corpus."""
    packed = exported(tmp_path, True)
    data = (packed / PACKED).read_bytes()
    for damaged in (data[: len(data) // 2], data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]):
        (packed / PACKED).write_bytes(damaged)
        with pytest.raises(DiskError, match=r"model.safetensors.packed is damaged \(.*\); copy it again"):
            unpack(packed, tmp_path / "again")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "packed"]


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, CHUNK_NBYTES - 1, CHUNK_NBYTES, CHUNK_NBYTES + 1])
def test_a_file_of_any_size_comes_back(tmp_path, nbytes):
    (tmp_path / "plain").write_bytes(bytes(range(251)) * (nbytes // 251) + bytes(nbytes % 251))
    pack_file(tmp_path / "plain", tmp_path / "packed")
    unpack_file(tmp_path / "packed", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plain").read_bytes()
