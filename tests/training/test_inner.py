"""What a round reads and moves of an optimizer that trains at y and learns x: x, with z and y going along."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.manifest import Manifest, check_methods, parse_manifest, preset_manifest, summary
from decentral.manifest.table import canonical
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner, InnerName
from decentral.state.checkpoint import flatten, unflatten
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.training.copies import Averages
from decentral.training.inner import InnerSteps, WarmUp, build_inner, differences, inner_step, warm_up
from decentral.training.inner_optimizers import GPA, QHADOPT, ScheduleFree
from decentral.training.live_model import LiveModel

BOTH = pytest.mark.parametrize("make", [GPA, ScheduleFree])


class Trained:
    """A model with an optimizer some steps into it."""

    def __init__(self, make: type, steps: int = 5) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(7, 5)
        self.optimizer = make(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.live = LiveModel(self.model, 1, None, [self.optimizer])
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def z(self) -> Tensor:
        return torch.cat([self.optimizer.state[parameter]["z"].flatten() for parameter in self.model.parameters()])

    def x(self) -> Tensor:
        share = self.optimizer.param_groups[0]["mixing"]
        return (self.held().double() - (1 - share) * self.z().double()).div(share).float()


@BOTH
def test_what_is_read_is_the_average_and_training_goes_on_where_it_was(make: type):
    one = Trained(make)
    y, x, z = one.held(), one.x(), one.z()
    read = one.live.read(0)
    torch.testing.assert_close(read, x, rtol=1e-6, atol=1e-6)
    assert float((read - y).norm()) > 1e-3, "else nothing is shown"
    one.live.averages.resume()
    torch.testing.assert_close(one.held(), y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.z(), z, rtol=1e-6, atol=1e-6)
    one.step()


@BOTH
def test_what_a_commit_moves_moves_all_three_sequences_by_as_much(make: type):
    one = Trained(make)
    y, x, z = one.held(), one.x(), one.z()
    move = torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    one.live.write(0, one.live.read(0) + move)
    one.live.averages.resume()
    for before, after in ((y, one.held()), (x, one.x()), (z, one.z())):
        torch.testing.assert_close(after, before + move, rtol=1e-5, atol=1e-5)


@BOTH
def test_after_the_last_commit_the_parameters_are_what_was_written(make: type):
    one = Trained(make)
    anchor = torch.randn(40, generator=torch.Generator().manual_seed(1))
    one.live.write(0, anchor)
    one.live.averages.resume(to_train=False)
    assert torch.equal(one.held(), anchor)
    assert not one.live.averages.shown
    one.optimizer.train()
    one.step()


@BOTH
def test_a_checkpoint_taken_while_the_average_is_shown_goes_on_bit_for_bit(make: type):
    one, other = Trained(make), Trained(make, steps=0)
    kept = one.live.read(0)
    tensors, document = flatten(one.optimizer.state_dict(), "training")
    other.live.write(0, kept)
    other.optimizer.load_state_dict(unflatten(document, tensors))
    for each in (one, other):
        each.live.averages.resume()
        each.step()
    assert torch.equal(one.held(), other.held())
    assert torch.equal(one.z(), other.z())


@BOTH
def test_a_loop_that_evaluates_at_the_average_finds_it_there_after_a_boundary(make: type):
    one = Trained(make)
    one.optimizer.eval()
    x = one.held()
    assert torch.equal(one.live.read(0), x)
    one.live.averages.resume()
    assert torch.equal(one.held(), x)


def test_before_the_first_step_and_with_other_optimizers_nothing_is_swapped():
    one = Trained(GPA, steps=0)
    before = one.held()
    assert torch.equal(one.live.read(0), before)
    one.live.averages.resume()
    assert torch.equal(one.held(), before)
    averages = Averages([torch.optim.AdamW(one.model.parameters())])
    averages.show()
    averages.resume()
    assert torch.equal(one.held(), before)


# ---- test building ----
#
# The inner optimizer that a manifest names: its parameters, its keys, and what a loop's own is compared with.

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


# ---- test stepping ----
#
# One inner step as all loops make it: by gradients or by losses alone, and what is called in it, in what order.

INPUTS = torch.linspace(-1, 1, 18).view(3, 6)
BY_LOSSES = Inner(optimizer="spsa", learning_rate=1e-3, weight_decay=0.0)
BY_GRADIENTS = Inner(optimizer="sgd", learning_rate=0.1, weight_decay=0.0)


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 4)


@pytest.mark.parametrize(
    ("inner", "order"),
    [
        (BY_GRADIENTS, ["loss", "backward", "begins", "step"]),
        (BY_LOSSES, ["begins", "loss", "loss", "step"]),
    ],
    ids=["by gradients", "by losses"],
)
def test_a_step_begins_once_what_it_goes_by_is_there_and_only_gradients_need_a_backward_pass(
    inner: Inner, order: list[str]
):
    model, seen = linear(), list[str]()
    optimizers = build_inner(inner, model)
    optimizers[0].register_step_post_hook(lambda *_: seen.append("step"))
    before = model.weight.detach().clone()

    def loss() -> Tensor:
        seen.append("loss")
        return model(INPUTS).square().mean()  # type: ignore[no-any-return]

    def backward(value: Tensor) -> None:
        seen.append("backward")
        value.backward()  # type: ignore[no-untyped-call]  # torch's

    told = inner_step(inner, optimizers, loss, backward=backward, begins=lambda: seen.append("begins"))
    assert seen == order
    assert not torch.equal(model.weight, before)
    with torch.no_grad():
        assert abs(float(told) - float(nn.functional.linear(INPUTS, before, model.bias).square().mean())) < 0.1


def test_every_optimizer_of_several_steps():
    model = linear()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    inner_step(BY_GRADIENTS, optimizers, lambda: model(INPUTS).square().mean())
    assert not any(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_gradient_scaler_skips_is_none(fused: bool):
    model = linear()
    adamw, scaler = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), torch.amp.GradScaler("cpu")
    made: list[str] = []
    steps = InnerSteps([adamw], lambda: made.append("step"), lambda: made.append("begin"))
    with steps.hook(dict(model.named_parameters())):
        for factor in (1.0, float("inf"), 1.0):
            adamw.zero_grad()
            scaler.scale(factor * model(INPUTS).square().mean()).backward()
            scaler.unscale_(adamw)
            scaler.step(adamw)
            scaler.update()
    assert made == ["begin", "step"] * 2


def optimizer(lr=2.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_the_rate_rises_linearly_and_then_stays():
    inner = optimizer()
    schedule = warm_up(inner, 4)
    rates = []
    for _ in range(7):
        rates.append(inner.param_groups[0]["lr"])
        inner.step()
        schedule.step()
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


def test_without_warm_up_the_rate_is_constant():
    assert [WarmUp(0)(step) for step in (0, 1, 100)] == [1.0, 1.0, 1.0]


def test_a_schedule_resumes_from_plain_numbers():
    inner = optimizer()
    schedule = warm_up(inner, 10)
    for _ in range(3):
        inner.step()
        schedule.step()
    stored = json.loads(json.dumps(schedule.state_dict()))
    resumed = warm_up(optimizer(), 10)
    resumed.load_state_dict(stored)
    resumed.optimizer.step()
    resumed.step()
    inner.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ConfigError, match="warmup = -1"):
        WarmUp(-1)
