"""Moments of the inner optimizer that a method averages: each a channel by torch's name, its last mean a state.

The functions are the hooks of such methods, which put them into their classes: ``adopt = adopted``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from decentral.optimizers.base import Live, OuterMethod, State
from decentral.optimizers.round_info import Contributor, RoundInfo

__all__ = ["MOMENTS", "adopted", "averaged", "moments_sent", "no_means", "which_it_has", "who_has_it"]

MOMENTS = "bf16"  # the range of float32: fp16 would flush most of a variance to zero
SECOND = "exp_avg_sq"  # a variance

# Shape suffix: N = elements of one fragment, flat float32.


class _Averages(Protocol):
    @property
    def lr(self) -> float: ...


def moments_sent(method: OuterMethod, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
    """Those that the inner optimizer has."""
    found = {channel.name: live.read_moment(channel.name, fragment) for channel in method.channels()[1:]}
    return {name: moment_N for name, moment_N in found.items() if moment_N is not None}


def which_it_has(method: OuterMethod, sent: Sequence[Tensor]) -> bytes:
    """A summary, of the channels: a bit for each moment that is due. One of zeros stands for none."""
    moments = sent[1:]
    return bytes([sum(1 << place for place, moment_N in enumerate(moments) if moment_N.any())]) if moments else b""


def who_has_it(
    method: OuterMethod, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
) -> list[float]:
    """Who has no moment yet counts nothing in its mean, rather than pull it to zero."""
    return [
        weight if one.summary and one.summary[0] >> place & 1 else 0.0
        for one, weight in zip(contributors, weights, strict=True)
    ]


def no_means(method: OuterMethod, anchor: Tensor) -> dict[str, Tensor]:
    """Before the first mean: zeros stand for none."""
    return {channel.name: torch.zeros_like(anchor) for channel in method.channels()[1:]}


def averaged(
    method: _Averages, anchor: Tensor, received: State, state: State, info: RoundInfo
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the parameters, and of the moments that are due, the others as they were."""
    with torch.no_grad():
        return anchor - received["change"] * method.lr, _last_means(received, state)


def adopted(method: OuterMethod, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
    """Put the means that are new into the inner optimizer, all or none: it is asked again after every step, and before
    its first one it has no place for them, as one that has other moments never has for some.
    """
    means = [(name, state[name]) for name in fresh if name in state and state[name].any()]
    if any(live.read_moment(name, fragment) is None for name, _ in means):
        return False
    return all(live.write_moment(name, fragment, mean_N) for name, mean_N in means)


def _last_means(received: State, state: State) -> dict[str, Tensor]:
    """The state with the means that came; rounding of what was sent must not make a variance negative."""
    kept = {name: received.get(name, mean_N).clone() for name, mean_N in state.items()}
    if SECOND in received and SECOND in kept:
        kept[SECOND].clamp_min_(0.0)
    return kept
