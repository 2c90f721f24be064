"""What the manifest says of the inner optimizer, compared with the one that the training loop has.

A peer that trains at other settings than the rest wastes a run, or ruins it: one at a learning rate of 0.5 ended a run
at an accuracy of 0.09, and every process with exit code 0. Its loop is its own, so this is a warning and no refusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from decentral.manifest.terms import Inner

Difference = tuple[str, str, str]  # key, in the manifest, in the loop


def differences(inner: Inner, optimizers: Sequence[torch.optim.Optimizer]) -> list[Difference]:
    """Keys of ``[inner]`` that no parameter group of any optimizer agrees with; a group's own rate is a choice."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [float(group.get("initial_lr", group.get("lr", inner.learning_rate))) for group in groups]
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    names = [type(optimizer).__name__ for optimizer in optimizers]
    found = [
        _differs("learning_rate", inner.learning_rate, rates),
        _differs("weight_decay", inner.weight_decay, decays),
        None if any("adamw" in name.lower() for name in names) else ("optimizer", "AdamW", " and ".join(names)),
    ]
    return [difference for difference in found if difference is not None]


def warning(found: Sequence[Difference]) -> str:
    """The sentence for people."""
    told = ", ".join(f"{key} is {there} in the manifest and {here} in this loop" for key, there, here in found)
    return f"inner optimizer: {told}; peers that train at other settings than the rest can ruin a run"


def _differs(key: str, wanted: float, given: Sequence[float]) -> Difference | None:
    if any(math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-12) for value in given):
        return None
    return key, f"{wanted:g}", " and ".join(f"{value:g}" for value in sorted(set(given)))
