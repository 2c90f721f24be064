"""The built-in language model, with experts and without: its bits, its balance, and what is exported of it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from decentral.errors import ConfigError
from decentral.manifest import parse_manifest, preset_manifest
from decentral.manifest.files import summary
from decentral.optimizers.owners import experts_of
from decentral.parameters import schema_of
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import BALANCE_WEIGHT, DEMO_MODEL, LanguageModelConfig, built_in, folder_config

SMALL = LanguageModelConfig(hidden=16, layers=2, heads=2, context=32)
EXPERTS = 8
MIXTURE = LanguageModelConfig(hidden=16, layers=2, heads=2, context=32, experts=EXPERTS)
WIDE = {"hidden": 48, "layers": 2, "heads": 2, "context": 32}


def built(config: LanguageModelConfig = MIXTURE) -> Any:
    return build_language_model(config, seed=0)


def text(rows: int = 4) -> Tensor:
    return torch.randint(0, 256, (rows, 32), generator=torch.Generator().manual_seed(1))


def likelihoods(model: Any, batch: Tensor) -> list[Tensor]:
    """Of each block the router's, (bytes, experts) in float64."""
    return [one.double().softmax(-1) for one in model(input_ids=batch).router_logits]


def balance(likely: list[Tensor], k: int) -> float:
    """Switch's equations 4 to 6, by counting."""
    likely_BE = torch.cat(likely)
    counts_E = [0.0] * EXPERTS
    for row in likely_BE.tolist():
        for expert in sorted(range(EXPERTS), key=lambda e: -row[e])[:k]:
            counts_E[expert] += 1 / len(likely_BE)
    return EXPERTS * sum(f * p for f, p in zip(counts_E, likely_BE.mean(0).tolist(), strict=True))


def learning_loss(model: Any, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch).logits[:, :-1]
    return cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))


def bits(model):
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def same(left, right):
    return all(n == m and torch.equal(a, b) for (n, a), (m, b) in zip(left, right, strict=True))


def test_the_same_seed_gives_the_same_bits_whatever_was_drawn_before_and_draws_nothing_itself():
    one = build_language_model(SMALL, seed=7)
    torch.rand(3)
    before = torch.get_rng_state()
    assert same(bits(one), bits(build_language_model(SMALL, seed=7)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(bits(one), bits(build_language_model(SMALL, seed=8)))


@pytest.mark.parametrize("config", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_a_fresh_model_knows_nothing_and_learns_a_repeated_byte(config: LanguageModelConfig):
    model, batch, losses = built(config), torch.full((2, 32), 65), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        losses.append(float(learning_loss(model, batch).detach()))
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
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


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"hidden": 0}, "hidden = 0"),
        ({"layers": -1}, "layers = -1"),
        ({"hidden": 18, "heads": 4}, "multiple of 2 .* = 8"),
        ({"experts": 1}, "model.experts = 1: each byte goes to 2"),
        ({"experts": 4, "experts_per_token": 5}, "each byte goes to 5"),
        ({"experts_per_token": 0}, "experts_per_token = 0: must be at least 1"),
    ],
)
def test_sizes_that_cannot_work_are_one_line(wrong: dict[str, int], match: str):
    with pytest.raises(ConfigError, match=match):
        LanguageModelConfig(**{"hidden": 16, "heads": 2, **wrong})


# ---- the mixture: where bytes go, what the balance costs, and where methods find experts ----


def test_the_same_bytes_go_the_same_way_whatever_was_drawn_before():
    model, batch = built().train(), text()
    before = model(input_ids=batch, labels=batch)
    torch.rand(3)
    after = model(input_ids=batch, labels=batch)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(before.logits, after.logits)
    assert all(torch.equal(one, other) for one, other in zip(before.router_logits, after.router_logits, strict=True))
    assert len({tuple(row) for one in before.router_logits for row in one.topk(2).indices.sort().values.tolist()}) > 5


def test_no_byte_is_dropped_because_others_go_its_way():
    model, batch = built(), text()
    crowded = torch.cat([batch[:1]] * 16)
    torch.testing.assert_close(model(input_ids=crowded).logits[-1:], model(input_ids=batch[:1]).logits)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_training_loss_holds_a_hundredth_of_the_balance_by_switchs_equations(k: int):
    config = LanguageModelConfig(hidden=16, layers=2, heads=2, context=32, experts=EXPERTS, experts_per_token=k)
    model, batch = built(config), text()
    loss = model(input_ids=batch, labels=batch).loss
    wanted = float(learning_loss(model, batch).detach()) + 0.01 * balance(likelihoods(model, batch), k)
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-5)
    assert BALANCE_WEIGHT == 0.01


def test_the_balance_spreads_the_load_of_a_router_that_begins_with_favourites():
    model, batch = built(), text(16)
    for block in model.model.layers:
        block.mlp.gate.weight.data[:2] *= 10

    def uneven() -> float:
        used = torch.bincount(
            torch.cat([one.topk(2).indices.flatten() for one in model(input_ids=batch).router_logits])
        )
        return float(used.max() / used.sum())

    before, routers = uneven(), [block.mlp.gate.weight for block in model.model.layers]
    optimizer = torch.optim.Adam(routers, lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).aux_loss.backward()
        optimizer.step()
    assert before > 0.2
    assert uneven() < before - 0.05


