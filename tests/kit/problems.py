"""The problem that real peers learn: its terms, model, sums and a loop that runs them together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from decentral.manifest import Manifest, preset_manifest

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def run_terms(preset: str, **tables: dict[str, Any]) -> Manifest:
    limits = {"deadline_floor": 1.0, "deadline_ceiling": 20.0, "lease": 10.0, "shrink_after": 12.0, "min_peers": 1}
    swarm = {**limits, **tables.pop("swarm", {})}
    run = {"rounds": 6, "salt": "test", "seed": 0, **tables.pop("run", {})}
    inner = {"steps": 6, **tables.pop("inner", {})}
    return preset_manifest(preset, run=run, swarm=swarm, inner=inner, **tables)


class Sum(nn.Module):
    """Two blocks and a head, so that it has three fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        self.head = nn.Linear(64, 64, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs) for layer in self.layers) + self.head(inputs)


class Problem:
    """Least squares: the model, its optimizer, and one step of a peer's own data."""

    def __init__(self, seed: int, lr: float = 0.02) -> None:
        generator = torch.Generator().manual_seed(7)
        self.model = Sum()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(64, 64, generator=generator) * 0.1)
        self.goal = torch.randn(64, 64, generator=generator)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.data = torch.Generator().manual_seed(seed)

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])

    def step(self) -> float:
        inputs = torch.randn(32, 64, generator=self.data)
        loss = (self.model(inputs) - inputs @ self.goal.T).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def run_together(*bodies: Callable[[], None], timeout: float = 90.0) -> None:
    """Run each body on a thread of its own; the first failure is raised."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a peer hangs"
