"""The student of simulated swarms as somebody's own model: one peer's training by a manifest's inner optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from decentral.manifest.terms import INNER_OPTIMIZERS, Inner
from decentral.simulate.lessons import BATCH, HELD_OUT, NOISE, WIDTH, _loss, _terms, beginning
from decentral.training.inner import built, forward_only, inner_step
from decentral.trial.own_model import Build


def builder(inner: Inner, fragments: int) -> Build:
    def build(number: int) -> tuple[nn.Module, Any, Any, Any]:
        model = nn.ParameterList([nn.Parameter(one.view(WIDTH, WIDTH).clone()) for one in beginning(fragments)])
        terms, generator = _terms(inner), torch.Generator().manual_seed(number)
        if INNER_OPTIMIZERS[terms.optimizer_name].forward_only:
            optimizers = [forward_only(terms, list(model.named_parameters()), number)]
        else:
            optimizers = built(terms, list(model), [])

        def step() -> None:
            inputs_BD = torch.randn(BATCH, WIDTH, generator=generator)
            noise_BD = NOISE * torch.randn(BATCH, WIDTH, generator=generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            inner_step(terms, optimizers, lambda: _loss(list(model), inputs_BD, noise_BD))

        def evaluate() -> Tensor:
            inputs_BD = torch.randn(HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(0))
            return _loss(list(model), inputs_BD, torch.zeros(()))

        return model, optimizers, step, evaluate

    return build
