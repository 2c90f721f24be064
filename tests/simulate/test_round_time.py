"""Which terms are chosen for a line."""

from __future__ import annotations

import pytest

from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.presets import classes
from decentral.quantities import parse_rate
from decentral.simulate.simulation import forecast
from decentral.training.round_time import MOST, TARGET, Circumstances, Fit, RoundTime, fitting, steps_for, time_of_round


def made(preset: str, steps: int | None) -> Manifest:
    return preset_manifest(preset, steps=steps)


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
    fit = fitting(lambda name, steps: preset_manifest(name, steps=steps, run=run), given)
    assert (fit.preset, fit.reaches, fit.lasts) == (preset, True, True)
    assert (fit.instead_of is None) == (preset == "sparseloco")


def test_minutes_are_rounds_as_long_as_they_are_foreseen():
    given = Circumstances(rate=20e6 / 8, peers=4, num_parameters=3_000_000, step_seconds=0.5)
    run = {"rounds": 1000, "minutes": 3}
    fit = fitting(lambda name, steps: preset_manifest(name, steps=steps, run=run), given)
    assert fit.preset != "sparseloco"
    assert fit.rounds == pytest.approx(180 / fit.time.seconds)


def test_where_the_line_carries_no_more_a_short_run_keeps_its_preset():
    given = Circumstances(rate=5e6 / 8, peers=8, num_parameters=30_000_000, step_seconds=0.4)
    fit = fitting(lambda name, steps: preset_manifest(name, steps=steps, run={"rounds": 10}), given)
    assert (fit.preset, fit.lasts, fit.instead_of) == ("sparseloco", False, None)


# ---- test round time ----
#
# Arithmetic of an outer step against simulated swarms of equal machines.

SEVERAL = [  # preset, its line, peers, H, parameters, and what is changed: of each kind of exchange, and with overlap
    ("sparseloco", "20mbit", 4, 10, 60_000_000, {}),
    pytest.param("diloco", "100mbit", 4, 6, 20_000_000, {}, marks=pytest.mark.long),
    pytest.param("diloco", "1gbit", 3, 5, 20_000_000, {}, marks=pytest.mark.long),
    ("muloco", "20mbit", 3, 10, 5_000_000, {}),
    ("noloco", "100mbit", 4, 10, 2_000_000, {}),
    ("streaming", "100mbit", 3, 12, 15_000_000, {}),
    ("sparseloco", "5mbit", 4, 12, 20_000_000, {"overlap": 3}),
]
STEP_SECONDS = 1.0


def manifest_of(preset: str, steps: int | None, **outer: object):
    return preset_manifest(preset, steps=steps, run={"rounds": 20, "salt": "lines"}, outer=outer)


@pytest.mark.parametrize(("preset", "link", "peers", "steps", "numel", "outer"), SEVERAL)
def test_arithmetic_and_a_simulated_swarm_agree(preset, link, peers, steps, numel, outer):
    manifest, rate = manifest_of(preset, steps, **outer), parse_rate(link)
    expected = time_of_round(manifest, numel, peers, rate, STEP_SECONDS)
    asked = {"peers": peers, "profile": "even", "link": rate, "seed": 1, "step_seconds": STEP_SECONDS}
    found = forecast(manifest, **asked, rounds=5, parameters=numel)
    assert found["problems"] == []
    assert found["seconds_per_round"] == pytest.approx(expected.seconds, rel=0.02)
    assert found["bytes_per_peer"] / found["rounds"] == pytest.approx(expected.nbytes, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("link", [one.up_to for one in classes()])
def test_what_is_chosen_for_each_line_computes_as_much_in_a_simulated_swarm(link):
    rate = parse_rate(link)
    given = Circumstances(rate=rate, peers=8, num_parameters=30_000_000, step_seconds=0.4)
    fit = fitting(manifest_of, given)
    asked = {"peers": 8, "profile": "even", "link": rate, "seed": 0, "step_seconds": 0.4}
    found = forecast(fit.manifest, **asked, rounds=5, parameters=30_000_000)
    assert found["problems"] == []
    assert found["seconds_per_round"] == pytest.approx(fit.time.seconds, rel=0.02)
    share = 0.4 * fit.time.steps / found["seconds_per_round"]
    assert share == pytest.approx(fit.time.share, abs=0.01)
    assert share >= TARGET
    assert found["utilisation"] >= TARGET


@pytest.mark.parametrize(
    ("preset", "seconds"), [("co2", 12.0), ("delayed", 14.8), pytest.param("eager", 12.0, marks=pytest.mark.long)]
)
def test_training_stands_still_for_a_round_of_delayed_and_for_none_of_co2(preset: str, seconds: float) -> None:
    """Twelve inner steps of a second; a round takes 2.8 s."""
    asked = {"peers": 3, "profile": "even", "link": parse_rate("100mbit"), "seed": 1, "step_seconds": 1.0}
    found = forecast(manifest_of(preset, 12), **asked, rounds=5, parameters=20_000_000)
    assert found["seconds_per_round"] == pytest.approx(seconds, abs=0.1)
    assert found["problems"] == []


def test_overlap_hides_as_many_inner_steps_of_a_round_and_no_more():
    rate, numel = parse_rate("20mbit"), 20_000_000
    plain = time_of_round(manifest_of("sparseloco", 30), numel, 8, rate, 0.1)
    some = time_of_round(manifest_of("sparseloco", 30, overlap=5), numel, 8, rate, 0.1)
    all_of_it = time_of_round(manifest_of("sparseloco", 30, overlap=29), numel, 8, rate, 1.0)
    assert some.wait == pytest.approx(plain.wait - 0.5)
    assert (all_of_it.wait, all_of_it.share) == (0.0, 1.0)


def test_one_copy_for_each_peer_in_a_gather_and_two_bodies_at_most_in_a_reduce():
    gathers = [time_of_round(manifest_of("sparseloco", 30), 10**7, n, 1e6, 1.0).nbytes for n in (2, 3, 9)]
    reduces = [time_of_round(manifest_of("diloco", 30), 10**7, n, 1e6, 1.0).nbytes for n in (2, 3, 9)]
    assert [nbytes / gathers[0] for nbytes in gathers] == pytest.approx([1, 2, 8], rel=0.02)
    assert [nbytes / reduces[0] for nbytes in reduces] == pytest.approx([1, 4 / 3, 16 / 9], rel=0.02)


@pytest.mark.parametrize(
    ("fragments", "wait", "least", "most", "steps"),
    [
        (1, 1.0, 1, 500, 190),  # 19 s of computing for 1 s of waiting, 0.1 s a step
        (1, 1.0, 200, 500, 200),
        (1, 1.0, 1, 100, 100),
        (1, 0.0, 15, 500, 15),
        (3, 1.0, 1, 600, 570),  # three rounds between two of the same parameters
        (3, 1.0, 1, 500, 498),
        (3, 0.0, 16, 500, 18),
        (3, 0.0, 1, 2, 3),
    ],
)
def test_the_fewest_inner_steps_that_compute_enough(fragments, wait, least, most, steps):
    time = RoundTime(steps=30, fragments=fragments, training=3.0 / fragments, wait=wait, nbytes=1.0)
    assert steps_for(time, 0.1, 0.95, least, most) == steps
    assert time.with_steps(steps).training == pytest.approx(0.1 * steps / fragments)
