"""Replicas that gossip in float64, and how fast their disagreement grows without training: exact, from the method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decentral.optimizers import OuterMethod
from tests.kit.stepping import swap

State = dict[str, Tensor]
Groups = Sequence[Sequence[int]]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


class Replicas:
    """All peers' parameters and states, (peers, N)."""

    def __init__(self, method: OuterMethod, x_PN: Tensor) -> None:
        self.method, self.x_PN = method, x_PN.clone()
        self.state = method.init(x_PN)

    def meet(self, change_PN: Tensor, groups: Groups, sent: Callable[[Tensor], Tensor] = lambda one: one) -> None:
        """Those of a group meet. ``change_PN``: as each contributes it."""
        x_PN, state = self.x_PN.clone(), {name: one.clone() for name, one in self.state.items()}
        for group in groups:
            states = [{name: one[peer] for name, one in self.state.items()} for peer in group]
            told = [change_PN[peer] for peer in group]
            stepped = swap(self.method, [self.x_PN[peer] for peer in group], told, states, sent)
            for peer, (after, kept) in zip(group, stepped, strict=True):
                x_PN[peer] = after
                for name, one in kept.items():
                    state[name][peer] = one
        self.x_PN, self.state = x_PN, state

    @property
    def mean(self) -> Tensor:
        return self.x_PN.mean(0)

    @property
    def disagreement(self) -> float:
        return float((self.x_PN - self.mean).norm())


def matching(peers: int, random: torch.Generator) -> list[list[int]]:
    """Random pairs; with an odd number one is left over."""
    order = torch.randperm(peers, generator=random).tolist()
    return [order[at : at + 2] for at in range(0, peers, 2)]


def unchecked(method: OuterMethod, **keys: Any) -> OuterMethod:
    """The method with keys that it would refuse."""
    other = object.__new__(type(method))
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        object.__setattr__(other, field.name, keys.get(field.name, getattr(method, field.name)))
    return other


def growth(method: OuterMethod, peers: int) -> float:
    """Per step, of the mean square of the disagreement over random pairs, without training.

    Replicas are alike and their sum is zero, so two different ones have -1/(peers - 1) of the covariance of one.
    """
    own, other = _columns(method, 2)
    (alone,) = _columns(method, 1)
    in_pair = torch.kron(own, own) + torch.kron(other, other)
    in_pair -= (torch.kron(own, other) + torch.kron(other, own)) / (peers - 1)
    share = 1.0 if peers % 2 == 0 else (peers - 1) / peers
    step = share * in_pair + (1 - share) * torch.kron(alone, alone)
    return float(torch.linalg.eigvals(step).abs().max())


def _columns(method: OuterMethod, peers: int) -> list[Tensor]:
    """The step as matrices: of what is the first's (parameters, then its state), to what each has afterwards."""
    names, zero = list(method.init(torch.zeros(1).double())), torch.zeros(1).double()
    columns: list[list[Tensor]] = [[] for _ in range(peers)]
    for unit in torch.eye(1 + len(names)).double():
        anchors = [unit[:1], *[zero] * (peers - 1)]
        first = {name: unit[1 + n : 2 + n] for n, name in enumerate(names)}
        states = [first, *[dict.fromkeys(names, zero)] * (peers - 1)]
        for n, (after, kept) in enumerate(swap(method, anchors, [zero] * peers, states)):
            columns[n].append(torch.cat([after, *(kept[name] for name in names)]))
    return [torch.stack(one, dim=1) for one in columns]
