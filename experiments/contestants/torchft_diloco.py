"""torchft's ``DiLoCo`` over gloo, with a lighthouse; the knob is ``sync_every``.

As in torchft's own DiLoCo tests, to which its README points: one fragment, SGD with Nesterov momentum outside, no
asynchronous quorum, every tensor for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # noqa: TID251  what ours is compared with

from experiments.contestants.loop import Entered, adamw
from experiments.contestants.seat import Seat
from experiments.contestants.torchft_service import PORT

TIMEOUT = timedelta(seconds=60)  # its default, of collectives
QUORUM = timedelta(seconds=300)  # longer than the time between two synchronisations, as it asks for
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@contextmanager
def enter(seat: Seat, model: nn.Module) -> Iterator[Entered]:
    """A replica group of one process; found by the lighthouse alone."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    store = TCPStore(seat.address, 0, is_master=True, wait_for_workers=False)
    optimizer = adamw(model.parameters())

    def load(state: dict[str, Any]) -> None:  # Any: torch's state dicts
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        timeout=TIMEOUT,
        quorum_timeout=QUORUM,
        init_sync=False,  # as its documentation says where all begin with the same weights
        rank=0,
        world_size=1,
        store_addr=seat.address,
        store_port=store.port,
        lighthouse_addr=f"http://{seat.service}:{PORT}",
        hostname=seat.address,
        replica_id=f"peer{seat.rank}",
    )
    outer = torch.optim.SGD(model.parameters(), **OUTER)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=int(seat.match.knob)):
        yield Entered(model, optimizer)
