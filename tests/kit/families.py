"""Terms and processes of peers that are started by the command line, and what is awaited of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decentral.cli.demo_processes import DemoProcess, Family
from decentral.manifest import preset_manifest
from decentral.observe.status import Status, read_status
from decentral.swarm.invite import Invite
from decentral.wire.keys import Signer, peer_name

LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")
NET = (*LISTEN, "--transport", "native", "--no-lan")
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_name(Signer(bytes(32)).peer)}"  # nothing listens there
OVER = "This run is over: decentral export {} --to model/"
INVITE = str(Invite(bytes(32), (NOBODY,)))


def status_of(peer: DemoProcess) -> Status:
    return read_status(peer.directory)


def write_terms(folder: Path, rounds: int = 10**6, **tables: dict[str, Any]) -> None:
    """A manifest of a model of a few thousand parameters, which trains for hours if not told less, and its text."""
    usual = {
        "model": {"hidden": 16, "layers": 1, "heads": 2, "context": 16},
        "data": {"corpus": "foxes", "batch_size": 2},
        "swarm": {"deadline_ceiling": 10.0, "lease": 10.0, "shrink_after": 60.0},
    }
    manifest = preset_manifest("sparseloco", run={"rounds": rounds}, **(usual | tables))
    (folder / "run.toml").write_text(manifest.to_toml())
    (folder / "text").write_bytes(b"the quick brown fox. " * 5000)


def documented_files() -> set[str]:
    """Names of files in the first column of docs/run-directory.md, folders without their slash."""
    page = (Path(__file__).parents[2] / "docs/run-directory.md").read_text(encoding="utf-8")
    return {name.rstrip("/") for name in re.findall(r"^\| `([\w./]+)` \|", page.split("\n## ")[0], flags=re.MULTILINE)}


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as family:
        yield family
