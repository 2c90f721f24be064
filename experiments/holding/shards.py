"""How long reading and writing a model that two processes shard takes, beside one that a process holds whole.

OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true python -m accelerate.commands.launch --num_processes 2 --multi_gpu \
    -m experiments.holding.shards
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable

from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard  # noqa: TID251

from decentral.training.live_model import LiveModel

WIDTH, BLOCKS, FRAGMENTS, TIMES = 1024, 30, 5, 5  # 31.5 million parameters


def main() -> None:
    accelerator = Accelerator(cpu=True)
    told = []
    for sharded in (False, True):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
        if sharded:
            for block in model:
                fully_shard(block)
            fully_shard(model)
        live = LiveModel(model, FRAGMENTS, accelerator)
        if not accelerator.is_main_process:
            live.share((), False, ())
            continue
        flat_N = live.read(0)
        reading = usual(lambda live=live: [live.read(f) for f in range(FRAGMENTS)])
        writing = usual(lambda live=live, flat_N=flat_N: [live.write(f, flat_N) for f in range(FRAGMENTS)])
        live.share((), True, ())
        kind = "sharded" if sharded else "whole"
        told.append(f"{kind}: all fragments read in {reading:.3f} s, written in {writing:.3f} s")
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(*told, f"rank {accelerator.process_index}: {megabytes:.0f} MB at most", sep="\n", flush=True)
    accelerator.wait_for_everyone()


def usual(work: Callable[[], object]) -> float:
    found = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
