"""A small model in a loop of one's own, by one peer alone in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decentral.manifest import Manifest, preset_manifest
from decentral.peer import Peer, join
from decentral.swarm.identity import Identity
from decentral.transport.memory import MemoryNetwork

ROUNDS, STEPS = 3, 4  # of ``terms``
INPUTS = torch.linspace(-1, 1, 18).view(3, 6)


def terms(preset: str = "sparseloco", **tables: dict[str, Any]) -> Manifest:
    run = {"rounds": ROUNDS, "salt": "test", **tables.pop("run", {})}
    return preset_manifest(preset, run=run, inner={"steps": STEPS, **tables.pop("inner", {})}, **tables)


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))


def pair_of(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model[0].parameters(), lr=0.01), torch.optim.AdamW(model[1].parameters(), lr=0.01)]


def joined(folder: Path, model: nn.Module, optimizer: Any, manifest: Manifest | None = None, **given: Any) -> Peer:
    folder.mkdir(exist_ok=True)
    transport = MemoryNetwork().transport(Identity.load_or_create(folder / "identity.key").signer)
    return join(manifest or terms(), model, optimizer, out=folder, transport=transport, lan=False, **given, alone=True)


def loss_of(model: nn.Module) -> Tensor:
    return model(INPUTS.to(next(model.parameters()))).square().mean()  # type: ignore[no-any-return]


def backward(model: nn.Module) -> None:
    loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch's


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        backward(model)
        optimizer.step()
