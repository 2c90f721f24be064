"""SPSA: two losses a step, exact parameters before and after, and loops that it does not fit."""

from __future__ import annotations

import logging
import math
import secrets
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from decentral.errors import ConfigError
from decentral.manifest.terms import Inner
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import Direction, byte_of, level_of
from decentral.training.inner import (
    InnerSteps,
    build_inner,
    differences,
    differences_sentence,
    warm_up,
)
from decentral.training.inner_optimizers import SPSA, step_forward
from decentral.training.inner_states import Together
from decentral.training.live_model import LiveModel
from decentral.training.live_side import Moments
from tests.training.own_loops import INPUTS, backward, joined, loss_of, pair_of, small, terms

RATE, SEED = 0.01, 11


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 4)


def spsa(model: nn.Module, rate: float = RATE) -> SPSA:
    return SPSA(model.named_parameters(), lr=rate, seed=SEED)


def test_a_step_is_the_equation_in_float64():
    model = linear().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = spsa(model)
    optimizer.step(lambda: loss_of(model))
    direction = Direction(SEED, 0)
    signs = {name: direction.of(name, p.numel()).view(p.shape).double() for name, p in before.items()}

    def at(shift: float) -> Tensor:
        return torch.func.functional_call(
            model, {name: p + shift * signs[name] for name, p in before.items()}, INPUTS.double()
        )

    def loss(shift: float) -> float:
        return float(at(shift).square().mean())

    along = (loss(1e-3) - loss(-1e-3)) / 2e-3
    byte = byte_of(along)
    assert optimizer.derivatives == (Derivative(SEED, 0, byte),)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - RATE * level_of(byte) * signs[name], rtol=0, atol=1e-12)


