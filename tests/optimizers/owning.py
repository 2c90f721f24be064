"""Methods whose peers train parts: slices of a model, and a small mixture of experts with who says what of it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor, nn

from decentral.optimizers.partial_updates import PartialUpdates
from tests.kit.replicas import NUMEL

EXPERTS = 5


def randn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def span(method: PartialUpdates, number: int, numel: int = NUMEL) -> slice:
    """The parameters of a slice."""
    return slice(numel * number // method.slices, numel * (number + 1) // method.slices)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)


class Mixture(nn.Module):
    """A router, and experts of which it takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))


def mixture() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Mixture(), Mixture()])
    return model


LAYOUT = {name: tuple(parameter.shape) for name, parameter in mixture().named_parameters()}


def said(place: int, count: int) -> bytes:
    """That a peer has this place of so many."""
    return struct.pack("<HH", place, count)
