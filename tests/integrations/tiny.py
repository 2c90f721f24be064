"""What the tests of all frameworks share: terms, a lone peer's options, one peer of two processes, and tiny data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from decentral.manifest import Manifest, preset_manifest
from decentral.swarm.identity import Identity
from decentral.transport.memory import MemoryNetwork

ROOT = Path(__file__).parents[2]
NET: dict[str, Any] = {"listen": ("/ip4/127.0.0.1/tcp/0",), "transport": "native", "lan": False, "quiet": True}


def terms(rounds: int = 4, steps: int = 3, preset: str = "diloco") -> Manifest:
    limits = {"deadline_floor": 1.0, "deadline_ceiling": 20.0, "lease": 10.0, "shrink_after": 12.0, "min_peers": 1}
    inner = {"steps": steps, "learning_rate": 1e-2, "weight_decay": 0.0}
    run = {"name": "trainer", "rounds": rounds, "salt": "trainer"}
    return preset_manifest(preset, run=run, inner=inner, swarm=limits, model={"task": "custom"})


def alone(out: Path) -> dict[str, Any]:
    """Options of a peer that nobody joins, over a network in memory."""
    identity = Identity.load_or_create(out / "identity.key")
    transport = MemoryNetwork().transport(identity.signer)
    return {"out": out, "transport": transport, "quiet": True, "lan": False, "alone": True}


def run_ranks(folder: Path, *command: str) -> Any:
    """One peer of two processes, by ``python COMMAND TERMS OUT``; what its ranks told."""
    (folder / "run.toml").write_text(terms().to_toml())
    run = subprocess.run(
        [sys.executable, *command, str(folder / "run.toml"), str(folder / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads((folder / "out" / "ranks.json").read_text())


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards from a random token."""

    def __init__(self, count: int, seed: int, length: int = 12) -> None:
        first = torch.randint(32, (count, 1), generator=torch.Generator().manual_seed(seed))
        self._rows = (first + torch.arange(length)) % 32

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Watched(Dataset[Any]):
    """Tells what is drawn."""

    def __init__(self, data: Any, order: list[int]) -> None:
        self._data, self._order = data, order

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        self._order.append(index)
        return self._data[index]
