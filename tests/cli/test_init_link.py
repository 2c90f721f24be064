"""``decentral init --link``: terms for a line, and why."""

import json
from pathlib import Path

import pytest
from click.testing import Result

from decentral.cli.fitting import TIMED_STEPS, WARM_UP_STEPS, measure_step_seconds
from decentral.manifest import load_manifest, preset_manifest
from decentral.tasks.sizing import LanguageModelConfig, parameters_of
from tests.cli.conftest import Run

ASKED = ("--link", "20mbit", "--peers", "8", "--model-size", "30M", "--step-time", "0.4s")


def test_the_terms_carry_the_preset_of_the_line_the_inner_steps_and_the_model(run: Run, tmp_path: Path) -> None:
    told = json.loads(run("init", "run.toml", *ASKED, "--json").stdout)
    manifest = load_manifest(tmp_path / "run.toml")
    assert (told["file"], told["run_id"], told["preset"]) == ("run.toml", manifest.run_id, "sparseloco")
    assert (manifest.outer.method, manifest.inner.steps) == ("sparseloco", told["inner_steps"])
    assert told["parameters"] == parameters_of(LanguageModelConfig.of(manifest.model))
    assert told["parameters"] == pytest.approx(30e6, rel=0.02)
    assert (told["link_class"], told["peers"], told["step_seconds"]) == ("20mbit", 8, 0.4)
    assert not told["step_time_measured"]
    assert told["enough_computing"]
    assert told["share_computing"] >= 0.95
    assert told["share_computing"] == pytest.approx(0.4 * told["inner_steps"] / told["seconds_per_round"], abs=1e-4)


def test_why_is_told_in_two_sentences_with_what_is_expected(run: Run) -> None:
    why, expected, rate, written = run("init", "run.toml", *ASKED).stdout.splitlines()
    assert why.startswith("sparseloco: for lines of 20mbit and less, its contribution is about 220 times smaller")
    assert "experiments/LOG.md, 2026-11-26, A fourth setting, and twenty minutes with one killed: 5 seeds)" in why
    for part in ("inner steps of 0.4 s, 8 peers", "s per round", "each sends 3.", " MB", "% of the time"):
        assert part in expected
    assert why.endswith(".")
    assert expected.endswith(".")
    assert rate.startswith("outer.learning_rate = 2.5 for the run's 100 rounds: at the preset's own much of what")
    assert written == "run.toml: run sparseloco, sparseloco; start it with: decentral start run.toml"


@pytest.mark.parametrize(("rounds", "rate"), [(1, 2.5), (250, 2.5), (251, 1.6), (400, 1.6), (401, 1.0)])
def test_a_short_run_of_sparse_frames_has_the_outer_rate_that_suits_it(
    run: Run, tmp_path: Path, rounds: int, rate: float
) -> None:
    told = run("init", "run.toml", "--preset", "sparseloco", "--rounds", rounds).stdout
    assert load_manifest(tmp_path / "run.toml").outer.hyper["lr"] == rate
    assert (f"outer.learning_rate = {rate:g} for the run's {rounds} rounds" in told) is (rate != 1.0)


def test_a_run_that_time_cuts_short_has_the_rate_of_the_rounds_it_makes(run: Run, tmp_path: Path) -> None:
    given = ("--link", "5mbit", "--peers", "8", "--model-size", "30M", "--step-time", "0.4s", "--rounds", "1000")
    told = run("init", "run.toml", *given, "--minutes", "20").stdout
    assert "a run of 8 rounds is short for it" in told
    assert "outer.learning_rate = 2.5 for the run's 8 rounds" in told
    assert load_manifest(tmp_path / "run.toml").outer.hyper["lr"] == 2.5


@pytest.mark.parametrize("given", [("--compressor", "int8(block=4096)"), ("--overlap", "5")])
def test_what_was_not_measured_has_the_presets_rate(run: Run, tmp_path: Path, given: tuple[str, str]) -> None:
    assert "outer.learning_rate" not in run("init", "run.toml", "--preset", "sparseloco", *given).stdout
    assert load_manifest(tmp_path / "run.toml").outer.hyper["lr"] == 1.0


@pytest.mark.parametrize(
    ("rounds", "rate", "momentum"), [(24, 0.8, 0.7), (60, 0.8, 0.7), (61, 0.9, 0.9), (1000, 0.9, 0.9)]
)
def test_a_dense_run_of_a_small_model_has_the_outer_step_that_suits_its_length(
    run: Run, tmp_path: Path, rounds: int, rate: float, momentum: float
) -> None:
    told = run("init", "run.toml", "--preset", "diloco", "--rounds", rounds).stdout
    outer = load_manifest(tmp_path / "run.toml").outer
    assert outer.hyper == {"lr": rate, "momentum": momentum}
    assert f"outer.learning_rate = {rate:g} and outer.momentum = {momentum:g} for the run's {rounds} rounds" in told


