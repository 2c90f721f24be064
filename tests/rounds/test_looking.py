"""What rounds tell of the swarm: figures that are there, finite, and the same on all peers who see the same frames."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from decentral.replica.diagnosing.names import (
    MEAN_COSINE,
    NAMES,
    NORM_DISPERSION,
    Figures,
)
from tests.lab.nodes import Lab
from tests.laws.tables import PRESETS

BETWEEN = (NORM_DISPERSION, MEAN_COSINE)
Told = list[list[Figures]]


def blocks() -> torch.nn.Module:
    """Enough of them for every preset's fragments, and small."""
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))


def told_by(run_lab: Any, manifest: Any, rounds: int = 3, peers: int = 3, **given: Any) -> tuple[Lab, Told]:
    """By peer the figures of some rounds."""
    told: Told = []
    labs: list[Lab] = []

    async def script(lab: Lab) -> None:
        labs.append(lab)
        for _ in range(peers):
            told.append([])
            lab.add().node.driver.state.on_figures = told[-1].append
        await lab.all_members()
        seen = [len(one) for one in told]
        await lab.until(lambda: all(len(one) >= n + rounds for one, n in zip(told, seen, strict=True)))

    run_lab(manifest, script, make_model=blocks, **given)
    return labs[0], told


@pytest.mark.parametrize("preset", PRESETS)
def test_every_method_has_figures_that_are_finite_and_alike_on_all_peers_that_agree(run_lab, terms, preset, caplog):
    manifest = terms(preset)
    _, told = told_by(run_lab, manifest, spread=1.0)
    for figures in (one for peer in told for one in peer):
        assert set(figures.values) <= set(NAMES)
        assert all(math.isfinite(value) for value in figures.values.values())
        assert figures.values
    if manifest.exchange.kind == "gather":
        check_alike(told)
    assert not caplog.records, "nothing went wrong in making them"


def check_alike(told: Told) -> None:
    by_step = defaultdict(list)
    for figures in (one for peer in told for one in peer):
        by_step[figures.outer_step].append(figures)
    met = [figures for figures in by_step.values() if len(figures) == len(told)]
    assert met
    for first, *others in met:
        assert not first.of_part
        for other in others:
            assert other.contributors == first.contributors
            for name in BETWEEN:
                assert other.values.get(name) == first.values.get(name)
