"""One peer of a cell as a process of its own: the shipped ``join`` on a real transport, with the laboratory's key,
first weights and batches of its rank.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from decentral.lab.cells import Cell
from decentral.lab.running import work_of
from decentral.manifest import Manifest
from decentral.peer import Peer, join
from decentral.swarm.identity import Identity
from decentral.training.inner import build_inner, warm_up
from decentral.trial.replicas import trial_signers

__all__ = ["Ended", "Place", "swarm_terms", "take_part"]

PATIENT = {"deadline_floor": 60.0, "deadline_ceiling": 600.0, "lease": 120.0, "shrink_after": 240.0}  # none is late


@dataclass(frozen=True, slots=True)
class Place:
    """Which peer of which cell."""

    cell: Cell
    rank: int
    folder: Path
    transport: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What a peer has at its end."""

    rank: int
    rounds: int
    steps: int
    anchors: Sequence[NDArray[np.float32]]  # flat, by fragment


def swarm_terms(cell: Cell) -> Manifest:
    """The cell's, with such patience that a loaded machine leaves no peer behind, which the laboratory never does."""
    return cell.manifest.changed(swarm=PATIENT | {"min_peers": cell.peers})


def take_part(place: Place, line: Any) -> None:  # Any: a multiprocessing Connection, typed by platform
    """Rank 0 sends its invite down the line, the others get it there; all send how they ended."""
    torch.set_num_threads(1)
    cell, out = place.cell, place.folder / f"peer{place.rank}"
    work, signer = work_of(cell), trial_signers(cell.peers)[place.rank]
    key = place.folder / f"key{place.rank}"
    Identity.import_text(Identity(key, signer).export_text(), key)
    model = work.model()
    optimizers = build_inner(cell.manifest.inner, model)
    schedulers = [warm_up(optimizer, cell.manifest.inner.warmup) for optimizer in optimizers]
    run = swarm_terms(cell) if place.rank == 0 else line.recv()
    with join(
        run,
        model,
        optimizers,
        out=out,
        listen=["/ip4/127.0.0.1/tcp/0"],
        scheduler=schedulers,
        identity_path=key,
        tokens_per_step=1,
        transport=place.transport,
        lan=False,
        commands=False,
        quiet=True,
        checkpoint_every=10**6,
        alone=True,
    ) as peer:
        if place.rank == 0:
            line.send(peer.invite)
        _wait_for_all(peer, cell.peers)
        steps = 0
        while not peer.done:
            work.loss(model, place.rank, steps).backward()  # type: ignore[no-untyped-call]
            steps += 1
            if cell.manifest.inner.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), cell.manifest.inner.clip)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            model.zero_grad()
        ended = Ended(place.rank, peer.round, steps, [one.numpy() for one in peer.anchor()])
    line.send(ended)


def _wait_for_all(peer: Peer, count: int) -> None:
    pause = threading.Event()
    while len(peer.status().members) < count:
        pause.wait(0.1)
