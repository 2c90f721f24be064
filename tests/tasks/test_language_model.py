import json

import pytest
import torch
from transformers import LlamaConfig

from decentral.errors import ConfigError
from decentral.parameters import schema_of
from decentral.tasks.language_model import build_language_model, config_document
from decentral.tasks.sizing import DEMO_MODEL, LanguageModelConfig

SMALL = LanguageModelConfig(hidden=16, layers=2, heads=2, context=32)


def bits(model):
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def same(left, right):
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in zip(left, right, strict=True))


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before():
    one = build_language_model(SMALL, seed=7)
    torch.rand(3)
    assert same(bits(one), bits(build_language_model(SMALL, seed=7)))
    assert not same(bits(one), bits(build_language_model(SMALL, seed=8)))


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build_language_model(SMALL, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fresh_model_knows_nothing_and_learns_a_repeated_byte():
    model = build_language_model(SMALL, seed=0)
    batch = torch.full((2, 32), 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert 4 < losses[0] < 6  # ln 256 is 5.5; a tied embedding already favours the byte it sees
    assert losses[-1] < 1


def test_the_demo_model_has_half_a_million_to_one_and_a_half_million_parameters():
    model = build_language_model(LanguageModelConfig(**DEMO_MODEL), seed=0)
    assert 500_000 <= sum(p.numel() for p in model.parameters()) <= 1_500_000


def test_the_blocks_of_the_model_stride_over_fragments():
    schema = schema_of(build_language_model(SMALL, seed=0), 3)
    layers = [{p.name.split(".")[2] for p in f.parameters if ".layers." in p.name} for f in schema.fragments]
    assert layers == [{"0"}, {"1"}, set()]
    assert any("embed_tokens" in p.name for p in schema.fragments[-1].parameters)


def test_the_config_document_is_json_that_transformers_takes_back():
    document = config_document(SMALL)
    config = LlamaConfig(**json.loads(json.dumps(document)))
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (16, 2, 256)
    assert document["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"hidden": 0}, "hidden = 0"),
        ({"layers": -1}, "layers = -1"),
        ({"hidden": 18, "heads": 4}, "multiple of 2 .* = 8"),
    ],
)
def test_sizes_that_cannot_work_are_one_line(wrong, match):
    with pytest.raises(ConfigError, match=match):
        LanguageModelConfig(**{"hidden": 16, "heads": 2, **wrong})
