"""Simulated peers that learn by the optimizer their manifest names: real nodes, schedules, replicas and frames."""

from __future__ import annotations

import pytest
import torch

from decentral.manifest import preset_manifest
from decentral.manifest.terms import Inner
from decentral.simulate.lessons import LEARNING_RATE, Student, alone, beginning
from decentral.simulate.simulation import forecast
from decentral.training.copies import Averages
from decentral.training.inner import built

OPTIONS = {"peers": 3, "profile": "lab", "seed": 1, "rounds": 3, "step_seconds": 1.0, "parameters": 10_000}


@pytest.mark.parametrize(
    ("preset", "inner"),
    [("muloco", {}), ("mt_dao", {}), ("just_one_byte", {}), ("diloco", {"optimizer": "gpa", "averaging": 0.9})],
)
def test_three_peers_learn_by_the_inner_optimizer_of_their_manifest(preset: str, inner: dict[str, object]):
    terms = {"run": {"rounds": 100, "salt": "x", "seed": 1}, "inner": {"steps": 5, **inner}}
    found = forecast(preset_manifest(preset, **terms), learn=True, **OPTIONS)  # type: ignore[arg-type]
    assert found["problems"] == []
    losses = [loss for _, loss in found["loss_curve"] if loss < found["loss_curve"][0][1]]
    assert len(losses) >= 3
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
def test_anchors_move_as_their_equation_says_where_moments_have_a_compressor_of_their_own(exchange: str):
    terms = {"run": {"rounds": 100, "salt": "x", "seed": 1}, "inner": {"steps": 5}, "exchange": {"kind": exchange}}
    sparse = {"chain": "topk(k=64, chunk=4096)", "feedback": "ef(beta=0.95)"}
    found = forecast(preset_manifest("mt_dao", compressor=sparse, **terms), learn=True, **OPTIONS)  # type: ignore[arg-type]
    assert found["problems"] == []


@pytest.mark.parametrize("name", ["gpa", "schedule_free"])
def test_a_student_that_nobody_moves_gives_the_steps_of_its_average(name: str):
    inner = Inner(optimizer=name)  # type: ignore[arg-type]  # a name
    student, live, given = Student(1, seed=0, inner=inner), beginning(1), []
    gradients: list[torch.Tensor] = []
    student.weights[0].register_post_accumulate_grad_hook(lambda weight: gradients.append(weight.grad.clone()))
    for number in range(1, 6):
        (step_N,) = student.step(live, number)
        live = [live[0] - step_N]
        given.append(live[0])
    weight = beginning(1)[0].view(64, 64).clone().requires_grad_()
    terms = inner.model_copy(update={"learning_rate": LEARNING_RATE, "weight_decay": 0.0})
    optimizers = built(terms, [weight], [])
    averages = Averages(optimizers)
    for gradient, wanted in zip(gradients, given, strict=True):
        weight.grad = gradient
        optimizers[0].step()
        averages.show()
        torch.testing.assert_close(weight.detach().flatten(), wanted, rtol=1e-5, atol=1e-6)
        averages.resume()


def test_an_unnamed_optimizer_is_torchs_adamw_and_a_named_one_another():
    (plain,) = Student(1, seed=0)._optimizers
    assert (type(plain), plain.defaults["betas"]) == (torch.optim.AdamW, (0.9, 0.999))
    others = {name: alone(1, 10, Inner(optimizer=name)) for name in ("muon", "adopt", "sgd", "qh_adopt")}  # type: ignore[arg-type]
    assert len({alone(1, 10), *others.values()}) == 5
    assert all(loss < alone(1, 0) for loss in others.values())
