"""What a researcher brings: a line to be learnt from noise, and an outer method."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from decentral.optimizers import OuterMethod, rate


@dataclass(frozen=True, slots=True)
class Halfway(OuterMethod):
    lr: float = rate(0.5)

    def outer_step(self, anchor, received, state, info):
        return anchor - received["change"] * self.lr, {}


class Line:
    unit = "squared metres"
    tokens_of_step = 8

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, rank: int, step: int, batch: int = 8) -> Tensor:
        inputs = torch.randn(batch, 4)
        return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))

    def held_out(self, model: nn.Module) -> Tensor:
        return self.loss(model, 0, 0, 64)


class OfPeers(Line):
    """Each peer has inputs of its own size, by what the terms say."""

    def __init__(self, terms, peers: int) -> None:
        self.scale = peers * terms.run.seed
