"""The inner optimizer that a manifest names: its parameters, its keys, and what a loop's own is compared with."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, parse_manifest, preset_manifest, summary
from decentral.manifest.table import canonical
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner, InnerName
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.training.inner import build_inner, differences, inner_step
from decentral.training.inner_optimizers import GPA, QHADOPT

NAMES = get_args(InnerName)
every_name = pytest.mark.parametrize("name", NAMES)


def model() -> nn.Module:
    config = LanguageModelConfig(hidden=16, layers=2, heads=2, context=8)
    bare: nn.Module = build_language_model(config, seed=0)
    return bare


def manifest(**inner: Any) -> Manifest:
    return preset_manifest("diloco", run={"salt": "test"}, inner=inner)


def loss_of(bare: nn.Module) -> torch.Tensor:
    tokens = torch.arange(16).reshape(2, 8)
    loss: torch.Tensor = bare(input_ids=tokens, labels=tokens).loss
    return loss


def step(inner: Inner, bare: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    inner_step(inner, optimizers, lambda: loss_of(bare))
    bare.zero_grad()


@every_name
def test_each_has_every_parameter_once_keeps_the_moments_it_says_and_learns(name: InnerName):
    by_losses = INNER_OPTIMIZERS[name].forward_only
    inner, bare = Inner(optimizer=name, learning_rate=2e-3 if by_losses else 1e-2, weight_decay=0.0), model()
    optimizers = build_inner(inner, bare)
    if by_losses:  # else of the operating system, and one in a dozen goes nowhere
        optimizers[0].param_groups[0]["seed"] = 7
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in bare.parameters())
    first = float(loss_of(bare).detach())
    for _ in range(60 if by_losses else 20):
        step(inner, bare, optimizers)
    assert float(loss_of(bare).detach()) < first - 0.05
    states = [
        optimizer.state[p] for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    of_all = {moment for moment in ("exp_avg", "exp_avg_sq") if all(moment in state for state in states)}
    assert of_all == set(INNER_OPTIMIZERS[name].moments)


def test_muon_has_the_matrices_inside_and_adamw_embeddings_head_and_vectors():
    bare = model()
    muon, adamw = build_inner(Inner(optimizer="muon", momentum=0.8, beta2=0.9), bare)
    names = {id(parameter): name for name, parameter in bare.named_parameters()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    by_adamw = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert all(name.startswith("model.layers.") and name.endswith("proj.weight") for name in by_muon)
    assert len(by_muon) == 2 * 7
    assert "model.embed_tokens.weight" in by_adamw  # and the head, which is the same tensor
    assert all("norm" in name for name in by_adamw - {"model.embed_tokens.weight"})
    assert (muon.param_groups[0]["momentum"], muon.param_groups[0]["nesterov"]) == (0.8, False)
    assert adamw.param_groups[0]["betas"] == (0.9, 0.9)


def test_a_head_that_is_not_tied_is_no_matrix_of_muon():
    bare: Any = build_language_model(LanguageModelConfig(hidden=16, layers=1, heads=2, tie_embeddings=False), seed=0)
    muon, adamw = build_inner(Inner(optimizer="muon"), bare)
    assert id(bare.lm_head.weight) in {id(p) for p in adamw.param_groups[0]["params"]}
    assert len(muon.param_groups[0]["params"]) == 7


def test_unset_it_is_adamw_as_before_and_the_digest_is_as_before():
    plain = manifest()
    assert all(f'"{key}"'.encode() not in canonical(plain) for key in ("optimizer", "beta1", "mixing", "averaging"))
    assert plain.digest != manifest(optimizer="muon").digest
    (adamw,) = build_inner(plain.inner, model())
    assert type(adamw) is torch.optim.AdamW
    assert (adamw.defaults["lr"], adamw.defaults["betas"], adamw.defaults["weight_decay"]) == (1e-3, (0.9, 0.95), 0.1)


@every_name
def test_a_named_one_with_all_its_keys_is_written_read_back_and_told(name: InnerName):
    without: dict[str, Any] = {"weight_decay": 0.0, "clip": None} if INNER_OPTIMIZERS[name].forward_only else {}
    given = manifest(optimizer=name, **INNER_OPTIMIZERS[name].keys, **without)
    assert parse_manifest(given.to_toml()).digest == given.digest
    assert f"30 steps of {INNER_OPTIMIZERS[name].title} at" in summary(given)


def test_a_key_of_another_optimizer_or_a_value_that_cannot_be_is_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"inner: momentum is a key of muon, sgd, and adamw has beta1, beta2; leave it"
    ):
        manifest(momentum=0.9)
    with pytest.raises(ConfigError, match=r"averaging is a key of gpa, and schedule_free has beta2, mixing"):
        manifest(optimizer="schedule_free", averaging=0.9)
    with pytest.raises(ConfigError, match=r"inner\.optimizer = 'lion'.*adamw.*muon"):
        manifest(optimizer="lion")
    with pytest.raises(ConfigError, match=r"inner\.beta1 = 1\.0.*less than 1"):
        manifest(beta1=1.0)
    with pytest.raises(ConfigError, match=r"inner\.mixing = 0\.0.*greater than 0"):
        manifest(optimizer="gpa", mixing=0.0)


def test_moments_that_the_inner_optimizer_does_not_keep_cannot_be_averaged():
    for name in ("muon", "sgd", "schedule_free"):
        with pytest.raises(ConfigError, match=rf'inner\.optimizer = "{name}" does not fit .*"adamw" or "adopt"'):
            check_methods(preset_manifest("des_loc", inner={"optimizer": name}))
    for name in ("adamw", "adopt", "gpa", "qh_adopt"):
        check_methods(preset_manifest("mt_dao", inner={"optimizer": name}))
    check_methods(preset_manifest("des_loc", inner={"optimizer": "sgd"}, model={"task": "custom"}))


def test_a_loop_with_another_optimizer_or_other_keys_than_the_manifests_differs():
    held = [nn.Parameter(torch.ones(2, 2))]
    inner = Inner(optimizer="qh_adopt", beta1=0.99, mixing=0.7)
    like = {"lr": 1e-3, "weight_decay": 0.1}
    assert differences(inner, [QHADOPT(held, **like)]) == []
    assert differences(inner, [QHADOPT(held, betas=(0.9, 0.9999), mixing=0.5, **like)]) == [
        ("beta1", "0.99", "0.9"),
        ("mixing", "0.7", "0.5"),
    ]
    assert differences(inner, [GPA(held, **like)]) == [("optimizer", "QH-ADOPT", "GPA")]
    assert differences(Inner(optimizer="adopt"), [QHADOPT(held, **like)]) == [("optimizer", "ADOPT", "QHADOPT")]
    pair = [torch.optim.Muon(held, **like), torch.optim.AdamW([nn.Parameter(torch.ones(2))], **like)]
    assert differences(Inner(optimizer="muon", momentum=0.95), pair) == []
    assert differences(Inner(), [type("AdamWScheduleFree", (GPA,), {})(held, **like)])[0][0] == "optimizer"
    assert differences(Inner(), [type("AdamW8bit", (torch.optim.AdamW,), {})(held, **like)]) == []
