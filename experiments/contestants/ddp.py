"""``DistributedDataParallel`` over gloo: gradients averaged at every step; the knob is a communication hook of torch's.

A peer that goes ends it for all; nobody can join.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist  # noqa: TID251  what ours is compared with
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook  # noqa: TID251  as above
from torch.nn.parallel import DistributedDataParallel

from experiments.contestants.loop import Entered, adamw
from experiments.contestants.seat import Seat

LIMIT = timedelta(seconds=300)
WARM_UP = 10  # steps before PowerSGD compresses


@contextmanager
def enter(seat: Seat, model: nn.Module) -> Iterator[Entered]:
    """Returns when all are there."""
    os.environ["GLOO_SOCKET_IFNAME"] = seat.interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.first_address}:29500",
        rank=seat.rank,
        world_size=seat.match.peers,
        timeout=LIMIT,
    )
    wrapped = DistributedDataParallel(model)
    if seat.match.knob == "fp16":
        wrapped.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif seat.match.knob == "powersgd":
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    yield Entered(wrapped, adamw(model.parameters()), sends_in_backward=True)
