"""Forecasts of somebody's own run: small tensors that stand for large ones."""

from __future__ import annotations

from decentral.manifest import preset_manifest
from decentral.simulate.forecast import forecast


def test_peers_on_home_links_take_part_though_frames_take_long():
    """Watchdogs counted the bytes of the small tensors, and took every link for dead."""
    manifest = preset_manifest(
        "diloco",
        run={"rounds": 20, "salt": "forecasts"},
        compressor={"chain": "int8", "feedback": "none"},
        outer={"norm_clip": None},
    )
    told = forecast(manifest, peers=4, profile="home", seed=1, rounds=6, step_seconds=1.0, parameters=20_000_000)
    assert told["problems"] == []
    assert told["rounds"] >= 6
    assert told["contributors"] >= 2.5  # 2.9 to 3.7 with other salts; 1 when every link was taken for dead
