"""Attacks of experiments/attacks: what is each one's own, what all keep to, what a published library sends, and the
table that is made of their records.
"""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers import make_aggregation
from experiments.attacks import grid as grids
from experiments.attacks import records, report
from experiments.attacks.hostile import (
    FIRST_STEP,
    Attack,
    Rule,
    alike,
    attack_names,
    describe_attacks,
    distance_from_honest,
    index_overlap,
    line_search,
    make_attack,
    reversal,
    shift,
)
from tests.kit.aggregating import aggregated

RULES = ("mean", "norm_clip", "krum", "nnm", "arc", "caf", "mda", "rfa", "centered_clip", "flag", "trimmed_mean")


def trusting(row_PN: Tensor) -> Tensor:
    return row_PN.mean(0)


def tried(name: str, f: int) -> Rule:
    """The rule of this name that suspects ``f``, where it asks."""
    rule = make_aggregation(name, {"f": f} if "f" in make_aggregation(name, {}).__slots__ else {})
    if name in ("trimmed_mean", "median"):  # in the vectors' own precision
        return rule.combine
    return lambda row_PN: torch.from_numpy(aggregated(rule, row_PN.double().numpy()))


HONEST = torch.tensor([[1.0, 2.0, 0.0], [3.0, 2.0, 0.0]])


def sent(word: str, f: int = 2) -> torch.Tensor:
    return make_attack(word).changes(HONEST, f, trusting, torch.Generator().manual_seed(1))


def test_noise_is_as_long_as_honest_changes_are():
    honest_KN = torch.ones(5, 10_000)
    found_FN = make_attack("noise(times=3)").changes(honest_KN, 2, trusting, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found_FN.norm(dim=1), torch.full((2,), 300.0), rtol=0.05, atol=0.0)
    assert abs(torch.cosine_similarity(found_FN[0], found_FN[1], dim=0)) < 0.05


def test_labels_are_flipped_to_their_opposites():
    attack = make_attack("label_flip")
    assert attack.labels(torch.tensor([0, 3, 9]), 10).tolist() == [9, 6, 0]
    assert attack.labels(torch.tensor([0, 255]), 256).tolist() == [255, 0]


def test_a_copycat_has_all_places_of_its_victim_and_no_value():
    found_FN = sent("copycat", f=3)
    assert [index_overlap(row_N, HONEST[k % 2]) for k, row_N in enumerate(found_FN)] == [1.0] * 3
    assert not torch.equal(found_FN[0], HONEST[0])
    torch.testing.assert_close(found_FN[0], HONEST[0], rtol=0.5, atol=0.0)


def test_the_overlap_is_of_the_shorter_frame():
    assert index_overlap(torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])) == 0.5
    assert index_overlap(torch.zeros(3), torch.ones(3)) == 0.0


def test_frames_are_withheld_as_often_as_the_share_says():
    generator = torch.Generator().manual_seed(0)
    delivered = [one for _ in range(400) for one in make_attack("withheld(share=0.25)").delivers(3, generator)]
    assert 0.7 < sum(delivered) / len(delivered) < 0.8
    assert make_attack("withheld(share=1)").delivers(3, generator) == [False] * 3


