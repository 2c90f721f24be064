"""Terms and processes of a run of two peers, each started by the command line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.manifest import preset_manifest
from decentral.observe.status import Status, read_status

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")


PATIENCE = 90.0  # seconds; a peer alone imports torch in 5, on a machine with a queue of ten in 50


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition holds."""
    deadline, nobody = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        nobody.wait(0.1)


def status_of(peer: DemoProcess) -> Status:
    return read_status(peer.directory)


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as family:
        yield family


@pytest.fixture
def terms(tmp_path: Path) -> list[str]:
    """A manifest that trains for hours, on a model of a few thousand parameters, and its text."""
    manifest = preset_manifest(
        "sparseloco",
        run={"rounds": 10**6},
        model={"hidden": 16, "layers": 1, "heads": 2, "context": 16},
        data={"corpus": "foxes", "batch_size": 2},
        swarm={"deadline_ceiling": 10.0, "lease": 10.0, "shrink_after": 60.0},
    )
    (tmp_path / "run.toml").write_text(manifest.to_toml())
    (tmp_path / "text").write_bytes(b"the quick brown fox. " * 5000)
    return ["--data", str(tmp_path / "text"), *LISTEN]
