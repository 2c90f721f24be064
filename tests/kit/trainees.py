"""Pairs of peers that train one whole model, and what they export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from decentral.manifest import Manifest, preset_manifest
from decentral.state.export import export
from tests.kit.problems import Swarm

INPUTS = torch.linspace(-3.0, 5.0, 8 * 6).view(8, 6)


def terms(preset: str, **tables: dict[str, Any]) -> Manifest:
    patient = {"deadline_floor": 5.0, "deadline_ceiling": 20.0, "lease": 10.0, "shrink_after": 12.0}
    run = {"rounds": 4, "salt": "whole", **tables.pop("run", {})}
    return preset_manifest(preset, run=run, swarm=patient, inner={"steps": 4, "clip": None}, **tables)


class Trainee:
    """A model and one peer's own data, of a scale of its own."""

    def __init__(self, model: nn.Module, number: int) -> None:
        torch.manual_seed(7)
        self.model, self.number = model, number
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.003)
        self.data = torch.Generator().manual_seed(number)

    def step(self) -> float:
        inputs = 3.0 + self.number + 2.0 * torch.randn(16, 6, generator=self.data)
        loss = (self.model(inputs) - inputs.mean()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def says(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            answer = self.model(INPUTS)
        self.model.train()
        return answer


def exported(make: Callable[[], nn.Module], out: Path) -> torch.Tensor:
    """What the exported model says, opened in a model that was built anew."""
    to = out / "exported"
    export(out / "checkpoints", to)
    opened = Trainee(make(), 0)
    opened.model.load_state_dict(load_file(to / "model.safetensors"))
    return opened.says()


def pair(manifest: Manifest, make: Callable[[], nn.Module], folder: Path, **given: Any) -> Swarm:
    """A founder and one that it invites, in ``peer0`` and ``peer1``."""
    return Swarm(manifest, folder, *(Trainee(make(), number) for number in range(2)), **given)


def answers(swarm: Swarm) -> list[torch.Tensor]:
    """Of all models, once the run is done."""
    return [trainee.says() for trainee in swarm.ends_alike().problems]


def assert_alike(*answers: torch.Tensor) -> None:
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=0, atol=1e-6)
