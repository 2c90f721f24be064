"""The demo's numbers, plain values without torch. How each was chosen: experiments/demo_tuning/README.md.

Spelled as tables of a manifest: ``preset_manifest(method, **demo_tables(method))``.
"""

from typing import Any, Final

Tables = dict[str, dict[str, Any]]  # Any: values of every key

# 635,776 parameters, 50 to 60 ms per inner step on one core of a 2020s server when nothing else runs.
DEMO_MODEL: Final[dict[str, int]] = {"hidden": 128, "layers": 3, "heads": 4, "context": 128}

# AdamW at the rate where the solo baseline itself is best, so that the swarm does not win by a bad baseline.
DEMO_INNER: Final[dict[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.1, "warmup": 20, "clip": 1.0}
DEMO_BETAS: Final[tuple[float, float]] = (0.9, 0.95)  # 0.95: some hundred steps are too few for 0.999
DEMO_BATCH_SIZE: Final[int] = 4

_H = 25  # inner steps per round, 4 to 6 s with all peers on two cores
DEMO_METHODS: Final[dict[str, Tables]] = {
    "diloco": {"inner": {"steps": _H}, "outer": {"learning_rate": 0.6}},
    # 24, a multiple of its three fragments. 4 of the 8 steps between two of them: a round on a busy machine takes about
    # a second
    "streaming": {"inner": {"steps": _H - _H % 3}, "outer": {"learning_rate": 0.4, "overlap": 4}},
    # Twenty rounds are too few for 64 of 4096 entries at rate 1: a coordinate would be sent every 64 rounds, and the
    # average divides by four what one peer sent. Five times the bytes per peer still leave a reduction above 500.
    # Twice the inner rate gains 0.03 to 0.09 bits at 200 steps; a solo peer is as good with either up to
    # there, and 0.06 worse with it at 500: its baseline is not the best one then.
    "sparseloco": {
        "inner": {"steps": _H, "learning_rate": 2e-3},
        "outer": {"learning_rate": 2.5},
        "compressor": {"chain": "topk(k=160, chunk=4096) >> signmag2"},
    },
    "noloco": {"inner": {"steps": _H}},
}


def demo_tables(method: str) -> Tables:
    """What the demo changes in the preset of this name, model, data and inner optimizer included."""
    own = DEMO_METHODS.get(method, {})
    shared: Tables = {"model": dict(DEMO_MODEL), "data": {"batch_size": DEMO_BATCH_SIZE}, "inner": dict(DEMO_INNER)}
    return {table: {**shared.get(table, {}), **own.get(table, {})} for table in [*shared, *(own.keys() - shared)]}
