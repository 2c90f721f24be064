"""Patience with a peer's training, and the network that it does not have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from decentral.peer import Peer
from tests.kit.problems import LOOPBACK, Problem

PATIENCE = 60.0  # s


NET: dict[str, Any] = {"listen": LOOPBACK, "transport": "native", "lan": False}


def until(holds: Callable[[], bool], meanwhile: Callable[[], object] = lambda: threading.Event().wait(0.05)) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        meanwhile()


def train(peer: Peer, problem: Problem, rounds: int | None = None) -> None:
    """Until the run is over, or ``rounds`` are made."""
    until(lambda: peer.done or (rounds is not None and peer.round >= rounds), problem.step)
