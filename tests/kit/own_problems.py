"""A small regression as somebody would write it for ``decentral tune``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 12


def build(number: int) -> tuple[nn.Module, Any, Callable[[], Tensor], Callable[[], Tensor]]:
    model = nn.Linear(FEATURES, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(number)
    wanted = torch.linspace(-1, 1, FEATURES)

    def step() -> Tensor:
        inputs = torch.randn(8, FEATURES, generator=generator)
        noise = torch.randn(8, generator=generator)
        loss = (model(inputs).squeeze(1) - inputs @ wanted - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    held_out = torch.randn(256, FEATURES, generator=torch.Generator().manual_seed(999))
    return model, optimizer, step, lambda: (model(held_out).squeeze(1) - held_out @ wanted).square().mean()


def nothing(number: int) -> nn.Module:
    return nn.Linear(1, 1)


def twice(number: int) -> tuple[nn.Module, Any, Callable[[], object], Callable[[], Tensor]]:
    model, optimizer, step, evaluate = build(number)
    return model, optimizer, lambda: (step(), step()), evaluate


def broken(number: int) -> tuple[nn.Module, Any, Callable[[], object], Callable[[], Tensor]]:
    model, optimizer, _, evaluate = build(number)
    return model, optimizer, lambda: 1 / 0, evaluate
