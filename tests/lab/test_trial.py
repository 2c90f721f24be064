"""Terms are tried before a run is founded by them."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.optimizers import presets
from decentral.trial.check import check_learns, outer_gain, trial
from tests.kit.tables import long_but
from tests.lab.random_terms import TOLD_BY_LOSSES, on_the_student, ruins, tried

TOPK = "topk(k=64, chunk=4096) >> signmag2"
FEW = ("diloco", "noloco")


@pytest.mark.parametrize("preset", long_but(FEW, [name for name in presets() if name not in TOLD_BY_LOSSES]))
def test_every_preset_learns_at_its_own_terms(preset: str) -> None:
    assert trial(preset_manifest(preset)) < 1.0


@pytest.mark.parametrize(
    ("feedback", "chain"),
    [
        ("ef(beta=0.95)", TOPK),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (("ef(beta=0.95)", "sign(block=1024)"), ("ef21", TOPK), ("econtrol(eta=0.001)", TOPK))
        ),
    ],
)
def test_what_is_owed_behind_outer_momentum_is_refused_with_what_learns(feedback: str, chain: str) -> None:
    terms = preset_manifest(
        "diloco",
        compressor={"chain": chain, "feedback": feedback},
        exchange={"kind": "gather"},
        outer={"norm_clip": "none"},
    )
    with pytest.raises(
        ConfigError, match=r"learnt again meanwhile, which the outer step multiplies by 6; use"
    ) as refused:
        check_learns(terms)
    assert 'use compressor.feedback = "none"' in str(refused.value)
    check_learns(terms.changed(compressor={"feedback": "none"}))


def test_no_run_is_founded_by_a_method_for_replicas_that_begin_apart() -> None:
    with pytest.raises(ConfigError, match=r'for replicas that begin apart, .* use outer\.method = "ad_psgd", and this'):
        check_learns(preset_manifest("variance_corrected"))
    check_learns(preset_manifest("ad_psgd"))


def test_a_momentum_of_the_feedbacks_own_is_refused_with_the_presets_feedback() -> None:
    with pytest.raises(ConfigError, match=r'use compressor\.feedback = "ef\(beta=0\.95\)"'):
        check_learns(preset_manifest("sparseloco", compressor={"feedback": "dgc"}))


@pytest.mark.parametrize("optimizer", ["gpa", "schedule_free"])
def test_an_inner_optimizer_that_learns_an_average_is_refused_under_outer_momentum(optimizer: str) -> None:
    with pytest.raises(ConfigError, match="which follows late, and outer momentum carries each step on to 6 times"):
        check_learns(preset_manifest("diloco", inner={"optimizer": optimizer}))
    check_learns(preset_manifest("local_sgd", inner={"optimizer": optimizer}))


@pytest.mark.parametrize(
    ("preset", "gain"), [("local_sgd", 1.0), ("sparseloco", 1.0), ("diloco", 6.0), ("slowmo", 2.5), ("noloco", 1.0)]
)
def test_the_gain_of_an_outer_step_is_its_rate_over_what_momentum_forgets(preset: str, gain: float) -> None:
    assert outer_gain(preset_manifest(preset)) == pytest.approx(gain, rel=1e-3)


@pytest.mark.parametrize("preset", presets())
def test_every_outer_step_has_a_gain(preset: str) -> None:
    assert 0.0 < outer_gain(preset_manifest(preset)) < 10.0


def test_a_method_whose_contributions_are_derivatives_is_not_tried_on_a_quadratic_that_has_none() -> None:
    check_learns(preset_manifest("just_one_byte", outer={"learning_rate": 0.5}))


def test_a_trial_draws_nothing_from_the_callers_generator() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    trial(preset_manifest("local_sgd"), rounds=4)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("optimizer", ["gpa", "schedule_free"])
def test_a_method_that_looks_at_what_is_learnt_before_each_step_trains_on_at_what_trains(optimizer: str) -> None:
    start, end = on_the_student(preset_manifest("partial_updates", inner={"optimizer": optimizer}), rounds=3)
    assert end < start


# ---- terms drawn at random ----


@pytest.mark.parametrize("seed", long_but([0], list(range(12))))
def test_terms_that_are_accepted_do_not_ruin_the_student(seed: int) -> None:
    found = tried(seed)
    assert not found["fits"] or found["refused"] or not ruins(found), found
