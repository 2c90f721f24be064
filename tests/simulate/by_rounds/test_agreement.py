"""A forecast by rounds against one in which every message is simulated."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from decentral.manifest import preset_manifest
from decentral.simulate.simulation import By, forecast

PARAMETERS = 5_000_000
BOTH: tuple[By, By] = ("messages", "rounds")


def found(preset: str, by: By, profile: str, peers: int, seed: int, rounds: int = 20, **tables: Any) -> dict[str, Any]:
    manifest = preset_manifest(preset, run={"rounds": 100, "salt": "agree"}, **{"inner": {"steps": 30}, **tables})
    given: dict[str, Any] = {"peers": peers, "profile": profile, "seed": seed, "parameters": PARAMETERS}
    return forecast(manifest, **given, by=by, rounds=rounds, step_seconds=1.0)


@pytest.mark.parametrize("preset", ["sparseloco", "diloco", "noloco", "streaming"])
@pytest.mark.parametrize("peers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_on_even_machines_rounds_take_and_send_as_much(preset: str, peers: int) -> None:
    messages, rounds = (found(preset, by, "even", peers, 1, rounds=6) for by in BOTH)
    assert rounds["seconds_per_round"] == pytest.approx(messages["seconds_per_round"], rel=0.02)
    assert rounds["seconds"] == pytest.approx(messages["seconds"], rel=0.03)
    assert rounds["bytes_per_peer"] == pytest.approx(messages["bytes_per_peer"], rel=0.05)
    assert rounds["utilisation"] == pytest.approx(messages["utilisation"], abs=0.04)
    assert (rounds["rounds"], rounds["contributors"]) == (messages["rounds"], messages["contributors"])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("preset", "profile", "peers", "within"),
    [
        ("sparseloco", "lab", 8, 0.08),
        ("diloco", "lab", 4, 0.08),
        ("streaming", "lab", 8, 0.08),
        ("noloco", "lab", 4, 0.12),
        ("sparseloco", "spot", 4, 0.25),
        ("sparseloco", "home", 4, 0.25),
        ("diloco", "spot", 4, 0.25),
    ],
)
def test_where_machines_differ_and_go_away_the_means_of_three_seeds_are_alike(
    preset: str, profile: str, peers: int, within: float
) -> None:
    """One seed alone may differ by more: a crash at another moment of a round is another run."""
    both = [[found(preset, by, profile, peers, seed) for seed in range(3)] for by in BOTH]
    for figure in ("seconds_per_round", "utilisation", *(() if preset == "noloco" else ("contributors",))):
        messages, rounds = (fmean(one[figure] for one in each) for each in both)
        assert rounds == pytest.approx(messages, rel=within), figure
