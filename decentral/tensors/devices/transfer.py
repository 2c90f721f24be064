"""Tensors from the processor to a device and back, by way of pinned memory, slab by slab.

A device copies by itself only from memory that the kernel may not move, which is dear to get; torch keeps what it got.
Pinning a whole model would take as much memory again, so a few slabs of it go to and fro: while the device copies one,
the processor fills, or empties, the next. The copy up is asynchronous: what is asked of the device afterwards waits
for it there, and the caller does not.
"""
# Shape suffix: N = values.

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from decentral.tensors.alloc import fresh
from decentral.tensors.elementwise import difference

__all__ = ["PROCESSOR", "all_beside", "beside", "less", "moved", "moved_together"]

PROCESSOR = torch.device("cpu")
_SLAB = 1 << 22  # values: 16 MiB of float32, a third of a millisecond of a fast line
_AHEAD = 3  # slabs on their way down at once
_WORTH_IT = 1 << 18  # values: below, one call is quicker


def beside(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor on the device of ``like``: itself where it is there."""
    return moved(tensor, like.device)


def less(left: Tensor, right: Tensor) -> Tensor:
    """``left - right``, where ``left`` lies."""
    return difference(left, beside(right, left))


def all_beside(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Each of them so."""
    return {name: beside(one, like) for name, one in tensors.items()}


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``: itself where it is there."""
    if tensor.device == device:
        return tensor
    large = tensor.dtype == torch.float32 and tensor.numel() >= _WORTH_IT and tensor.is_contiguous()
    if large and (tensor.device.type, device.type) == ("cpu", "cuda"):
        return _up(tensor.detach().view(-1), device).view(tensor.shape)
    if large and (tensor.device.type, device.type) == ("cuda", "cpu"):
        return _down(tensor.detach().view(-1)).view(tensor.shape)
    return tensor.to(device)


def moved_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Each on ``device``; of one dtype they cross as one: a device takes microseconds to begin a copy of any size."""
    found = list(tensors)
    for dtype in {one.dtype for one in tensors}:
        here = [i for i, one in enumerate(tensors) if one.dtype == dtype and one.device != device]
        if not here:
            continue
        whole = _at_once(torch.cat([tensors[i].reshape(-1) for i in here]), device)
        pieces = whole.split_with_sizes([tensors[i].numel() for i in here])
        for i, piece in zip(here, pieces, strict=True):
            found[i] = piece.view(tensors[i].shape)
    return found


def _at_once(flat_N: Tensor, device: torch.device) -> Tensor:
    """What is a small part of a model, and may stay in pinned memory."""
    if (flat_N.device.type, device.type) != ("cuda", "cpu"):
        return flat_N.to(device)
    pinned_N = torch.empty(flat_N.shape, dtype=flat_N.dtype, pin_memory=True)
    pinned_N.copy_(flat_N, non_blocking=True)
    torch.cuda.current_stream(flat_N.device).synchronize()
    return pinned_N


def _up(flat_N: Tensor, device: torch.device) -> Tensor:
    made_N = torch.empty(flat_N.numel(), dtype=torch.float32, device=device)
    for start in range(0, flat_N.numel(), _SLAB):
        part = flat_N[start : start + _SLAB]
        pinned = torch.empty(part.numel(), dtype=torch.float32, pin_memory=True).copy_(part)
        made_N[start : start + _SLAB].copy_(pinned, non_blocking=True)  # torch gives it out again once that is done
    return made_N


def _down(flat_N: Tensor) -> Tensor:
    made_N = fresh(flat_N.numel())
    begun: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def end() -> None:
        start, pinned, event = begun.popleft()
        event.synchronize()
        made_N[start : start + _SLAB].copy_(pinned)

    for start in range(0, flat_N.numel(), _SLAB):
        part = flat_N[start : start + _SLAB]
        pinned = torch.empty(part.numel(), dtype=torch.float32, pin_memory=True)
        pinned.copy_(part, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(flat_N.device))
        begun.append((start, pinned, event))
        if len(begun) > _AHEAD:
            end()
    while begun:
        end()
    return made_N
