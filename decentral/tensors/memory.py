"""New memory on the processor: memory that nobody holds any more, or else huge pages where Linux has them.

Tensors of a replica are replaced and never written to, so that whoever holds one has an immutable copy. What the last
one took is given out again once its last holder is gone: adding two tensors of 64 MiB took 43 ms into new small pages,
12 ms into huge ones and 9 ms into memory that was there already, for the kernel clears a page at its first touch, and
asks a virtual machine's host for it. Torch asks for small pages, numpy for huge ones.

Where memory is short, long vectors may lie in files instead (``offload_to``), which the kernel keeps in memory as long
as there is any to spare.
"""

import ctypes
import gc
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.errors import ConfigError, DiskError

__all__ = ["Lazy", "fresh", "fresh_like", "fresh_zeros", "give_back", "offload_to", "values_of"]

_WORTH_IT = 1 << 20  # bytes: below, malloc has it at hand
_KEPT = 6  # blocks that nobody holds: what one round needs beside what it leaves
_PAGE_OUT = 21  # MADV_PAGEOUT, since Linux 5.4; an older one refuses it, and all is as before
_SLACK = 1.25  # times as long may a block be: the parts of a reduce differ a little from round to round
# One end is filled while another thread takes: a deque's own steps are atomic, and a lock would be waited for by a
# collection of garbage that runs in the thread that has it.
_free: deque[NDArray[np.uint8]] = deque(maxlen=_KEPT)
_folder: Path | None = None  # of the files; None: memory


def offload_to(folder: Path | None) -> None:
    """From now on long vectors of this process lie in files of ``folder``, that nobody sees and that end with it; None:
    in memory. ConfigError where the folder cannot be written to.
    """
    global _folder
    if folder is not None:
        try:
            _map(folder, mmap.PAGESIZE)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"offload {folder}: {why}; name a folder on a disk that can be written to") from None
    _folder = folder
    _free.clear()


def give_back() -> None:
    """Give the system the memory that this process holds and does not use, as a pause begins: nobody takes it soon.

    Blocks that wait for the next round, an accelerator's cache, what malloc keeps of activations that are gone, and the
    pages of libraries, most of which only a training step reads: it has them from their files again.
    """
    _free.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError, TypeError):  # glibc has it, other systems' libraries have not
        ctypes.CDLL(None).malloc_trim(0)
        _page_out_files()


def _page_out_files() -> None:
    """Ask Linux to forget the pages of libraries: 190 MB of the 532 that a paused peer of a small model held, and 0.2 s
    longer for the step after the pause.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        spans = [line.split()[0].split("-") for line in maps if ".so" in line]
    for begin, end in ((int(one, 16) for one in span) for span in spans):
        madvise(begin, end - begin, _PAGE_OUT)


def fresh(numel: int) -> Tensor:
    """A flat float32 tensor on the processor, not filled."""
    known = _used_before(4 * numel)
    return torch.from_numpy(_lent(_new(4 * numel, zeros=False) if known is None else known, numel))


def fresh_zeros(numel: int) -> Tensor:
    """Flat float32 zeros on the processor."""
    known = _used_before(4 * numel)
    if known is None:  # the kernel gives out zeros
        return torch.from_numpy(_lent(_new(4 * numel, zeros=True), numel))
    return torch.from_numpy(_lent(known, numel)).zero_()


def fresh_like(tensor: Tensor) -> Tensor:
    """A contiguous float32 tensor of the same shape, on the same device, not filled."""
    if tensor.device.type != "cpu":
        return torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
    return fresh(tensor.numel()).view(tensor.shape)


def _new(nbytes: int, *, zeros: bool) -> NDArray[np.uint8]:
    if _folder is None or nbytes < _WORTH_IT:
        return np.zeros(nbytes, dtype=np.uint8) if zeros else np.empty(nbytes, dtype=np.uint8)
    try:
        return _map(_folder, nbytes)
    except OSError as error:
        raise DiskError(
            f"offload {_folder}: {error.strerror} for {nbytes} bytes; free some, or name another folder"
        ) from error


def _map(folder: Path, nbytes: int) -> NDArray[np.uint8]:
    """Zeros. Its blocks are on the disk before it is written to: a disk that is full is an error and no signal."""
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:
            file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)


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


# ---- tensors that take no memory until somebody reads them ----
#
# And never any, where somebody knows a way without their values.


class Lazy(Tensor):
    """A tensor of any device: whatever torch does with it, it does with the values, which are made once."""

    _made: Tensor | None

    @staticmethod
    def __new__(cls, make: Callable[[], Tensor], *more: Any) -> Any:  # Any: mypy takes Tensor's for another signature
        """``make``: the values."""
        return torch.empty(0, dtype=torch.float32, device="meta").as_subclass(cls)  # without memory

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make, self._made = make, None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: as torch's
        """Let torch have the values."""
        return func(*_with_values(args), **_with_values(kwargs or {}))

    def tensor(self) -> Tensor:
        """Return the values."""
        if self._made is None:
            self._made = self._make()
        return self._made

    @property
    def is_made(self) -> bool:
        """True once somebody has read them; they may have been changed since."""
        return self._made is not None


def values_of(given: Tensor) -> Tensor:
    """Return the tensor, with its values if none are made yet."""
    return given.tensor() if isinstance(given, Lazy) else given


def _with_values(given: Any) -> Any:  # Any: arguments of a function of torch
    if isinstance(given, dict):
        return {name: _with_values(value) for name, value in given.items()}
    if type(given) in (tuple, list):
        return type(given)(map(_with_values, given))
    return values_of(given) if isinstance(given, Tensor) else given