def test_at_a_rate_of_zero_the_parameters_keep_their_bits():
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = spsa(model, rate=0.0)
    for _ in range(5):
        optimizer.step(lambda: loss_of(model))
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_that_fails_leaves_the_parameters_as_they_were():
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        spsa(model).step(lambda: 1 / 0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_found_in_the_parameters_and_told_as_no_derivative(loss: float):
    """It was told as a derivative of zero and moved nothing, so that nobody learnt of it."""
    model = linear()
    optimizer = spsa(model)
    optimizer.step(lambda: loss_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    assert not math.isfinite(optimizer.step(lambda: loss))
    assert optimizer.derivatives == ()
    assert all(bool(p.isnan().all()) for p in model.parameters())
    with torch.no_grad():  # as `on_nan` puts the anchor back
        for p, kept in zip(model.parameters(), before, strict=True):
            p.copy_(kept)
    optimizer.step(lambda: loss_of(model))
    assert optimizer.derivatives[0].number == 1, "of the directions that are told none is left out"


def test_it_learns_and_says_the_mean_of_its_losses():
    model = linear()
    first, optimizer = float(loss_of(model).detach()), spsa(model)
    told = [float(step_forward(optimizer, lambda: loss_of(model))) for _ in range(300)]
    assert abs(told[0] - first) < 1e-3
    assert float(loss_of(model).detach()) < 0.2 * first


def test_what_was_saved_and_loaded_goes_on_along_the_next_direction():
    model, twin = linear(), linear()
    one = spsa(model)
    one.step(lambda: loss_of(model))
    twin.load_state_dict(model.state_dict())
    other = SPSA(twin.named_parameters(), lr=RATE, seed=99)
    other.load_state_dict(one.state_dict())
    for held, optimizer in ((model, one), (twin, other)):
        optimizer.step(lambda held=held: loss_of(held))
    assert one.derivatives == other.derivatives
    assert one.derivatives[0].number == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_that_were_given_no_seed_go_different_ways():
    seeds = {SPSA(linear().named_parameters()).param_groups[0]["seed"] for _ in range(5)}
    assert len(seeds) == 5


def test_a_step_without_a_closure_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^SPSA.step: .* give it a closure that returns the loss"):
        spsa(linear()).step()


def test_parameters_without_names_and_those_of_half_a_float_are_refused():
    with pytest.raises(ConfigError, match=r"give it model.named_parameters\(\)"):
        SPSA(linear().parameters())  # type: ignore[arg-type]  # as an optimizer is usually made
    with pytest.raises(ConfigError, match=r"weight is torch.bfloat16, .* keep the parameters in float32"):
        spsa(linear().bfloat16())


def test_a_manifest_builds_it_and_neither_clips_nor_decays_with_it():
    (optimizer,) = build_inner(Inner(optimizer="spsa", weight_decay=0.0, learning_rate=0.5), linear())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (SPSA, 0.5)
    for own in ({"weight_decay": 0.1}, {"weight_decay": 0.0, "clip": 1.0}):
        with pytest.raises(ValueError, match="spsa goes forward only"):
            Inner(optimizer="spsa", **own)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum is a key of muon, sgd, and spsa has none of its own"):
        Inner(optimizer="spsa", weight_decay=0.0, momentum=0.9)


def test_a_method_sees_its_derivatives_and_is_refused_gradients():
    model = linear()
    optimizer = spsa(model)
    shown = Moments(LiveModel(model, 1, None), [optimizer])
    assert shown.derivatives == []
    optimizer.step(lambda: loss_of(model))
    assert shown.derivatives == list(optimizer.derivatives)
    with pytest.raises(ConfigError, match="SPSA makes no gradients, and the run's outer method goes by them"):
        shown.read_gradient(0)


def test_names_that_are_not_the_models_are_refused():
    model = linear()
    wrapped = SPSA([(f"module.{name}", p) for name, p in model.named_parameters()])
    with pytest.raises(ConfigError, match="by the names that the model has, weight first"):
        _ = Moments(LiveModel(model, 1, None), [wrapped]).derivatives


def test_its_names_are_read_once_and_not_in_every_step():
    model = linear()
    optimizer = spsa(model)
    shown = Moments(LiveModel(model, 1, None), [optimizer])
    assert shown.derivatives == []
    optimizer.param_groups[0]["param_names"] = None  # whoever read them again would fail
    assert shown.derivatives == []


def test_its_closure_is_taken_where_a_methods_hook_acts_before_steps():
    model, begun = linear(), []
    optimizer = spsa(model)
    steps = InnerSteps([optimizer], lambda: None, lambda: begun.append(1))
    with steps.hook(dict(model.named_parameters())):
        optimizer.step(lambda: loss_of(model))
    assert begun == [1]


def test_the_page_shows_a_loop_that_runs(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)  # along some directions the loss stands still
    page = (Path(__file__).parents[2] / "docs/inner-optimizers.md").read_text(encoding="utf-8")
    (example,) = (block for block in page.split("```python\n")[1:] if "SPSA(" in block)
    model = linear()

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> object:
            return type("Output", (), {"loss": loss_of(self.inner)})()

    before = model.weight.detach().clone()
    exec(example.split("```")[0], {"SPSA": SPSA, "model": Task(), "batch": {}})
    assert not torch.equal(model.weight, before)


# ---- test inner optimizers ----
#
# join() with optimizers that a loop steps, with some that it does not, and with settings that are not the run's.


def test_an_optimizer_of_another_model_is_refused(tmp_path):
    optimizer = torch.optim.SGD(small().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="holds none of the model's 4 trained parameters"):
        joined(tmp_path, small(), optimizer)


def test_parameters_that_are_trained_by_no_optimizer_are_refused_with_their_number_and_the_way_out(tmp_path):
    model = small()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"2 of 4 trained parameters are in none .* 1\.weight first; give all"):
        joined(tmp_path, model, optimizer)
    model[1].requires_grad_(False)
    joined(tmp_path, model, optimizer)


def told(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_that_the_loop_does_not_step_is_told_once_and_may_step_later(tmp_path, caplog, wrapped):
    model = small()
    given, stepped = (torch.optim.AdamW(model.parameters(), lr=0.01) for _ in range(2))
    accelerator = Accelerator(cpu=True) if wrapped else None
    if accelerator is not None:
        model, given, stepped = accelerator.prepare(model, given, stepped)
    with joined(tmp_path, model, given, accelerator=accelerator) as peer:
        for step in range(300):
            backward(model)
            assert told(caplog, "does not step, and rounds are of its steps: give join the one") == (step >= 99)
            stepped.step()
        assert peer.inner_steps == 0
        given.step()
        assert peer.inner_steps == 1


def test_a_loop_that_steps_by_hand_only_ends_with_what_to_do(tmp_path):
    model = small()

    def train() -> None:
        for _ in range(1000):
            backward(model)
            for parameter in model.parameters():
                parameter.data -= 0.01 * parameter.grad

    with joined(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.01)):
        for _ in range(2000):  # gradients that are only ever summed move nothing
            backward(model)
        model.zero_grad()
        with pytest.raises(ConfigError, match=r"does not step, .* give join the one whose step"):
            train()


def test_what_the_next_run_is_to_be_founded_with_is_what_a_manifest_takes():
    found = [("optimizer", "AdamW", "SGD"), ("learning_rate", "0.001", "0.02"), ("weight_decay", "0.1", "0 and 0.1")]
    assert differences_sentence(found).endswith('with optimizer = "sgd", learning_rate = 0.02 under [inner]')


def test_an_optimizer_that_is_made_anew_inside_the_block_ends_with_what_to_do(tmp_path):
    """As stages of fastai do; nothing else would ever say that no round comes."""
    model = small()
    given = torch.optim.Adam(model.parameters(), lr=0.01)

    def train(optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            backward(model)
            optimizer.step()

    with joined(tmp_path, model, given):
        train(given, 3)
        train(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 2000)  # of something else
        train(given, 1)
        with pytest.raises(ConfigError, match=r"optimizers that join was not given, .* make it before join"):
            train(torch.optim.Adam(model.parameters(), lr=0.01), 1000)


def test_a_long_phase_of_one_of_two_optimizers_is_told_and_no_end(tmp_path, caplog):
    model = small()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.001) for _ in range(2))
    with joined(tmp_path, model, [first, second]) as peer:
        for _ in range(1100):
            backward(model)
            first.step()
        assert told(caplog, "does not step, and rounds are of its steps") == 1
        second.step()
        assert peer.inner_steps == 1


