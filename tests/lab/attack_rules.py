"""What receivers make of rows, as attackers try it out: rules of the real registry, on dense vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from decentral.optimizers import make_aggregation
from tests.kit.aggregating import aggregated
from tests.lab.attacks import Rule

RULES = ("mean", "norm_clip", "krum", "nnm", "arc", "caf", "mda", "rfa", "centered_clip", "flag", "trimmed_mean")


def trusting(row_PN: Tensor) -> Tensor:
    return row_PN.mean(0)


def tried(name: str, f: int) -> Rule:
    """The rule of this name that suspects ``f``, where it asks."""
    rule = make_aggregation(name, {"f": f} if "f" in make_aggregation(name, {}).__slots__ else {})
    if name in ("trimmed_mean", "median"):  # in the vectors' own precision
        return rule.combine
    return lambda row_PN: torch.from_numpy(aggregated(rule, row_PN.double().numpy()))
