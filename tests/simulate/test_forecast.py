"""Forecasts of somebody's own run: small tensors that stand for large ones."""

from __future__ import annotations

from decentral.manifest import preset_manifest
from decentral.simulate.forecast import forecast


def test_peers_on_home_links_join_and_take_part_though_snapshots_take_half_a_minute():
    """Nobody ever joined: watchdogs counted the bytes of the small tensors."""
    manifest = preset_manifest(
        "diloco", run={"rounds": 20, "salt": "forecast"}, compressor={"chain": "int8", "feedback": "none"}
    )
    told = forecast(manifest, peers=4, profile="home", seed=1, rounds=10, step_seconds=1.0, parameters=3_000_000)
    assert told["problems"] == []
    assert told["join_seconds"] < 120.0
    assert told["contributors"] > 2.0
