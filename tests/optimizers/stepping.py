"""One outer step of a method, as a record of so many contributors, or a pair, would make it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from decentral.optimizers import Contributor, OuterMethod, RoundInfo

State = dict[str, Tensor]


def step(
    method: OuterMethod, anchor: Tensor, change: Tensor, state: Mapping[str, Tensor], peers: int = 1, number: int = 0
) -> tuple[Tensor, State]:
    """The step of ``peers`` contributors whose mean change this is; further channels are zeros."""
    told = tuple(Contributor(bytes([n]) * 32) for n in range(peers))
    info = RoundInfo(number, told, (1.0,) * peers, (tuple(change.shape),))
    received = {channel.name: torch.zeros_like(anchor) for channel in method.channels() if channel.is_due(number)}
    after, state = method.outer_step(anchor, received | {"change": change}, state, info)
    return after, state


def pair_step(
    method: OuterMethod, slow: Tensor, mean_change: Tensor, sent: Tensor, mean_sent: Tensor, state: Mapping[str, Tensor]
) -> tuple[Tensor, State]:
    """The step of a pair: the mean of its changes, what this replica sent of its slow weights, and the pair's mean."""
    received = {"change": mean_change, "slow": torch.stack([sent, 2 * mean_sent - sent])}
    after, state = method.outer_step(slow, received, state, RoundInfo())
    return after, state
