"""The inner optimizers that a manifest can name: which keys of [inner] each has, and what they are when unset.

Plain values without torch; `decentral.training.inner` builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["INNER_OPTIMIZERS", "OWN_KEYS", "InnerName", "KnownOptimizer", "inner_optimizers_with"]

InnerName = Literal["adamw", "muon", "adopt", "sgd", "schedule_free", "gpa", "qh_adopt", "spsa"]

_BOTH = ("exp_avg", "exp_avg_sq")
_ADAM = {"beta1": 0.9, "beta2": 0.95}  # 0.95: some hundred steps are too few for 0.999
OWN_KEYS: Final = ("momentum", "beta1", "beta2", "mixing", "averaging")  # of [inner], that only some of them have


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """One of them."""

    title: str  # as people write it; in small letters and without "-" and "_" a part of its class's name
    keys: Mapping[str, float]  # its keys of [inner] beside those that all have, and their values when unset
    moments: tuple[str, ...] = ()  # which it has of every parameter, by torch's names
    forward_only: bool = False  # it steps by losses, and neither clip nor weight decay is anything to it


INNER_OPTIMIZERS: Final[Mapping[InnerName, KnownOptimizer]] = {
    "adamw": KnownOptimizer("AdamW", _ADAM, _BOTH),
    "muon": KnownOptimizer("Muon", {"momentum": 0.9, **_ADAM}),  # the betas are of the AdamW beside it
    "adopt": KnownOptimizer("ADOPT", {"beta1": 0.9, "beta2": 0.9999}, _BOTH),
    "sgd": KnownOptimizer("SGD", {"momentum": 0.9}),
    "schedule_free": KnownOptimizer("Schedule-Free", {"beta2": 0.95, "mixing": 0.9}, ("exp_avg_sq",)),
    "gpa": KnownOptimizer("GPA", {**_ADAM, "mixing": 0.7, "averaging": 0.9967}, _BOTH),
    "spsa": KnownOptimizer("SPSA", {}, forward_only=True),
    "qh_adopt": KnownOptimizer("QH-ADOPT", {"beta1": 0.99, "beta2": 0.9999, "mixing": 0.7}, _BOTH),
}


def inner_optimizers_with(key: str) -> list[str]:
    """Those that have this key of [inner]."""
    return [name for name, known in INNER_OPTIMIZERS.items() if key in known.keys]
