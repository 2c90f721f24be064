"""The terms of the run that is tormented: a tiny model, short rounds, patience of seconds."""

from __future__ import annotations

from decentral.manifest import Manifest, preset_manifest

LEASE = 6.0  # s
SHRINK_AFTER = 60.0  # s: longer than any planned absence of a majority, so nobody may ever commit alone


def terms(preset: str, seed: int) -> Manifest:
    """A manifest that trains until it is stopped."""
    return preset_manifest(
        preset,
        run={"rounds": 10**6, "salt": "chaos", "seed": seed},
        model={"hidden": 16, "layers": 1, "heads": 2, "context": 16},
        data={"batch_size": 2},
        inner={"steps": 4, "warmup": 0},
        outer={"fragments": 1, "overlap": 0},
        swarm={
            "min_peers": 1,
            "deadline_floor": 1.0,
            "deadline_ceiling": 6.0,
            "lease": LEASE,
            "shrink_after": SHRINK_AFTER,
        },
    )