def test_a_large_model_is_left_the_outer_step_that_its_method_was_published_with(run: Run, tmp_path: Path) -> None:
    told = run("init", "run.toml", "--preset", "diloco", "--model-size", "30M").stdout
    assert len(told.splitlines()) == 1
    found = load_manifest(tmp_path / "run.toml")
    assert found.outer == preset_manifest("diloco").outer
    assert found.exchange.kind == "reduce"


def test_a_run_of_few_rounds_is_told_why_it_gets_another_preset(run: Run) -> None:
    short = ("--link", "20mbit", "--peers", "4", "--model-size", "1M", "--step-time", "0.5s", "--rounds", "12")
    why, expected, _ = run("init", "run.toml", *short).stdout.splitlines()
    assert why.startswith(
        "muloco: sparseloco is what is justified for lines of 20mbit and less, and a run of 12 rounds"
    )
    assert "of which 64 reach every value once; this sends more" in why
    assert "is short for it" not in expected
    asked = run("init", "other.toml", *short, "--preset", "sparseloco").stdout.splitlines()[1]
    assert "a run of 12 rounds is short for it, of which 64 reach every value once" in asked


def test_a_small_model_is_told_why_it_gets_the_preset_of_a_faster_line(run: Run) -> None:
    small = ("--link", "20mbit", "--peers", "4", "--model-size", "1M", "--step-time", "1s")
    why, expected, _ = run("init", "run.toml", *small).stdout.splitlines()
    assert why.startswith(
        "muloco: sparseloco is what is justified for lines of 20mbit and less, but a round of so small"
    )
    assert "where nobody waits for the line its loss was 7 % below sparseloco's (arXiv:2505.23725" in why
    assert "has not been shown" not in expected


def test_one_option_is_enough_and_what_is_measured_is_said_to_be(run: Run, tmp_path: Path) -> None:
    result = run("init", "--link", "1gbit")
    assert "timing a few inner steps on this machine" in result.stderr
    assert ", measured on this machine, 8 peers with 635,776 parameters" in result.stdout
    method = load_manifest(tmp_path / "run.toml").outer.method  # a slow machine gets another than a fast one
    assert result.stdout.startswith(f"{method}: ")
    told = json.loads(run("init", "other.toml", "--link", "1gbit", "--json").stdout)
    assert told["step_time_measured"]


def test_a_simulation_of_the_terms_agrees(run: Run) -> None:
    asked = ("--link", "20mbit", "--peers", "4", "--model-size", "3M", "--step-time", "0.4s")
    told = json.loads(run("init", "run.toml", *asked, "--json").stdout)
    simulated = run(
        "simulate", "run.toml", "--link", "20mbit", "--step-time", "400ms", "--peers", 4, "--rounds", 4, "--json"
    )
    found = json.loads(simulated.stdout)
    assert found["parameters"] == told["parameters"]
    assert found["seconds_per_round"] == pytest.approx(told["seconds_per_round"], rel=0.02)


def test_a_model_too_large_for_the_line_gets_the_best_that_is_possible(run: Run) -> None:
    result = run("init", "run.toml", "--link", "5mbit", "--model-size", "1000M", "--step-time", "0.4s")
    assert result.exit_code == 0
    assert "With H = 500 inner steps" in result.stdout
    assert "which is the best that is possible and less than 95%" in result.stdout
    assert "with more than 250 inner steps has not been shown" in result.stdout


def test_a_line_faster_than_all_classes_is_in_the_fastest(run: Run) -> None:
    assert (
        "muloco: for lines of 1gbit and more, "
        in run("init", "run.toml", "--link", "10gbit", "--step-time", "0.4s").stdout
    )


def test_what_is_asked_for_beside_the_line_is_kept(run: Run, tmp_path: Path) -> None:
    asked = ("--preset", "noloco", "--inner-steps", "9", "--overlap", "0", "--name", "mine")
    result = run("init", "run.toml", "--link", "20mbit", "--step-time", "0.4s", *asked)
    manifest = load_manifest(tmp_path / "run.toml")
    assert (manifest.outer.method, manifest.inner.steps, manifest.run.name) == ("noloco", 9, "mine")
    assert (
        "noloco: it was asked for, and sparseloco is what is justified for lines of 20mbit and less." in result.stdout
    )


def test_a_size_is_of_the_model_without_a_line_as_well(run: Run, tmp_path: Path) -> None:
    assert run("init", "run.toml", "--model-size", "3M").exit_code == 0
    config = LanguageModelConfig.of(load_manifest(tmp_path / "run.toml").model)
    assert parameters_of(config) == pytest.approx(3e6, rel=0.05)


