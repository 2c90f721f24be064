"""The demo's numbers, plain values without torch. How each was chosen: experiments/demo_tuning/README.md."""

from typing import Any, Final

# 636,288 parameters in the order of 50 ms per inner step on one core of a 2020s server.
DEMO_MODEL: Final[dict[str, int]] = {"hidden": 128, "layers": 3, "heads": 4, "context": 128}

# AdamW; the rate at which the solo baseline itself is best.
DEMO_INNER: Final[dict[str, Any]] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "clip": 1.0,
    "batch_size": 4,
    "warmup": 20,
}
