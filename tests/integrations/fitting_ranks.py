"""One peer of two processes, by Lightning's DDP; each rank tells what it holds at the end."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist  # noqa: TID251 - to compare what the ranks hold

from tests.integrations.fitting import DecentralCallback, Line, data, trainer
from tests.integrations.tiny import NET


def main(manifest: str, out: str) -> None:
    module = Line()
    callback = DecentralCallback(manifest, out=out, **NET, alone=True)
    fitted = trainer(Path(out), callback, devices=2, strategy="ddp")
    fitted.fit(module, data())
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
    told: list[object] = [None, None]
    dist.all_gather_object(told, (fitted.global_step, flat.double().sum().item()))
    if fitted.is_global_zero:
        Path(out, "ranks.json").write_text(json.dumps(told))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as tests/peer/two_ranks.py