def test_accumulated_gradients_and_a_perturbation_in_every_step_are_no_foreign_optimizer(tmp_path):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with joined(tmp_path, model, optimizer) as peer:
        while not peer.done:
            for _ in range(3):
                backward(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)  # as sharpness-aware methods do
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        assert peer.inner_steps == 12


def test_an_inner_step_is_one_more_step_of_every_optimizer_and_the_last_one_ends_it(tmp_path):
    model = small()
    first, second = optimizers = pair_of(model)
    with joined(tmp_path, model, optimizers) as peer:
        for step in range(3):
            backward(model)
            first.step()
            assert peer.inner_steps == step
            second.step()
            assert peer.inner_steps == step + 1
        while not peer.done:
            backward(model)
            first.step()
            second.step()
        assert (peer.inner_steps, peer.round) == (12, 3)


def test_one_optimizer_of_a_list_that_steps_late_is_told_once_and_begins_the_inner_steps(tmp_path, caplog):
    model = small()
    optimizers = pair_of(model)
    with joined(tmp_path, model, optimizers) as peer:
        for step in range(250):
            assert told(caplog, "made 100 steps and the AdamW none") == (step >= 100)
            optimizers[0].step()
        assert peer.inner_steps == 0
        optimizers[1].step()
        assert peer.inner_steps == 1


def test_all_optimizers_and_schedulers_come_back_from_a_checkpoint(tmp_path):
    manifest, states = terms(run={"rounds": 1000}), []
    for rounds in (2, 0):
        model = small()
        optimizers = pair_of(model)
        schedulers = [warm_up(optimizer, 20) for optimizer in optimizers]
        with joined(tmp_path, model, optimizers, manifest, scheduler=schedulers) as peer:
            while peer.round < rounds:
                backward(model)
                for part in (*optimizers, *schedulers):
                    part.step()
            exp_avg = optimizers[1].state[model[1].weight]["exp_avg"].clone()
            states.append((peer.inner_steps, exp_avg, *(scheduler.state_dict() for scheduler in schedulers)))
    assert states[0][0] == states[1][0] == 8
    assert torch.equal(states[0][1], states[1][1])
    assert states[0][2:] == states[1][2:]


