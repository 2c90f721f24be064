"""The demo's numbers, plain values without torch. How each was chosen: experiments/demo_tuning/README.md.

Spelled as tables of a manifest: ``preset_manifest(method, **demo_tables(method))``.
"""

from typing import Any, Final

from decentral.manifest.terms import INNER_OPTIMIZERS

Tables = dict[str, dict[str, Any]]  # Any: values of every key

# 635,776 parameters, 50 to 60 ms per inner step on one core of a 2020s server when nothing else runs.
DEMO_MODEL: Final[dict[str, int]] = {"hidden": 128, "layers": 3, "heads": 4, "context": 128}

# AdamW at the rate where the solo baseline itself is best, so that the swarm does not win by a bad baseline.
DEMO_INNER: Final[dict[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup": 20, "clip": 1.0}
_ADAMW: Final = INNER_OPTIMIZERS["adamw"].keys
DEMO_BETAS: Final[tuple[float, float]] = (_ADAMW["beta1"], _ADAMW["beta2"])
DEMO_BATCH_SIZE: Final[int] = 4

DEMO_STEPS: Final[int] = 25  # H, inner steps per round: 4 to 6 s with all peers on two cores


def demo_tables(method: str) -> Tables:
    """What the demo changes in the preset of this name: what all share, then what the preset says of a demo."""
    from decentral.optimizers import presets  # torch

    chosen = presets().get(method)
    own = {} if chosen is None else chosen.demo
    inner = {"steps": DEMO_STEPS, **DEMO_INNER}
    shared: Tables = {"model": dict(DEMO_MODEL), "data": {"batch_size": DEMO_BATCH_SIZE}, "inner": inner}
    return {table: {**shared.get(table, {}), **own.get(table, {})} for table in [*shared, *(own.keys() - shared)]}
