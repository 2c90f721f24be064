"""Methods with a state or parts of each peer's own, by simulated peers: they learn, hold the same, and are judged."""

from __future__ import annotations

import pytest

from decentral.manifest import preset_manifest
from decentral.simulate.simulation import forecast
from tests.kit.tables import long_but

WITH_THEIR_OWN = ("masha", "partial_updates", "scaffold", "sparta")


@pytest.mark.parametrize("preset", long_but(["sparta"], WITH_THEIR_OWN))
def test_peers_learn_with_it_and_hold_the_same(preset: str):
    manifest = preset_manifest(preset, run={"rounds": 20, "salt": "own"}, inner={"steps": 4})
    asked = {"peers": 3, "profile": "lab", "seed": 1, "step_seconds": 0.2, "parameters": 10_000}
    told = forecast(manifest, **asked, rounds=8, learn=True)
    assert told["problems"] == []
    assert told["rounds"] == 8
    assert told["contributors"] > 2


@pytest.mark.parametrize(("profile", "least"), [pytest.param("lab", 2, marks=pytest.mark.long), ("home", 1)])
def test_eager_peers_learn_with_it_and_hold_the_same(profile: str, least: int):
    """On links of homes peers sleep and crash, on their way, too, and wake up with what they had."""
    manifest = preset_manifest("eager", run={"rounds": 20, "salt": "eager"}, inner={"steps": 8})
    asked = {"peers": 3, "profile": profile, "seed": 1, "step_seconds": 0.2, "parameters": 10_000}
    told = forecast(manifest, **asked, rounds=8, learn=True)
    assert told["problems"] == []
    assert told["rounds"] == 8
    assert told["contributors"] > least
