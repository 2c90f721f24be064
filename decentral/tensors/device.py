"""Tensors on an accelerator: where they lie, how they come and go, and how the work on them is told to it.

Each function does the same on the processor alone, where there is nothing to move, to wait for or to compile.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from decentral.tensors.memory import fresh
from decentral.tensors.ops import difference

__all__ = [
    "BYTES_A_PARAMETER",
    "PROCESSOR",
    "all_beside",
    "aside",
    "fuses",
    "in_slabs",
    "less",
    "move_together",
    "on_device_of",
    "one_kernel",
    "place_of",
    "slabs",
    "to_device",
    "try_compiled",
]

# Shape suffix: N = values.

PROCESSOR = torch.device("cpu")

# ---- place of a fragment before it is sent ----
#
# A fragment that is copied out of the live model, and what is made of it before it is sent, lie on the device that
# trains, if the model is on one CUDA device and the method's training side knows tensors of any device: then the
# pseudo-gradient is made there, and only what the compressor leaves of it crosses to the processor. That takes memory
# of the device: the local parameters, the change, what is owed before and after, and the anchor for as long as the
# change is made, 4 bytes a parameter each. Where that is more than a quarter of the device's, the processor's is taken.
# Anchors and outer states are on the processor in any case: their bits are the same on every peer.

BYTES_A_PARAMETER = 20
_MOST = 0.25  # of the device's memory


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def place_of(parameters: Iterable[Tensor], memory: Callable[[torch.device], int] = _memory) -> torch.device:
    """Return where the replica of a model with these trained parameters lies, each whole in this process; ``memory``:
    bytes of a device.
    """
    held = list(parameters)
    devices = {one.device for one in held}
    if len(devices) != 1:
        return PROCESSOR
    (device,) = devices
    numel = sum(one.numel() for one in held)
    return device if device.type == "cuda" and BYTES_A_PARAMETER * numel <= _MOST * memory(device) else PROCESSOR


# ---- transfer by way of pinned memory ----
#
# From the processor to a device and back, slab by slab.
#
# A device copies by itself only from memory that the kernel may not move, which is dear to get; torch keeps what it
# got. Pinning a whole model would take as much memory again, so a few slabs of it go to and fro: while the device
# copies one, the processor fills, or empties, the next. The copy up is asynchronous: what is asked of the device
# afterwards waits for it there, and the caller does not.

_PINNED = 1 << 22  # values: 16 MiB of float32, a third of a millisecond of a fast line
_AHEAD = 3  # slabs on their way down at once
_WORTH_A_BATCH = 1 << 18  # values: below, one call is quicker


def on_device_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor on the device of ``like``: itself where it is there."""
    return to_device(tensor, like.device)


def less(left: Tensor, right: Tensor) -> Tensor:
    """``left - right``, where ``left`` lies."""
    return difference(left, on_device_of(right, left))


