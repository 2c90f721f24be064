"""Peers that go on without the others: one alone, and values that would spoil a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import decentral
from decentral.peer import Peer, join
from decentral.swarm.identity import Identity
from decentral.transport.memory import MemoryNetwork
from tests.kit.problems import Problem

LONG = 60.0  # s


def alone(folder: Path, manifest: decentral.Manifest, problem: Problem, **given: Any) -> Peer:
    """A peer that nobody joins, over a network in memory."""
    identity = Identity.load_or_create(folder / "identity.key")
    transport = MemoryNetwork().transport(identity.signer)
    return join(manifest, problem.model, problem.optimizer, out=folder, transport=transport, **given, alone=True)


def told(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def contributed(events: list[dict[str, Any]]) -> int:
    return sum(bool(event.get("contributed") or event.get("partner")) for event in list(events))


def poison(problem: Problem) -> None:
    with torch.no_grad():
        problem.model.head.weight[0, 0] = float("nan")


def until(holds: Any, problem: Problem, dtype: torch.dtype = torch.float32, seconds: float = LONG) -> None:
    """Train until it holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        inputs = torch.randn(32, 64, generator=problem.data).to(dtype)
        (problem.model(inputs) - inputs @ problem.goal.T.to(dtype)).square().mean().backward()
        problem.optimizer.step()
        problem.optimizer.zero_grad()