def test_the_state_of_a_checkpoint_with_one_optimizer_is_still_read_and_another_number_refused():
    model = small()
    old = torch.optim.SGD(model.parameters(), lr=0.25).state_dict()
    together = Together.of(torch.optim.SGD(model.parameters(), lr=0.5), "optimizer")
    together.load_state_dict(old)
    assert together.parts[0].param_groups[0]["lr"] == 0.25
    with pytest.raises(ConfigError, match="holds 1 optimizers or schedulers, join was given 2"):
        Together.of(pair_of(model), "optimizer").load_state_dict(old)


def test_a_peers_seed_is_its_own_the_same_after_a_restart_and_known_in_the_block_only(tmp_path):
    manifest, seeds = terms(run={"rounds": 1000}), []
    for folder in ("a", "a", "b"):
        model = small()
        peer = joined(tmp_path / folder, model, torch.optim.SGD(model.parameters(), lr=0.01), manifest)
        with pytest.raises(ConfigError, match="ask inside the with block"):
            print(peer.seed)
        with peer:
            seeds.append(peer.seed)
    assert seeds[0] == seeds[1]
    assert seeds[0] != seeds[2]


def test_a_loop_over_a_shard_trains_until_the_run_is_done_and_goes_on_where_it_was(tmp_path):
    manifest, drawn = terms(run={"rounds": 4}), []
    data = torch.utils.data.TensorDataset(torch.arange(40))
    for until in (2, 4):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with joined(tmp_path, model, optimizer, manifest) as peer:
            loader = DataLoader(data, batch_size=2, sampler=peer.shard(data, batch_size=2))
            while peer.round < until:
                for (batch,) in loader:
                    drawn += batch.tolist()
                    backward(model)
                    optimizer.step()
                    if peer.round >= until:
                        break
    assert len(drawn) == 2 * 4 * 4
    assert len(set(drawn)) == len(drawn)


def test_settings_that_are_not_the_manifests_are_told_once_with_both_values(tmp_path, caplog):
    model, events = small(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with caplog.at_level(logging.WARNING, "decentral"), joined(tmp_path, model, optimizer, observer=events.append):
        backward(model)
        optimizer.step()
    told = [event for event in events if event["event"] == "inner_differs"]
    assert told == [
        {
            "event": "inner_differs",
            "learning_rate": {"manifest": "0.001", "loop": "0.5"},
            "weight_decay": {"manifest": "0.1", "loop": "0"},
            "optimizer": {"manifest": "AdamW", "loop": "SGD"},
        }
    ]
    lines = [record.getMessage() for record in caplog.records if "inner optimizer" in record.getMessage()]
    assert len(lines) == 1
    assert "learning_rate is 0.5 in the manifest" not in lines[0]
    assert "learning_rate is 0.001 in the manifest and 0.5 in this loop" in lines[0]


def test_settings_that_any_group_agrees_with_are_no_difference():
    model, inner = small(), terms(inner={"warmup": 10}).inner
    groups = [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[1].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=inner.learning_rate, weight_decay=inner.weight_decay)
    warm_up(optimizer, inner.warmup)  # the rate is a tenth of it now
    assert differences(inner, [optimizer]) == []
    assert differences(inner, [torch.optim.SGD(model.parameters(), lr=1.0), optimizer]) == []


def test_an_optimizer_that_evaluates_its_closure_many_times_in_a_step_is_no_foreign_one(tmp_path):
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        backward(model)
        return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()

    with joined(tmp_path, model, optimizer) as peer:
        for _ in range(3):
            optimizer.step(closure)
        assert peer.inner_steps == 3
