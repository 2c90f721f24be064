"""``decentral init``: terms for a line and a model, and why; what is read, and what is written."""

import json
from pathlib import Path

import pytest
import torch

from decentral.cli.fitting import TIMED_STEPS, WARM_UP_STEPS, measure_step_seconds
from decentral.errors import ListenError
from decentral.manifest import load_manifest, preset_manifest
from decentral.optimizers import make_outer
from decentral.swarm.admission import MIN_TOKEN
from decentral.swarm.invite import MAX_TOKEN
from decentral.tasks.corpus import MIN_NBYTES
from decentral.tasks.sizing import LanguageModelConfig, parameters_of
from tests.cli.conftest import Run
from tests.kit.tables import PRESETS

ROOT = Path(__file__).parents[2]
ASKED = ("--link", "20mbit", "--peers", "8", "--model-size", "30M", "--step-time", "0.4s")


# ---- terms for a line, and why ----


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


SHORT = "--link 20mbit --peers 4 --model-size 1M --step-time 0.5s --rounds 12"
CHOSEN = [  # what is asked for, the preset that is written, what is said and what is not
    (
        SHORT,
        "muloco",
        [
            "muloco: sparseloco is what is justified for lines of 20mbit and less, and a run of 12 rounds",
            "of which 64 reach every value once; this sends more",
        ],
        ["is short for it"],
    ),
    (
        f"{SHORT} --preset sparseloco",
        "sparseloco",
        ["a run of 12 rounds is short for it, of which 64 reach every value once"],
        [],
    ),
    (
        "--link 20mbit --peers 4 --model-size 1M --step-time 1s",
        "muloco",
        [
            "muloco: sparseloco is what is justified for lines of 20mbit and less, but a round of so small",
            "where nobody waits for the line its loss was 7 % below sparseloco's (arXiv:2505.23725",
        ],
        ["has not been shown"],
    ),
    (  # too large for the line
        "--link 5mbit --model-size 1000M --step-time 0.4s",
        "sparseloco",
        [
            "With H = 500 inner steps",
            "which is the best that is possible and less than 95%",
            "with more than 250 inner steps has not been shown",
        ],
        [],
    ),
    (  # a line that is faster than all classes is in the fastest
        "--link 10gbit --step-time 0.4s",
        "muloco",
        ["muloco: for lines of 1gbit and more, "],
        [],
    ),
    (
        "--link 20mbit --step-time 0.4s --preset noloco --inner-steps 9 --overlap 0 --name mine",
        "noloco",
        ["noloco: it was asked for, and sparseloco is what is justified for lines of 20mbit and less."],
        [],
    ),
    (
        "--link 100mbit --model-size 1000M --step-time 0.4s",
        "sparseloco",
        ["it sends less than muloco, which leaves too little time to compute on lines of 100mbit and less ("],
        [],
    ),
    (  # a preset that lives from its inner optimizer is not for a script that has its own
        "--task custom --link 100mbit --model-size 30M --step-time 0.4s",
        "diloco",
        ["diloco: for lines of 100mbit and less, with an inner optimizer that is your script's own, "],
        [],
    ),
    (  # steps that are quicker than any message leave it to the method that learns more
        "--task custom --link 20mbit --model-size 120k --step-time 10ms",
        "diloco",
        ["which is the best that is possible"],
        [],
    ),
    (  # without a line a usual one is assumed, and dense frames are written while it carries them
        "--task custom",
        "diloco",
        ["a frame of 2 MB (--model-size says how large yours is) for each of 7 others takes 5.6 s"],
        [],
    ),
    ("--task custom --model-size 120k", "diloco", ["a frame of 0.12 MB for each of 7 others takes 0.34 s"], []),
    (
        "--task custom --model-size 30M",
        "sparseloco",
        ["a frame of 30 MB for each of 7 others takes 84 s; this sends least."],
        [],
    ),
    (
        "--task custom --model-size 20M --peers 2",
        "diloco",
        ["a frame of 20 MB for each of 1 others takes 8 s"],
        [],
    ),
]


@pytest.mark.parametrize(("asked", "preset", "says", "never"), CHOSEN, ids=[row[0] for row in CHOSEN])
def test_the_preset_suits_the_line_and_the_model_and_the_reason_is_told(
    run: Run, tmp_path: Path, asked: str, preset: str, says: list[str], never: list[str]
) -> None:
    result = run("init", "run.toml", *asked.split())
    assert result.exit_code == 0, result.stderr
    assert [part for part in says if part not in result.stdout] == []
    assert [part for part in never if part in result.stdout] == []
    manifest = load_manifest(tmp_path / "run.toml")
    assert manifest.outer.method == preset
    if "--name mine" in asked:
        assert (manifest.inner.steps, manifest.run.name) == (9, "mine")


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


