"""Long tensors slab by slab: what is made on the way stays in the cache, and takes no memory to speak of.

As one piece, nf4 needs sixteen bytes beside each value; and every operation of torch goes through memory again.
"""
# Shape suffixes: N = values.

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from decentral.tensors.devices.one_kernel import fuses

__all__ = ["in_slabs", "slabs"]

_ON_PROCESSOR = 1 << 16  # values: 256 KiB of float32, several times in a core's second-level cache
_ELSEWHERE = 1 << 24  # a device is told of each operation on its own, which takes microseconds
_FUSED = 1 << 27  # what is one kernel leaves nothing on the way


def slabs(value_N: Tensor, block: int = 1) -> Iterator[tuple[int, int]]:
    """[start, stop) of runs of whole blocks; the last one may be short."""
    size = _ON_PROCESSOR if value_N.device.type == "cpu" else _FUSED if fuses(value_N.device) else _ELSEWHERE
    size = max(1, size // block) * block
    for start in range(0, value_N.numel(), size):
        yield start, min(start + size, value_N.numel())


def in_slabs(value_N: Tensor, dtype: torch.dtype, work: Callable[[int, int], Tensor]) -> Tensor:
    """What ``work(start, stop)`` makes of the runs of single values, (N,); of one run it is not copied."""
    runs = list(slabs(value_N))
    if len(runs) == 1:
        return work(*runs[0])
    made_N = torch.empty(value_N.numel(), dtype=dtype, device=value_N.device)
    for start, stop in runs:
        made_N[start:stop] = work(start, stop)
    return made_N
