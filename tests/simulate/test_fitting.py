"""Which terms are chosen for a line."""

from __future__ import annotations

import pytest

from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.presets import classes
from decentral.simulate.round_time import MOST, TARGET, Circumstances, Fit, fitting


def made(preset: str, steps: int) -> Manifest:
    return preset_manifest(preset, inner={"steps": steps})


def fit_for(mbit: float, numel: int = 3_000_000, step_seconds: float = 0.4, **wanted: object) -> Fit:
    given = Circumstances(rate=mbit * 1e6 / 8, peers=8, num_parameters=numel, step_seconds=step_seconds)
    return fitting(made, given, **wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("link", classes(), ids=lambda link: link.up_to)
def test_each_line_gets_the_preset_of_its_class_with_enough_inner_steps(link):
    fit = fit_for(link.rate * 8 / 1e6)
    assert (fit.preset, fit.manifest.outer.method) == (link.preset, link.preset)
    assert fit.manifest.inner.steps == fit.time.steps
    assert fit.reaches
    assert fit.time.share < TARGET + 0.01 or fit.time.steps == fit.known.least


def test_quicker_steps_and_thinner_lines_want_more_of_them():
    assert fit_for(20, step_seconds=0.1).time.steps > fit_for(20).time.steps
    assert fit_for(5).time.steps > fit_for(20).time.steps


def test_where_the_preset_of_the_class_leaves_too_little_time_that_of_a_slower_one_is_taken():
    fit = fit_for(1000, numel=2_000_000_000)
    assert (fit.link.preset, fit.preset, fit.reaches) == ("muloco", "sparseloco", True)


def test_where_none_computes_enough_it_is_the_best_of_them_with_the_most_inner_steps():
    fit = fit_for(5, numel=1_000_000_000)
    assert (fit.preset, fit.time.steps, fit.manifest.inner.steps, fit.reaches) == ("sparseloco", MOST, MOST, False)
    assert fit.time.share < TARGET


def test_a_preset_or_steps_that_are_asked_for_are_kept():
    fit = fit_for(20, preset="streaming", step_seconds=2.0)
    assert (fit.preset, fit.known, fit.is_shown) == ("streaming", None, False)
    assert fit.manifest.inner.steps % fit.manifest.outer.fragments == 0
    assert fit_for(20, steps=7).time.steps == 7


def test_more_inner_steps_than_were_shown_are_told_apart():
    assert not fit_for(100, numel=30_000_000).is_shown
    assert fit_for(1000, step_seconds=4.0).is_shown


@pytest.mark.parametrize(("numel", "preset"), [(900_000, "muloco"), (3_000_000, "sparseloco")])
def test_a_small_model_gets_the_preset_of_a_faster_line_with_as_few_inner_steps_as_that_wants(numel, preset):
    """On lines of 20 Mbit/s a million parameters got what a thinner line needs, and ended behind all dense methods."""
    given = Circumstances(rate=20e6 / 8, peers=4, num_parameters=numel, step_seconds=1.0)
    fit = fitting(made, given)
    assert (fit.preset, fit.reaches, fit.is_shown) == (preset, True, True)
    assert (fit.instead_of is None) == (preset == "sparseloco")


@pytest.mark.parametrize(("run", "preset"), [({"rounds": 63}, "muloco"), ({"rounds": 64}, "sparseloco")])
def test_a_run_that_is_too_short_for_the_preset_of_the_line_gets_one_that_sends_more(run, preset):
    given = Circumstances(rate=20e6 / 8, peers=4, num_parameters=3_000_000, step_seconds=0.5)
    fit = fitting(lambda name, steps: preset_manifest(name, inner={"steps": steps}, run=run), given)
    assert (fit.preset, fit.reaches, fit.lasts) == (preset, True, True)
    assert (fit.instead_of is None) == (preset == "sparseloco")


def test_minutes_are_rounds_as_long_as_they_are_foreseen():
    given = Circumstances(rate=20e6 / 8, peers=4, num_parameters=3_000_000, step_seconds=0.5)
    run = {"rounds": 1000, "minutes": 3}
    fit = fitting(lambda name, steps: preset_manifest(name, inner={"steps": steps}, run=run), given)
    assert fit.preset != "sparseloco"
    assert fit.rounds == pytest.approx(180 / fit.time.seconds)


def test_where_the_line_carries_no_more_a_short_run_keeps_its_preset():
    given = Circumstances(rate=5e6 / 8, peers=8, num_parameters=30_000_000, step_seconds=0.4)
    fit = fitting(lambda name, steps: preset_manifest(name, inner={"steps": steps}, run={"rounds": 10}), given)
    assert (fit.preset, fit.lasts, fit.instead_of) == ("sparseloco", False, None)