MEASURED = ("--preset", "sparseloco")
OUTER_STEPS = [  # a run of so many rounds has an outer step that suits its length; None: its preset's own, unsaid
    *((MEASURED, rounds, {"lr": lr}) for rounds, lr in ((1, 2.5), (250, 2.5), (251, 1.6), (400, 1.6), (401, None))),
    *((("--preset", "diloco"), rounds, {"lr": 0.8, "momentum": 0.7}) for rounds in (24, 60)),
    *((("--preset", "diloco"), rounds, {"lr": 0.9, "momentum": 0.9}) for rounds in (61, 1000)),
    ((*MEASURED, "--compressor", "int8(block=4096)"), 100, {"lr": None}),  # what was not measured
    ((*MEASURED, "--overlap", "5"), 100, {"lr": None}),
]


@pytest.mark.parametrize(("given", "rounds", "hyper"), OUTER_STEPS)
def test_a_run_has_the_outer_step_that_suits_its_length(
    run: Run, tmp_path: Path, given: tuple[str, ...], rounds: int, hyper: dict[str, float | None]
) -> None:
    told = run("init", "run.toml", *given, "--rounds", rounds).stdout
    outer, rate = load_manifest(tmp_path / "run.toml").outer, hyper["lr"]
    assert outer.hyper["lr"] == (rate or 1.0)
    assert f"outer.learning_rate = {rate:g}" in told if rate else "outer.learning_rate" not in told, told
    assert f" for the run's {rounds} rounds" in told or rate is None
    if "momentum" in hyper:
        assert outer.hyper == hyper
        assert f"outer.learning_rate = {rate:g} and outer.momentum = {hyper['momentum']:g} for the run's" in told


def test_a_run_that_time_cuts_short_has_the_rate_of_the_rounds_it_makes(run: Run, tmp_path: Path) -> None:
    given = ("--link", "5mbit", "--peers", "8", "--model-size", "30M", "--step-time", "0.4s", "--rounds", "1000")
    told = run("init", "run.toml", *given, "--minutes", "20").stdout
    assert "a run of 8 rounds is short for it" in told
    assert "outer.learning_rate = 2.5 for the run's 8 rounds" in told
    assert load_manifest(tmp_path / "run.toml").outer.hyper["lr"] == 2.5


def test_a_large_model_is_left_the_outer_step_that_its_method_was_published_with(run: Run, tmp_path: Path) -> None:
    told = run("init", "run.toml", "--preset", "diloco", "--model-size", "30M").stdout
    assert len(told.splitlines()) == 1
    found = load_manifest(tmp_path / "run.toml")
    assert found.outer == preset_manifest("diloco").outer
    assert found.exchange.kind == "reduce"


def test_one_option_is_enough_and_what_is_measured_is_said_to_be(run: Run, tmp_path: Path) -> None:
    result = run("init", "--link", "1gbit")
    assert "timing a few inner steps on this machine" in result.stderr
    assert ", measured on this machine, 8 peers with 635,776 parameters" in result.stdout
    method = load_manifest(tmp_path / "run.toml").outer.method  # a slow machine gets another than a fast one
    assert result.stdout.startswith(f"{method}: ")
    told = json.loads(run("init", "run.toml", "--force", "--link", "1gbit", "--json").stdout)
    assert told["step_time_measured"]


def test_the_step_that_is_timed_is_the_median_of_some_after_the_first_ones() -> None:
    manifest = preset_manifest("muloco", model={"hidden": 32, "layers": 1, "heads": 1, "context": 16})
    ticks, durations = [0.0], [3.0, 1.0, 9.0, 2.0, 2.5]
    assert len(durations) == TIMED_STEPS
    assert WARM_UP_STEPS > 0
    for seconds in durations:
        ticks += [ticks[-1], ticks[-1] + seconds]
    times = iter(ticks[1:])
    assert measure_step_seconds(manifest, lambda: next(times)) == 2.5


def test_a_simulation_of_the_terms_agrees(run: Run) -> None:
    asked = ("--link", "20mbit", "--peers", "4", "--model-size", "3M", "--step-time", "0.4s")
    told = json.loads(run("init", "run.toml", *asked, "--json").stdout)
    again = ("--link", "20mbit", "--step-time", "400ms", "--peers", 4, "--rounds", 4, "--json")
    found = json.loads(run("simulate", "run.toml", *again).stdout)
    assert found["parameters"] == told["parameters"]
    assert found["seconds_per_round"] == pytest.approx(told["seconds_per_round"], rel=0.02)


