"""What ``make simulate`` draws beside the usual: every method, and whatever of a run's terms a manifest accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from decentral.manifest import Manifest, check_methods, preset_manifest
from decentral.simulate.checker import check
from decentral.simulate.simulation import simulate
from decentral.simulate.trace import Trace
from tests.kit.tables import PRESETS
from tests.simulate.draws import EVERY, SHORTER, TURN, scenario

SEEDS = range(TURN, TURN + 4 * len(PRESETS) * EVERY, EVERY)


@pytest.fixture(scope="module")
def drawn_terms() -> list[Manifest]:
    """Of so many seeds that each method is drawn four times."""
    return [scenario(seed, 1).manifest for seed in SEEDS]


def test_every_method_comes_in_turn_with_terms_that_a_run_accepts(drawn_terms: list[Manifest]):
    assert sorted(terms.outer.method for terms in drawn_terms) == sorted([*PRESETS] * 4)
    for terms in drawn_terms:
        check_methods(terms)


CHOICES: dict[str, tuple[Callable[[Manifest], object], int]] = {
    "compressors": (lambda terms: terms.compressor.chain, 20),
    "feedback": (lambda terms: terms.compressor.feedback.split("(")[0], 5),
    "rules": (lambda terms: terms.outer.aggregation and terms.outer.aggregation.rule, 8),
    "paces": (lambda terms: terms.inner.pace, 3),
    "fragments": (lambda terms: terms.outer.fragments, 3),
    "overlaps": (lambda terms: terms.outer.overlap, 3),
    "weightings": (lambda terms: terms.outer.weighting, 3),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_so_do_many_of_each_of_the_other_terms(choice: str, drawn_terms: list[Manifest]):
    term, least = CHOICES[choice]
    assert len({term(terms) for terms in drawn_terms}) >= least


def test_methods_meet_another_exchange_than_their_presets(drawn_terms: list[Manifest]):
    moved = {
        (terms.outer.method, terms.exchange.kind)
        for terms in drawn_terms
        if preset_manifest(terms.outer.method).exchange.kind != terms.exchange.kind
    }
    assert {kind for _, kind in moved} == {"gather", "reduce"}
    assert len(moved) >= 5


def problems_of(method: str, **tables: Mapping[str, object]) -> object:
    """Of a short run of three peers and of all that befalls them."""
    usual = scenario(3, 8)
    kept = {"run": usual.manifest.run.model_dump(), "swarm": usual.manifest.swarm.model_dump(), "inner": {"steps": 4}}
    manifest = preset_manifest(method, outer=SHORTER.get(method, {}), **kept, **tables)
    return simulate(replace(usual, manifest=manifest, lesson="noise")).to_dict()["problems"]


@pytest.mark.parametrize("method", ["cgad", "fedbuff"])
def test_a_reduce_of_a_method_that_counts_by_age_is_judged_by_its_equation(method: str):
    """It was judged by rows, which owners' results have not: no anchor was where it had to be."""
    assert problems_of(method, exchange={"kind": "reduce"}) == []


@pytest.mark.parametrize("feedback", ["none", "ef(beta=0.95)"])
def test_a_change_that_a_pair_sends_is_judged_as_it_was_sent(feedback: str):
    """It was judged as it was learnt: what fp8 loses of it was missed."""
    assert problems_of("noloco", compressor={"chain": "fp8(block=256)", "feedback": feedback}) == []


@pytest.mark.parametrize(
    ("swaps", "woke_with", "problems"),
    [
        ("after", 1.0, 0),  # the debt may be with the partner
        ("after", 3.0, 0),
        ("after", 2.0, 1),  # some of it is nowhere
        ("before", 1.0, 1),  # nobody was given what was saved since
        ("before", 3.0, 0),
    ],
)
def test_who_wakes_up_without_its_debt_has_begun_to_swap_since_it_saved(swaps: str, woke_with: float, problems: int):
    trace = Trace(lambda: 0.0)
    if swaps == "before":
        trace.note(0, 1, "swap_begins")
    trace.note(0, 1, "saved", {"0": torch.tensor([3.0]), "learnt/0": torch.tensor([1.0])}, round=5)
    if swaps == "after":
        trace.note(0, 1, "swap_begins")
    trace.note(0, 2, "resumed", {"0": torch.tensor([woke_with])}, round=5)
    assert check(trace, preset_manifest("noloco"), "noise").lost_updates == problems