def test_the_search_doubles_its_steps_and_shrinks_them_once_it_overshoots():
    tried: list[float] = []

    def distance(factor: float) -> float:
        tried.append(factor)
        return -abs(factor - 35.0)

    assert line_search(distance, 10.0, 7, 0.5) == (35.0, 0.0)
    assert tried == [0.0, 10.0, 30.0, 70.0, 50.0, 40.0, 35.0]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("sign_flop", "did you mean sign_flip"),
        ("scale(factor=-1)", "want a factor above 0"),
        ("scale(times=2)", "attack scale has no times"),
        ("noise(times=0)", "want times above 0"),
        ("alie(z=inf)", "finite number of standard deviations"),
        ("ipm(tau=0)", "want tau above 0"),
        ("mimic(victim=-1)", "place of an honest peer"),
        ("copycat(noise=2)", r"want it in \[0, 1\]"),
        ("withheld(share=0)", r"want it in \(0, 1\]"),
        ("optimised_alie(evaluations=1)", "want 2 to 1000"),
        ("scale(", "such as sign_flip"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(word: str, told: str):
    with pytest.raises(ConfigError, match=told):
        make_attack(word)


# ---- test attack laws ----
#
# What every attack keeps to, so that it can be put in the place of any other.

ALL = (*attack_names(), "scale(factor=100)", "noise(times=100)", "alie(z=-1.5)", "ipm(tau=0.1)", "withheld(share=1)")
CRAFTED = tuple(word for word in ALL if make_attack(word).crafts)
FIXED = tuple(word for word in CRAFTED if word.split("(")[0] in ("alie", "ipm"))
K, F, N = 7, 3, 40


def honest(seed: int = 0, count: int = K) -> Tensor:
    """Changes that agree a little, most of them zero, as sparse frames decode."""
    generator = torch.Generator().manual_seed(seed)
    common_N = torch.randn(N, generator=generator)
    kept_KN = torch.rand((count, N), generator=generator) < 0.3
    return (common_N + torch.randn((count, N), generator=generator)) * kept_KN


def crafted(attack: Attack, honest_KN: Tensor, rule: Rule = trusting, seed: int = 0, f: int = F) -> Tensor:
    return attack.changes(honest_KN, f, rule, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("word", CRAFTED)
def test_each_hostile_peer_sends_a_finite_vector_of_the_fragment(word: str):
    for count, f in product((1, 2, K), (1, F)):
        honest_KN = honest(count=count)
        found_FN = crafted(make_attack(word), honest_KN, f=f)
        assert found_FN.shape == (f, N)
        assert found_FN.dtype == honest_KN.dtype
        assert bool(found_FN.isfinite().all())


@pytest.mark.parametrize("word", CRAFTED)
def test_the_same_seed_sends_the_same_and_honest_changes_stay_as_they_are(
    word: str,
):
    attack, honest_KN = make_attack(word), honest()
    before_KN = honest_KN.clone()
    one_FN = crafted(attack, honest_KN)
    assert torch.equal(one_FN, crafted(attack, honest_KN))
    assert torch.equal(honest_KN, before_KN)
    other_FN = crafted(attack, honest_KN, seed=1)
    assert torch.equal(one_FN, other_FN) != word.startswith(("noise", "copycat")), "chance is the generator's alone"


@pytest.mark.parametrize("word", [word for word in CRAFTED if not word.startswith("optimised")])
def test_changes_of_another_unit_are_attacked_in_that_unit(word: str):
    """Learning rates differ by orders of magnitude: an attack that had a length of its own would be none for some."""
    attack, honest_KN = make_attack(word), honest()
    torch.testing.assert_close(
        crafted(attack, honest_KN * 1e-4) * 1e4,
        crafted(attack, honest_KN),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", RULES)
def test_no_fixed_attack_moves_a_rule_further_than_its_optimised_form(name: str):
    rule = tried(name, F)
    for seed in range(3):
        honest_KN = honest(seed)
        for word in FIXED:
            fixed, optimised = (make_attack(one) for one in (word, f"optimised_{word.split('(')[0]}"))
            if word == "ipm(tau=0.1)":
                continue  # no factor that the search is sure to try
            far = distance_from_honest(honest_KN, crafted(optimised, honest_KN, rule), rule)
            assert far >= distance_from_honest(honest_KN, crafted(fixed, honest_KN, rule), rule), (
                name,
                word,
                seed,
            )


def test_vectors_that_no_peer_takes_are_never_tried():
    """Where a run has diverged, the honest mean times a factor is beyond float32, and no compressor takes it."""

    def refusing(row_PN: Tensor) -> Tensor:
        assert bool(row_PN.isfinite().all())
        return row_PN.double().mean(0)

    honest_KN = honest() * 1e36
    assert bool(crafted(make_attack("optimised_ipm"), honest_KN, refusing).isfinite().all())


@pytest.mark.parametrize("word", ALL)
def test_only_attacks_on_data_change_labels_and_only_those_that_withhold_keep_frames_back(word: str):
    attack = make_attack(word)
    label_B = torch.arange(10)
    assert torch.equal(attack.labels(label_B, 10), label_B) != attack.poisons_data
    delivered = [all(attack.delivers(F, torch.Generator().manual_seed(seed))) for seed in range(20)]
    assert all(delivered) != attack.withholds


def test_every_attack_says_its_equation_and_its_source():
    for row in describe_attacks():
        assert row["equation"]
        assert str(row["source"])[-4:].isdigit() or "arXiv:" in str(row["source"])


# ---- test table ----
#
# The table of attacks from records.

ACCURACY = {  # rule, attack: of seeds 0 and 1
    ("mean", "none"): (0.80, 0.90),
    ("mean", "ipm"): (0.10, 0.20),
    ("mean", "noise"): (0.70, 0.60),
    ("rfa", "none"): (0.80, 0.81),
    ("rfa", "ipm"): (0.50, 0.90),
    ("rfa", "noise"): (0.60, 0.60),
}


def result(rule: str, attack: str, seed: int, accuracy: float, loss: float | None = 1.0, rounds: int = 20):
    return records.Result(records.Cell(rule, attack, 1.0, seed, rounds), accuracy, loss)


def measured():
    return [result(*key, seed, one) for key, both in ACCURACY.items() for seed, one in enumerate(both)]


@pytest.fixture
def grid():
    return grids.Grid.of(measured(), 1.0, 20)


def test_the_worst_case_is_the_least_of_the_means_over_seeds(grid):
    # ipm has the lowest single seed of rfa, noise the lower mean
    assert grid.worst("rfa") == grids.Worst("noise", pytest.approx(0.6), 0.5)
    assert grid.worst("mean") == grids.Worst("ipm", pytest.approx(0.15), 0.1)
    assert grid.ranked() == ["rfa", "mean"]


def test_a_seed_that_is_not_whole_counts_for_the_tax_alone():
    grid = grids.Grid.of([*measured(), result("mean", "none", 2, 0.5), result("mean", "ipm", 2, 0.0)], 1.0, 20)
    assert grid.seeds == [0, 1]
    assert grid.accuracies("mean", "ipm") == [0.1, 0.2]
    assert (grid.accuracies("mean", "none"), grid.tax("mean").seeds) == ([0.8, 0.9], 3)


def test_cells_of_another_setting_do_not_count():
    grid = grids.Grid.of([*measured(), result("rfa", "ipm", 0, 0.0, rounds=60)], 1.0, 20)
    assert grid.worst("rfa").lowest == 0.5


def test_the_tax_is_paired_by_seeds_in_percent_of_the_mean(grid):
    tax = grid.tax("rfa")
    assert (tax.mean, tax.seeds) == (pytest.approx(5.0), 2)
    # differences 0 and 10: deviation 7.07, t(0.95, 1) = 6.314
    assert tax.half == pytest.approx(6.3138 * math.sqrt(50) / math.sqrt(2), rel=1e-4)
    assert grid.tax("mean").mean == 0


def test_a_loss_that_is_not_finite_has_no_part_in_the_tax():
    results = [result("mean", "none", 0, 0.5, 2.0), result("rfa", "none", 0, 0.5, 2.1)]
    grid = grids.Grid.of([*results, result("mean", "none", 1, 0.5, 2.0), result("rfa", "none", 1, 0.1, None)], 1.0, 20)
    assert (grid.loss_tax("rfa").mean, grid.loss_tax("rfa").seeds) == (pytest.approx(5.0), 1)


@pytest.mark.parametrize(
    ("mean", "half", "expected"), [(0.1, 0.2, True), (1.0, 0.2, False), (0.4, 0.3, None), (0.1, math.nan, None)]
)
def test_a_bound_holds_or_breaks_only_where_all_of_the_interval_agrees(mean: float, half: float, expected: bool | None):
    assert grids.Tax(mean, half, 5).within(0.5) is expected


def test_the_markdown_names_the_worst_attack_in_bold(grid):
    assert report.attacked(grid).splitlines() == [
        "Accuracy in percent, the mean of 2 seeds; bold: the worst attack of the rule.",
        "",
        "| rule | worst case | lowest seed | none | IPM | noise |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| `rfa` | 60.0 | 50.0 | 80.5 | 70.0 | **60.0** |",
        "| `mean` | 15.0 | 10.0 | 85.0 | **15.0** | 65.0 |",
    ]


def test_a_setting_without_a_whole_seed_tells_its_taxes_alone():
    more = [result("mean", "none", 0, 0.8, rounds=60), result("rfa", "none", 0, 0.7, rounds=60)]
    first, second = grids.Grid.all_of([*measured(), *more])
    assert "bold" in report.markdown(first)
    assert report.markdown(second).splitlines() == [
        "## Shares from Dirichlet(1), 60 rounds",
        "",
        "Tax without an attack, paired with `mean`, 90 % t interval.",
        "",
        "| rule | accuracy lost, % | at most 0.5 % | loss above the mean's, % | seeds |",
        "| --- | ---: | --- | ---: | ---: |",
        "| `mean` | 0.00 | open | 0.00 | 1 |",
        "| `rfa` | 12.50 | open | 0.00 | 1 |",
    ]


def test_the_csv_has_a_line_for_each_rule_and_attack(grid):
    lines = report.as_csv([grid]).splitlines()
    assert lines[:3] == [
        "alpha,rounds,rule,attack,seeds,accuracy,lowest,highest",
        "1,20,mean,none,2,0.8500,0.8000,0.9000",
        "1,20,mean,ipm,2,0.1500,0.1000,0.2000",
    ]
    assert len(lines) == 7


def test_what_was_torn_by_a_crash_is_run_again_and_the_rest_is_kept(tmp_path: Path):
    path = tmp_path / "cells.jsonl"
    first, second = result("mean", "none", 0, 0.5, None), result("rfa", "none", 0, 0.6)
    records.append(path, first.cell, {"accuracy": 0.5, "loss": None})
    with path.open("a") as file:
        file.write('{"cell": {"rule": "rf')
    assert records.finished(path) == [first]
    records.append(path, second.cell, {"accuracy": 0.6, "loss": 1.0})
    assert records.finished(path) == [first, second]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def test_no_file_is_no_cell(tmp_path: Path):
    assert records.finished(tmp_path / "none.jsonl") == []


# ---- test published ----
#
# Attacks against what a published library sends; ``tests/golden/made_by/attacks.py`` makes the vectors again.

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/attacks.json").read_text(encoding="utf-8"))
CASES = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["kind"])


@CASES
def test_fixed_attacks_send_what_byzfl_sends(case: dict[str, Any]):
    honest_KN = torch.tensor(case["vectors"], dtype=torch.float64)
    for name, wanted in case["results"].items():
        if " " in name:
            continue  # below
        found_FN = make_attack(name).changes(honest_KN, case["f"], trusting, torch.Generator())
        np.testing.assert_allclose(found_FN, [wanted] * case["f"], rtol=1e-9, atol=1e-12, err_msg=name)


@CASES
def test_the_line_search_finds_what_byzfl_finds_on_each_side_and_for_each_rule(case: dict[str, Any]):
    honest_KN = torch.tensor(case["vectors"], dtype=torch.float64)
    for name, wanted in case["results"].items():
        if " " not in name:
            continue  # above
        attack, side, rule = name.split()
        from_N, along_N = {"alie": shift, "ipm": reversal}[attack](honest_KN)
        factor = searched(honest_KN, case["f"], tried(rule, case["f"]), from_N, along_N, int(side))
        np.testing.assert_allclose(from_N + along_N * factor, wanted, rtol=1e-6, atol=1e-6, err_msg=name)


def searched(honest_KN: Tensor, f: int, rule: Rule, from_N: Tensor, along_N: Tensor, side: int) -> float:
    def distance(factor: float) -> float:
        return distance_from_honest(honest_KN, alike(from_N + along_N * factor, f), rule)

    return line_search(distance, side * FIRST_STEP)[0]
