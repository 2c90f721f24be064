"""What the manifest says of the inner optimizer, compared with the one that the training loop has.

A peer that trains at other settings than the rest wastes a run, or ruins it: one at a learning rate of 0.5 ended a run
at an accuracy of 0.09, and every process with exit code 0. Its loop is its own, so this is a warning and no refusal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from decentral.manifest.inner_optimizers import INNER_OPTIMIZERS, OWN_KEYS, InnerName
from decentral.manifest.training_terms import Inner

Difference = tuple[str, str, str]  # key, in the manifest, in the loop


def differences(inner: Inner, optimizers: Sequence[torch.optim.Optimizer]) -> list[Difference]:
    """Keys of ``[inner]`` that no parameter group of any optimizer agrees with; a group's own rate is a choice.

    The optimizer's own keys are compared where the manifest sets them.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [_highest_rate(group, inner.learning_rate) for group in groups]
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    found = [
        _differs("learning_rate", inner.learning_rate, rates),
        _differs("weight_decay", inner.weight_decay, decays),
        _another(inner, [type(optimizer).__name__ for optimizer in optimizers]),
    ]
    if found[-1] is None:
        found += [_differs(key, getattr(inner, key), _values_of(key, groups)) for key in _set_keys(inner)]
    return [difference for difference in found if difference is not None]


def _highest_rate(group: Mapping[str, Any], otherwise: float) -> float:
    """Schedulers keep the rate they began with as ``initial_lr``, OneCycleLR the one it goes up to as ``max_lr``."""
    return float(group.get("max_lr", group.get("initial_lr", group.get("lr", otherwise))))


def _another(inner: Inner, names: Sequence[str]) -> Difference | None:
    """None when one of the classes of these ``names`` is the manifest's optimizer, as an AdamW8bit is an AdamW."""
    title = INNER_OPTIMIZERS[inner.named].title
    return None if inner.named in map(_kind_of, names) else ("optimizer", title, " and ".join(names))


def _kind_of(name: str) -> InnerName | None:
    """An AdamWScheduleFree is no AdamW, and a QHADOPT no ADOPT."""
    order: Sequence[InnerName] = ("qh_adopt", "schedule_free", "gpa", "muon", "adopt", "adamw", "spsa", "sgd")
    found = (known for known in order if _letters(INNER_OPTIMIZERS[known].title) in _letters(name))
    return next(found, None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _set_keys(inner: Inner) -> list[str]:
    return [key for key in OWN_KEYS if getattr(inner, key) is not None]


def _values_of(key: str, groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """By the group's own name for it, or as one of torch's two betas."""
    if key in ("beta1", "beta2"):
        return [float(group["betas"][int(key[-1]) - 1]) for group in groups if len(group.get("betas", ())) == 2]
    return [float(group[key]) for group in groups if key in group]


def warning(found: Sequence[Difference]) -> str:
    """The sentence for people."""
    told = ", ".join(f"{key} is {there} in the manifest and {here} in this loop" for key, there, here in found)
    return f"inner optimizer: {told}; peers that train at other settings than the rest can ruin a run"


def _differs(key: str, wanted: float, given: Sequence[float]) -> Difference | None:
    if any(math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-12) for value in given):
        return None
    if not given:  # no group names it: another package has other names
        return None
    return key, f"{wanted:g}", " and ".join(f"{value:g}" for value in sorted(set(given)))