def all_beside(tensors: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Each of them on the device of ``like``."""
    return {name: on_device_of(one, like) for name, one in tensors.items()}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on ``device``: itself where it is there."""
    if tensor.device == device:
        return tensor
    large = tensor.dtype == torch.float32 and tensor.numel() >= _WORTH_A_BATCH and tensor.is_contiguous()
    if large and (tensor.device.type, device.type) == ("cpu", "cuda"):
        return _up(tensor.detach().view(-1), device).view(tensor.shape)
    if large and (tensor.device.type, device.type) == ("cuda", "cpu"):
        return _down(tensor.detach().view(-1)).view(tensor.shape)
    return tensor.to(device)


def move_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
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
    """Move a small part of a model, which may stay in pinned memory."""
    if (flat_N.device.type, device.type) != ("cuda", "cpu"):
        return flat_N.to(device)
    pinned_N = torch.empty(flat_N.shape, dtype=flat_N.dtype, device="cpu", pin_memory=True)
    pinned_N.copy_(flat_N, non_blocking=True)
    torch.cuda.current_stream(flat_N.device).synchronize()
    return pinned_N


def _up(flat_N: Tensor, device: torch.device) -> Tensor:
    made_N = torch.empty(flat_N.numel(), dtype=torch.float32, device=device)
    for start in range(0, flat_N.numel(), _PINNED):
        part = flat_N[start : start + _PINNED]
        pinned = torch.empty(part.numel(), dtype=torch.float32, device="cpu", pin_memory=True).copy_(part)
        made_N[start : start + _PINNED].copy_(pinned, non_blocking=True)  # torch gives it out again once that is done
    return made_N


def _down(flat_N: Tensor) -> Tensor:
    made_N = fresh(flat_N.numel())
    begun: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def end() -> None:
        start, pinned, event = begun.popleft()
        event.synchronize()
        made_N[start : start + _PINNED].copy_(pinned)

    for start in range(0, flat_N.numel(), _PINNED):
        part = flat_N[start : start + _PINNED]
        pinned = torch.empty(part.numel(), dtype=torch.float32, device="cpu", pin_memory=True)
        pinned.copy_(part, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(flat_N.device))
        begun.append((start, pinned, event))
        if len(begun) > _AHEAD:
            end()
    while begun:
        end()
    return made_N


# ---- stream beside the one that trains ----
#
# Work that is asked of the device there does not wait for inner steps, nor they for it.


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Send all work inside to that stream, from this thread. It begins when all is there that was asked for before,
    which is an inner step or two; what it made must be waited for before the end: nothing else orders the streams.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


# ---- one kernel for elementwise work ----
#
# On a CUDA device each operation by itself goes through memory; compiled, all of them do so once.
#
# The same function is what runs everywhere else: on the processor, on short tensors, where there is no compiler for
# the device, and where the compiler fails. A compiled quotient may differ from the plain one in its last bit.

P = ParamSpec("P")
R = TypeVar("R")
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]  # Any: functions of tensors

_WORTH_A_KERNEL = 1 << 20  # elements: below, being told takes longer than the work
_failed: set[str] = set()  # functions that the compiler could not take; told once


def fuses(device: torch.device) -> bool:
    """Tell whether there is a compiler for this device."""
    return device.type == "cuda" and _has_compiler()


def one_kernel(function: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors, the first of which decides where it runs, and of numbers; compiled when first asked."""

    @functools.wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> R:
        first = given[0]
        if not isinstance(first, Tensor) or first.numel() < _WORTH_A_KERNEL or not fuses(first.device):
            return function(*given, **named)
        return try_compiled(function, _compile, given, named)

    return called


def try_compiled(function: Callable[..., R], compiler: Compiler, given: tuple[Any, ...], named: dict[str, Any]) -> R:
    """Return the function's result, as ``compiler`` makes it, or as it is where that fails."""
    name = function.__qualname__
    if name in _failed:
        return function(*given, **named)
    try:
        for one in given:
            if isinstance(one, Tensor) and one.dim():
                torch._dynamo.maybe_mark_dynamic(one, 0)  # a model has tensors of many lengths: one kernel for all
        with torch.no_grad():
            return cast(R, _compile_once(function, compiler)(*given, **named))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler stumbles over, the plain function does the same
        _failed.add(name)
        logging.getLogger(__name__).warning(
            "%s goes uncompiled on this device: %s", name, str(error).partition("\n")[0]
        )
        return function(*given, **named)


def _compile(function: Callable[..., R]) -> Callable[..., R]:
    """For each set of numbers anew, and of lengths but the first: a kernel that knows that of a block reads it once."""
    return torch.compile(function, dynamic=False)  # but for lengths of tensors, which are marked


@functools.cache
def _compile_once(function: Callable[..., R], compiler: Compiler) -> Callable[..., R]:
    return compiler(function)


@functools.cache
def _has_compiler() -> bool:
    return importlib.util.find_spec("triton") is not None


# ---- long tensors slab by slab ----
#
# Intermediate results stay in the cache, and take no memory to speak of.
#
# As one piece, nf4 needs sixteen bytes beside each value; and every operation of torch goes through memory again.

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
    """Return the results (N,) of ``work(start, stop)`` on the runs of single values; of one run they are not copied."""
    runs = list(slabs(value_N))
    if len(runs) == 1:
        return work(*runs[0])
    made_N = torch.empty(value_N.numel(), dtype=dtype, device=value_N.device)
    for start, stop in runs:
        made_N[start:stop] = work(start, stop)
    return made_N
