"""Gossip methods' equations once more, in float64 and from the papers: how one of a pair moves, but for the pull.

Over both of a pair the pulls towards their mean cancel, whatever was lost of what they told each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.simulate.equations.averaged import Keys

__all__ = ["NOT_LINEAR", "PULLS", "Stood", "state_name"]

# Shape suffix: N = elements of one fragment, flat float64.

_STATE = "state/"


def state_name(name: str) -> str:
    """What a tensor of a method's state is called in a trace."""
    return _STATE + name


@dataclass(frozen=True, slots=True)
class Stood:
    """Where one peer of a pair stood, and what it contributed."""

    before_N: Tensor
    change_N: Tensor  # as it was sent, or stayed at home: anchor - local, or by its paper local - anchor
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Stood:
        """From the trace's entry of a step."""
        state = {name.removeprefix(_STATE): one_N.double() for name, one_N in tensors.items() if _STATE in name}
        return cls(tensors["before"].double(), tensors["change"].double(), state)


def _pushed(one: Stood, keys: Keys) -> Tensor:
    """Equation 2 of arXiv:2506.10911, the sign as in the authors' code."""
    return float(keys["alpha"]) * one.state["momentum"] + float(keys["beta"]) * one.change_N


def _alone(one: Stood, keys: Keys) -> Tensor:
    return -float(keys["lr"]) * one.change_N


def _onward(one: Stood, keys: Keys) -> Tensor:
    """arXiv:2606.11081 without its Laplacian."""
    p_N = one.before_N - float(keys["lr"]) * one.change_N
    return p_N - one.before_N + float(keys["momentum"]) * (p_N - one.state["before"])


def _mixed(one: Stood, keys: Keys) -> Tensor:
    """The matrix exponential of arXiv:2306.08289 over one round."""
    rate = 1 / (2 * math.sqrt(keys["chi1"] * keys["chi2"]))
    flow = torch.linalg.matrix_exp(torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64))
    both_2N = torch.stack([one.before_N, one.state["twin"]]) - float(keys["lr"]) * one.change_N
    return torch.mv(both_2N.T, flow[0]) - one.before_N


PULLS: Mapping[str, Callable[[Stood, Keys], Tensor]] = {
    "noloco": _pushed,
    "gasloc": _onward,
    "a2cid2": _mixed,
    "ad_psgd": _alone,
    "late_merge": _alone,
    "variance_corrected": _alone,
}
NOT_LINEAR = {"variance_corrected"}  # it keeps the mean of a matrix's values, and no single one
