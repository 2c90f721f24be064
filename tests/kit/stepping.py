"""One outer step of a method, as a record of so many contributors, or a pair, would make it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat

import torch
from torch import Tensor

from decentral.optimizers import Contributor, OuterMethod, RoundInfo, mean_pseudo_gradient
from decentral.replica.contribution import Contribution
from decentral.training.live_side import LiveSide

State = dict[str, Tensor]


def step(
    method: OuterMethod, anchor: Tensor, change: Tensor, state: Mapping[str, Tensor], peers: int = 1, number: int = 0
) -> tuple[Tensor, State]:
    """The step of ``peers`` contributors each of whom sent this change; further channels are zeros."""
    told = tuple(told_of(method, n, change, number) for n in range(peers))
    weights = method.weights(told, (1.0,) * peers, state)
    info = RoundInfo(number, told, tuple(weights), (tuple(change.shape),))
    return _stepped(method, anchor, [change] * peers, change, state, info)


def step_of(
    method: OuterMethod,
    anchor: Tensor,
    changes: Sequence[Tensor],
    state: Mapping[str, Tensor],
    number: int = 0,
    ages: Sequence[int] = (),
    sent: Sequence[Contribution] = (),
    members: int = 0,
) -> tuple[Tensor, State]:
    """The step of peers who sent these changes, each weighed by what it says of itself; as `Replica` makes it.

    ``sent``: what else they said and sent; without it further channels are zeros.
    """
    told = tuple(told_of(method, n, change, number) for n, change in enumerate(changes))
    told = tuple(replace(one, age=age) for one, age in zip(told, ages or repeat(0), strict=False))
    if sent:
        told = tuple(replace(one, summary=made.summary) for one, made in zip(told, sent, strict=True))
    weights = tuple(method.weights(told, (1.0,) * len(told), state))
    if not any(weights):
        return anchor, dict(state)
    info = RoundInfo(number, told, weights, (tuple(anchor.shape),), members=members)
    states = zip(*(made.states for made in sent), strict=True)
    return _stepped(method, anchor, changes, _mean(info, changes), state, info, [_mean(info, rows) for rows in states])


def _mean(info: RoundInfo, rows: Sequence[Tensor]) -> Tensor:
    told = zip(info.contributors, rows, info.weights, strict=True)
    return mean_pseudo_gradient([(one.peer, row, weight) for one, row, weight in told])


def told_of(method: OuterMethod, n: int, change: Tensor, number: int) -> Contributor:
    """The ``n``-th peer and what it says of its change."""
    zeros = [torch.zeros_like(change) for channel in method.channels()[1:] if channel.is_due(number)]
    live = LiveSide(peer=bytes([n]) * 32)
    live.begin(1, lambda fragment: 1)
    return Contributor(live.peer, summary=method.summary.says(live, 0, [change, *zeros]))


def _stepped(
    method: OuterMethod,
    anchor: Tensor,
    changes: Sequence[Tensor],
    mean: Tensor,
    state: Mapping[str, Tensor],
    info: RoundInfo,
    states: Sequence[Tensor] = (),
) -> tuple[Tensor, State]:
    after, state = method.outer_step(anchor, received_of(method, changes, mean, info.step, states), state, info)
    return after, state


def received_of(
    method: OuterMethod, changes: Sequence[Tensor], mean: Tensor, number: int, states: Sequence[Tensor] = ()
) -> State:
    """By channel what a step is handed: changes by themselves or their mean; without ``states`` zeros beside it."""
    due = [channel.name for channel in method.channels() if channel.is_due(number)]
    received = {name: torch.zeros_like(mean) for name in due} | dict(zip(due[1:], states, strict=False))
    return received | {"change": torch.stack(list(changes)) if method.channels()[0].combine == "each" else mean}


def pair_step(
    method: OuterMethod, slow: Tensor, mean_change: Tensor, sent: Tensor, mean_sent: Tensor, state: Mapping[str, Tensor]
) -> tuple[Tensor, State]:
    """The step of a pair: the mean of its changes, what this replica sent of its slow weights, and the pair's mean."""
    received = {"change": mean_change, "slow": torch.stack([sent, 2 * mean_sent - sent])}
    after, state = method.outer_step(slow, received, state, RoundInfo())
    return after, state


def swap(
    method: OuterMethod,
    anchors: Sequence[Tensor],
    changes: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    sent: Callable[[Tensor], Tensor] = lambda one: one,
) -> list[tuple[Tensor, State]]:
    """The step of all who meet, mostly two, or of one alone; each has its own anchor, change as contributed, and state.

    ``sent``: what compression does to parameters on their way. It is elementwise: tensors may be of many groups.
    """
    own = method.channels()[0].is_replica
    mine = zip(anchors, changes, states, strict=True)
    told = [method.proposal(*one) for one in mine] if own else list(anchors)
    rows = torch.stack([sent(one) for one in told] if len(told) > 1 else told)
    mean = sum(changes) / len(changes)
    return [
        method.outer_step(
            anchor,
            {
                "change": changes[i] if own else mean,
                method.channels()[-1].name: torch.cat([rows[i : i + 1], rows[:i], rows[i + 1 :]]),
            },
            states[i],
            RoundInfo(shapes=(tuple(anchor.shape),)),
        )
        for i, anchor in enumerate(anchors)
    ]
