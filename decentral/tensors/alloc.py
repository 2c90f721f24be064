"""New memory on the processor: memory that nobody holds any more, or else huge pages where Linux has them.

Tensors of a replica are replaced and never written to, so that whoever holds one has an immutable copy. What the last
one took is given out again once its last holder is gone: adding two tensors of 64 MiB took 43 ms into new small pages,
12 ms into huge ones and 9 ms into memory that was there already, for the kernel clears a page at its first touch, and
asks a virtual machine's host for it. Torch asks for small pages, numpy for huge ones.
"""

import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["fresh", "fresh_like", "fresh_zeros"]

_WORTH_IT = 1 << 20  # bytes: below, malloc has it at hand
_KEPT = 6  # blocks that nobody holds: what one round needs beside what it leaves
_SLACK = 1.25  # times as long may a block be: the parts of a reduce differ a little from round to round
# One end is filled while another thread takes: a deque's own steps are atomic, and a lock would be waited for by a
# collection of garbage that runs in the thread that has it.
_free: deque[NDArray[np.uint8]] = deque(maxlen=_KEPT)


def fresh(numel: int) -> Tensor:
    """A flat float32 tensor on the processor, not filled."""
    known = _used_before(4 * numel)
    return torch.from_numpy(_lent(np.empty(4 * numel, dtype=np.uint8) if known is None else known, numel))


def fresh_zeros(numel: int) -> Tensor:
    """Flat float32 zeros on the processor."""
    known = _used_before(4 * numel)
    if known is None:  # the kernel gives out zeros
        return torch.from_numpy(_lent(np.zeros(4 * numel, dtype=np.uint8), numel))
    return torch.from_numpy(_lent(known, numel)).zero_()


def fresh_like(tensor: Tensor) -> Tensor:
    """A contiguous float32 tensor of the same shape, on the same device, not filled."""
    if tensor.device.type != "cpu":
        return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    return fresh(tensor.numel()).view(tensor.shape)


def _used_before(nbytes: int) -> NDArray[np.uint8] | None:
    """A block that is long enough, and not much longer; None: there is none."""
    for _ in range(len(_free)):
        try:
            block = _free.popleft()
        except IndexError:  # another thread was quicker
            return None
        if nbytes <= block.nbytes <= _SLACK * nbytes:
            return block
        _free.append(block)
    return None


def _lent(block: NDArray[np.uint8], numel: int) -> NDArray[np.float32]:
    """The block as floats; it comes back when they are collected, and the tensors and views made of them hold them."""
    lent_N = block[: 4 * numel].view(np.float32)
    if block.nbytes >= _WORTH_IT:
        weakref.finalize(lent_N, _free.append, block).atexit = False
    return lent_N