def test_where_the_preset_of_the_line_sends_too_much_the_reason_is_that(run: Run) -> None:
    asked = ("--link", "100mbit", "--model-size", "1000M", "--step-time", "0.4s")
    assert run("init", "run.toml", *asked).stdout.startswith(
        "sparseloco: it sends less than muloco, which leaves too little time to compute on lines of 100mbit and less ("
    )


def test_a_script_of_ones_own_says_how_large_its_model_is_and_how_long_a_step_takes(run: Run, tmp_path: Path) -> None:
    own = ("init", "run.toml", "--link", "100mbit", "--task", "custom")
    assert refused(run(*own)) == (
        "--link with --task custom: your script's step cannot be timed here; add --step-time, as 0.4s"
    )
    assert refused(run(*own, "--step-time", "2s")) == (
        "--link with --task custom: nothing says how large your model is; add --model-size, as 30M"
    )
    assert not (tmp_path / "run.toml").exists()
    told = json.loads(run(*own, "--step-time", "2s", "--model-size", "1.5B", "--json").stdout)
    assert told["parameters"] == 1_500_000_000
    assert load_manifest(tmp_path / "run.toml").model == preset_manifest("muloco", model={"task": "custom"}).model


def refused(result: Result) -> str:
    """What a usage error says, on one line."""
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


def test_without_a_line_a_usual_one_is_assumed_and_dense_frames_are_written_while_it_carries_them(
    run: Run, tmp_path: Path
) -> None:
    why, rate, written = run("init", "run.toml", "--name", "mine").stdout.splitlines()
    assert why == (
        "diloco: lines of 20 Mbit/s are assumed (--link says another), on which a frame of 0.64 MB for each of 7 "
        "others takes 1.8 s; dense frames learn most in a round."
    )
    assert rate.startswith("outer.learning_rate = 0.9 and outer.momentum = 0.9 for the run's 100 rounds: ")
    assert written == "run.toml: run mine, diloco; start it with: decentral start run.toml"
    found = load_manifest(tmp_path / "run.toml")
    assert (found.outer.method, found.exchange.kind, found.compressor.chain) == ("diloco", "gather", "int8(block=4096)")
    again = json.loads(run("init", "other.toml", "--json").stdout)
    assert set(again) == {"file", "run", "run_id", "preset"}


@pytest.mark.parametrize(
    ("given", "preset", "says"),
    [
        ((), "diloco", "a frame of 2 MB (--model-size says how large yours is) for each of 7 others takes 5.6 s"),
        (("--model-size", "120k"), "diloco", "a frame of 0.12 MB for each of 7 others takes 0.34 s"),
        (("--model-size", "30M"), "sparseloco", "a frame of 30 MB for each of 7 others takes 84 s; this sends least."),
        (("--model-size", "20M", "--peers", 2), "diloco", "a frame of 20 MB for each of 1 others takes 8 s"),
    ],
)
def test_a_scripts_model_gets_the_sparse_method_only_where_the_line_cannot_carry_a_dense_one(
    run: Run, tmp_path: Path, given: tuple[object, ...], preset: str, says: str
) -> None:
    assert says in run("init", "run.toml", "--task", "custom", *given).stdout
    assert load_manifest(tmp_path / "run.toml").outer.method == preset


def test_a_preset_that_lives_from_its_inner_optimizer_is_not_for_a_script_with_its_own(
    run: Run, tmp_path: Path
) -> None:
    given = ("--task", "custom", "--link", "100mbit", "--model-size", "30M", "--step-time", "0.4s")
    told = run("init", "run.toml", *given).stdout
    assert told.startswith("diloco: for lines of 100mbit and less, with an inner optimizer that is your script's own, ")
    assert load_manifest(tmp_path / "run.toml").outer.method == "diloco"


def test_steps_that_are_quicker_than_any_message_leave_it_to_the_method_that_learns_more(
    run: Run, tmp_path: Path
) -> None:
    given = ("--task", "custom", "--link", "20mbit", "--model-size", "120k", "--step-time", "10ms")
    assert "which is the best that is possible" in run("init", "run.toml", *given).stdout
    assert load_manifest(tmp_path / "run.toml").outer.method == "diloco"


def test_the_step_that_is_timed_is_the_median_of_some_after_the_first_ones() -> None:
    manifest = preset_manifest("muloco", model={"hidden": 32, "layers": 1, "heads": 1, "context": 16})
    ticks, durations = [0.0], [3.0, 1.0, 9.0, 2.0, 2.5]
    assert len(durations) == TIMED_STEPS
    assert WARM_UP_STEPS > 0
    for seconds in durations:
        ticks += [ticks[-1], ticks[-1] + seconds]
    times = iter(ticks[1:])
    assert measure_step_seconds(manifest, lambda: next(times)) == 2.5