# ---- what is written ----


@pytest.mark.parametrize(("chain", "lost"), [("topk(k=64, chunk=4096) >> signmag2", "94%"), ("int4(block=256)", "")])
def test_a_compressor_that_drops_values_for_good_is_named(run: Run, chain: str, lost: str) -> None:
    told = run("init", "run.toml", "--preset", "diloco", "--compressor", chain).stdout
    assert ("dropped for good" in told, lost in told) == (bool(lost), True)


@pytest.mark.parametrize("preset", [name for name in PRESETS if not make_outer(name, {}).begins_apart])
def test_a_manifest_of_every_preset_is_written_with_comments_and_loads(run: Run, tmp_path: Path, preset: str) -> None:
    assert run("init", "run.toml", "--preset", preset).exit_code == 0
    text = (tmp_path / "run.toml").read_text()
    assert load_manifest(tmp_path / "run.toml").outer.method == preset
    for line in text.splitlines():
        assert not line.strip() or "#" in line, f"no comment: {line}"


def test_overrides_end_up_in_the_manifest(run: Run, tmp_path: Path) -> None:
    options = "--name mine --seed 7 --rounds 9 --minutes 5 --inner-steps 11 --min-peers 2 --corpus novels --overlap 3"
    assert run("init", "run.toml", *options.split(), "--experts", "4", "--compressor", "int8(block=64)").exit_code == 0
    manifest = load_manifest(tmp_path / "run.toml")
    assert (manifest.run.name, manifest.run.seed, manifest.run.rounds, manifest.run.minutes) == ("mine", 7, 9, 5)
    assert (manifest.inner.steps, manifest.swarm.min_peers, manifest.data.corpus) == (11, 2, "novels")
    assert (manifest.outer.overlap, manifest.compressor.chain) == (3, "int8(block=64)")
    assert manifest.model.experts == 4
    assert run("init", "run.toml", "--force", "--model-size", "3M").exit_code == 0
    config = LanguageModelConfig.of(load_manifest(tmp_path / "run.toml").model)
    assert parameters_of(config) == pytest.approx(3e6, rel=0.05)


def test_the_terms_of_a_custom_model_name_a_script_as_the_next_step(run: Run, tmp_path: Path) -> None:
    result = run("init", "run.toml", "--task", "custom")
    assert result.stdout.splitlines()[-1].endswith(
        'train your own model with it, in a script: decentral.join("run.toml", model, optimizer)'
    )
    assert 'task = "custom"' in (tmp_path / "run.toml").read_text()
    usual = torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    assert load_manifest(tmp_path / "run.toml").inner.weight_decay == usual


def test_a_script_of_ones_own_says_how_large_its_model_is_and_how_long_a_step_takes(run: Run, tmp_path: Path) -> None:
    own = ("init", "run.toml", "--link", "100mbit", "--task", "custom")
    assert run(*own).stderr == (
        "error: --link with --task custom: your script's step cannot be timed here; add --step-time, as 0.4s\n"
    )
    assert run(*own, "--step-time", "2s").stderr == (
        "error: --link with --task custom: nothing says how large your model is; add --model-size, as 30M\n"
    )
    assert not (tmp_path / "run.toml").exists()
    told = json.loads(run(*own, "--step-time", "2s", "--model-size", "1.5B", "--json").stdout)
    assert told["parameters"] == 1_500_000_000
    assert load_manifest(tmp_path / "run.toml").model == preset_manifest("muloco", model={"task": "custom"}).model


def test_what_init_reads_of_a_folder_and_what_it_passes_over_is_said(run: Run, tmp_path: Path) -> None:
    (tmp_path / "foxes").mkdir()
    (tmp_path / "foxes/fox.txt").write_text("the quick brown fox. " * 5000)
    (tmp_path / "foxes/fox.png").write_bytes(bytes(1000))
    result = run("init", "run.toml", "--data", "foxes")
    assert result.exit_code == 0
    passed = "1 file of 1,000 bytes passed over, fox.png: zero bytes near the beginning, so no text"
    assert result.stderr.startswith(f"data    foxes: 1 file ({passed}), 105,000 bytes, 100.0 % of it text, digest ")


def test_the_bounds_of_what_is_typed_are_in_the_documents() -> None:
    running, transports = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("docs/running.md", "docs/transports.md")
    )
    assert f"at least {MIN_NBYTES // 1024} KiB" in running
    assert f"the token, {MIN_TOKEN} to {MAX_TOKEN} visible characters" in running
    assert f"ends with exit code {ListenError.exit_code} before anything is made" in transports
