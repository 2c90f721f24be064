"""The search for terms on somebody's own model."""

from __future__ import annotations

import math
import os

import pytest
import torch

from decentral.errors import ConfigError, UsageError
from decentral.lab import tuning
from decentral.lab.tuning import LOOKS, Aim, Found, candidates_of, survivors, tune
from decentral.manifest import preset_manifest
from tests.kit.own_problems import broken, build


def test_the_better_half_goes_on_rounded_up_and_nothing_that_diverged() -> None:
    assert survivors({"a": 3.0, "b": 1.0, "c": 2.0}) == ["b", "c"]
    assert survivors({"a": math.nan, "b": 1.0, "c": math.inf}) == ["b"]
    assert survivors({"a": math.nan}) == []


def test_the_best_is_of_those_that_came_to_the_end() -> None:
    found = Found(4, alone=[2.0, 2.0, 2.0], losses={"early": [0.1], "late": [3.0, 2.0, 1.5], "last": [3.0, 2.0, 1.8]})
    assert (found.best, found.gain) == ("late", 0.5)
    nothing = Found(4, alone=[2.0], losses={"a": [math.nan]})
    assert (nothing.best, nothing.gain) == (None, -math.inf)


def test_a_search_finds_the_rate_that_learns_most_and_writes_what_the_loop_trains_by() -> None:
    told: list[str] = []
    tuned = tune(
        build, rounds=12, inner_steps=5, presets=["local_sgd"], outer_rates=[0.05, 1.0, 40.0], tell=told.append
    )
    assert tuned.found.best == "local_sgd at 1"
    assert tuned.manifest.outer.learning_rate == 1.0
    assert (tuned.manifest.run.rounds, tuned.manifest.inner.steps) == (12, 5)
    assert (tuned.manifest.inner.optimizer, tuned.manifest.inner.learning_rate) == ("sgd", 0.01)
    assert tuned.manifest.model.task == "custom"
    assert told[0].startswith("3 candidates of 2 peers and a peer alone, 12 rounds of 5 steps: about ")
    assert len(told) - 1 == len(LOOKS) == len(tuned.found.alone)
    assert told[1].startswith("round 6 of 12: alone ")
    assert len(tuned.found.losses["local_sgd at 40"]) == 1


def test_what_is_drawn_afterwards_is_as_if_nothing_had_been_tried() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    tune(build, rounds=4, inner_steps=2, presets=["local_sgd"], outer_rates=[1.0])
    assert torch.equal(torch.rand(3), wanted)


def test_the_sparse_method_is_tried_where_it_makes_rounds_shorter() -> None:
    def presets_at(link: str) -> set[str]:
        tuned = tune(build, rounds=4, inner_steps=1, link=link)
        return {name.split()[0] for name in tuned.found.losses}

    assert presets_at("1gbit") == {"diloco"}


@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two at a time")
def test_trials_in_processes_of_their_own_come_to_the_same() -> None:
    given = {"rounds": 4, "inner_steps": 3, "presets": ["local_sgd"], "outer_rates": [0.5, 1.0]}
    here, there = (tune(build, processes=count, **given).found for count in (1, 2))
    assert here == there


@pytest.mark.parametrize("processes", [1, 2])
def test_what_goes_wrong_in_the_users_code_comes_out_of_the_search(processes: int) -> None:
    with pytest.raises((ConfigError, ZeroDivisionError), match="division by zero"):
        tune(broken, rounds=4, inner_steps=1, presets=["local_sgd"], processes=processes)


@pytest.mark.long
def test_a_method_of_fragments_has_as_many_inner_steps_as_a_peer_alone_and_the_models_fragments() -> None:
    terms = preset_manifest("diloco", steps=36, model={"layers": 24})
    (one,), _ = candidates_of(Aim(terms=terms, rounds=4, peers=2, presets=("streaming",)), 10**7, 0.1)
    assert (one.manifest.outer.fragments, one.manifest.run.rounds, one.manifest.inner.steps) == (9, 36, 36)


def test_a_function_within_a_function_is_tuned_though_no_other_process_could_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "SHORT", 0.0)
    found = tune(lambda number: build(number), rounds=4, inner_steps=1, presets=["local_sgd"]).found
    assert found.best == "local_sgd"


def test_terms_that_no_run_is_founded_by_are_not_tried() -> None:
    with pytest.raises(ConfigError, match="for replicas that begin apart"):
        tune(build, presets=["variance_corrected"])


def test_the_terms_of_a_script_and_data_of_a_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="give the function that builds it"):
        tune(preset_manifest("diloco", model={"task": "custom"}))
    with pytest.raises(ConfigError, match="a function reads its own"):
        tune(build, data="text")


def test_a_preset_that_there_is_not_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean diloco"):
        tune(build, presets=["dilocco"])