@pytest.mark.parametrize("k", [1, 2])
def test_the_router_learns_from_the_text_too(k: int):
    model = built(LanguageModelConfig(hidden=16, layers=2, heads=2, experts=EXPERTS, experts_per_token=k))
    learning_loss(model, text()).backward()
    assert all(float(block.mlp.gate.weight.grad.norm()) > 1e-6 for block in model.model.layers)


def test_the_experts_of_every_block_are_found_by_their_names_and_nothing_else_is_one():
    model = built()
    layout = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers = experts_of(layout)
    assert list(layers) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    sizes = {sum(b - a for a, b in spans) for experts in layers.values() for spans in experts.values()}
    assert sizes == {3 * 16 * 32}
    assert all(sorted(experts) == list(range(EXPERTS)) for experts in layers.values())
    of_experts = sum(math.prod(shape) for name, shape in layout.items() if ".experts." in name)
    assert of_experts == 2 * EXPERTS * 3 * 16 * 32


def test_an_expert_is_as_much_narrower_as_more_of_them_see_a_byte():
    widths = {
        k: built(LanguageModelConfig(**WIDE, experts=4, experts_per_token=k)).config.intermediate_size
        for k in (1, 2, 4)
    }
    assert widths == {1: 128, 2: 64, 4: 32}


def test_matrices_are_drawn_alike_and_those_into_the_residual_smaller():
    model = built(LanguageModelConfig(**WIDE, experts=4))
    block = model.model.layers[0]
    assert float(block.mlp.experts.gate_up_proj.detach().std()) == pytest.approx(0.05, rel=0.05)
    assert float(block.mlp.gate.weight.detach().std()) == pytest.approx(0.05, rel=0.2)
    assert float(block.mlp.experts.down_proj.detach().std()) == pytest.approx(0.025, rel=0.05)
    assert bool((block.self_attn.q_norm.weight == 1).all())


# ---- the model of transformers that it is ----

KINDS = {
    "dense": SMALL,
    "with a head of its own": LanguageModelConfig(**WIDE, tie_embeddings=False),
    **{
        f"{k} of {EXPERTS} experts": LanguageModelConfig(**WIDE, experts=EXPERTS, experts_per_token=k)
        for k in (1, 2, 3)
    },
}


def theirs(config: LanguageModelConfig) -> Any:
    """The model that transformers builds by our config.json, with the weights of ours."""
    transformers = pytest.importorskip("transformers")
    document = folder_config(config)
    (kind,) = document["architectures"]
    described = transformers.AutoConfig.for_model(document.pop("model_type"), **document)
    model = getattr(transformers, kind)._from_config(described, attn_implementation="sdpa")
    model.load_state_dict(built(config).state_dict())
    return model


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_names_outputs_and_gradients_are_those_of_transformers(config: LanguageModelConfig) -> None:
    models, batch = (built(config), theirs(config)), text()
    named, their_named = (dict(model.named_parameters()) for model in models)
    assert [*named] == [*their_named]
    ours, other = (model(input_ids=batch, labels=batch) for model in models)
    near = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours.logits, other.logits, **near)
    torch.testing.assert_close(ours.loss, other.loss, **near)
    ours.loss.backward()
    other.loss.backward()
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.grad, their_named[name].grad, **near)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_config_json_is_what_transformers_writes_and_says_which_model_is_ours(config: LanguageModelConfig) -> None:
    written = json.loads(theirs(config).config.to_json_string())
    assert written.pop("dtype", None) in (None, "float32")
    assert written["transformers_version"]
    assert built_in(written) == config
    for key, other in {"rope_parameters": {}, "hidden_size": 16.0, "vocab_size": 257, "dtype": "bfloat16"}.items():
        assert built_in(written | {key: other}) is None
    assert built_in({}) is None


@pytest.mark.parametrize("terms", [{"experts_per_token": 2}, {"experts": 2, "experts_per_token": 3}, {"experts": 1}])
def test_terms_of_a_mixture_that_cannot_be_are_refused(terms: dict[str, int]):
    with pytest.raises(ConfigError, match="experts"):
        preset_manifest("diloco", model=terms)


def test_terms_name_the_mixture_and_those_without_one_are_the_same_run_as_ever():
    mixture = preset_manifest("diloco", model={"experts": 6}, run={"salt": "a"})
    assert parse_manifest(mixture.to_toml()).digest == mixture.digest
    assert "4 heads, 2 of 6 experts, context 128" in summary(mixture)
    assert LanguageModelConfig.of(mixture.model) == LanguageModelConfig(layers=3, experts=6)
    assert "experts" not in summary(preset_manifest("diloco"))


def test_the_preset_of_spes_is_a_mixture():
    assert preset_manifest("spes").model.experts == 8
