"""Replicas of somebody's own model in the laboratory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.trial.own_model import OwnCourse, TrainsAlone, training_of
from tests.kit.own_problems import build, nothing, twice

EXACT = {"compressor": {"chain": "none"}, "exchange": {"kind": "gather"}, "outer": {"norm_clip": "none"}}


def test_one_peer_whose_outer_step_is_a_plain_mean_trains_as_one_alone() -> None:
    terms = preset_manifest("local_sgd", run={"rounds": 5}, inner={"steps": 4}, **EXACT)
    alone, course = TrainsAlone(build, 3), OwnCourse(build, terms, 1, first=3)
    for steps in (0, 4, 12, 20):
        assert course.go(steps) == pytest.approx(alone.go(steps), rel=1e-5)


def test_several_that_take_plain_means_learn_from_all_their_data() -> None:
    terms = preset_manifest("local_sgd", run={"rounds": 60}, inner={"steps": 4}, **EXACT)
    losses = [OwnCourse(build, terms, peers).go(240) for peers in (1, 8)]
    assert losses[1] < 0.5 * losses[0]


def test_all_begin_with_the_first_ones_weights_whatever_they_draw() -> None:
    terms = preset_manifest("local_sgd", run={"rounds": 1}, inner={"steps": 1}, **EXACT)
    course = OwnCourse(build, terms, 3)
    first, *others = [torch.cat([p.detach().flatten() for p in peer.module.parameters()]) for peer in course._peers]
    assert all(torch.equal(first, one) for one in others)


def test_replicas_of_a_method_for_those_that_begin_apart_do() -> None:
    course = OwnCourse(build, preset_manifest("variance_corrected", inner={"steps": 1}), 3)
    weights = [torch.cat([p.detach().flatten() for p in peer.module.parameters()]) for peer in course._peers]
    anchors = [torch.cat(list(peer.replica.anchors)) for peer in course._peers]
    assert all(torch.equal(one, anchor) for one, anchor in zip(weights, anchors, strict=True))
    assert len({tuple(one.tolist()) for one in weights}) == 3


def test_the_learning_rate_is_the_loops_whatever_the_manifest_says() -> None:
    terms = preset_manifest("local_sgd", inner={"learning_rate": 1e-9, "warmup": 1000}, **EXACT)
    course = OwnCourse(build, terms, 2)
    course.go(30)
    assert {group["lr"] for peer in course._peers for one in peer.optimizers for group in one.param_groups} == {0.01}


def test_a_course_goes_to_the_end_of_its_run_and_no_further() -> None:
    terms = preset_manifest("local_sgd", run={"rounds": 2}, inner={"steps": 4}, **EXACT)
    course = OwnCourse(build, terms, 2)
    assert course.go(8) == course.go(100)


def test_what_is_no_number_any_more_is_nan() -> None:
    terms = preset_manifest("local_sgd", run={"rounds": 40}, inner={"steps": 1}, **EXACT).changed(
        outer={"learning_rate": 1e6}
    )
    assert math.isnan(OwnCourse(build, terms, 2).go(40))


def test_buffers_of_the_model_that_is_evaluated_are_the_peers_mean() -> None:
    def with_norm(number: int):
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step() -> None:
            model(torch.full((4, 2), float(number)) + torch.randn(4, 2) * 1e-3).mean().backward()
            optimizer.step()

        return model, optimizer, step, lambda: model[0].running_mean.mean()

    terms = preset_manifest("local_sgd", run={"rounds": 50}, inner={"steps": 1}, **EXACT)
    for exchange in ("gather", "reduce"):
        course = OwnCourse(with_norm, terms.changed(exchange={"kind": exchange}), 2, first=0)
        assert course.go(50) == pytest.approx(0.5, abs=0.02)


def test_the_model_is_in_training_mode_again_after_an_evaluation() -> None:
    training = training_of(build, 0)
    training.model.train()
    (made := training.model).eval()
    training.held_out()
    assert not made.training
    made.train()
    training.held_out()
    assert made.training


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (nothing, "gave a Linear; it must give four: a model, its optimizer"),
        (lambda number: (1, 2, 3, 4), "gave int, int, int, int; it must give a model"),
        (lambda number: (*build(number)[:3], lambda: "low"), "the evaluation gave a str; it must give the held-out"),
    ],
)
def test_what_does_not_fit_is_said_in_a_line(wrong, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrainsAlone(wrong, 0).go(0)


def test_a_step_that_steps_the_optimizer_twice_is_no_inner_step() -> None:
    terms = preset_manifest("local_sgd", **EXACT)
    with pytest.raises(ConfigError, match="stepped its optimizer 2 times; once is one inner step"):
        OwnCourse(twice, terms, 2).go(1)


def test_two_peers_of_two_shapes_are_refused() -> None:
    def grows(number: int):
        return nn.Linear(number + 1, 1), *build(number)[1:]

    with pytest.raises(ConfigError, match="two peers' models differ: "):
        OwnCourse(grows, preset_manifest("local_sgd", **EXACT), 2)
