"""The processes of one peer, and the bytes between them: on a process group of its own, so nothing else mixes with it.

On the processor (gloo), whatever the model trains on: the anchor is there too, and a process that ends closes its
connections, so that the others learn of it at once and fail as well, instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251  # the one place beside accelerate
from torch import Tensor

from decentral.errors import ConfigError, ProcessLost

MAIN = 0  # the rank that talks to the swarm
# The main process may look for company that long while the others wait for its word. One that has died is seen at once.
PATIENCE = timedelta(days=7)


class Processes:
    """This process among those of its peer. All of them make it at the same moment."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("join(accelerator=...): it has several processes, and torch.distributed has not begun")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        with _as_one():
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    @property
    def is_main(self) -> bool:
        """Whether it talks to the swarm."""
        return self.rank == MAIN

    def tell(self, numbers: Sequence[int], *, within: float | None = None) -> list[int]:
        """What the main process said: as many whole numbers below 2**63 as each gives. TimeoutError after ``within``
        seconds: then no more can be said.
        """
        told = torch.tensor(list(numbers), dtype=torch.int64)
        self._wait(self._broadcast(told), within)
        return [int(number) for number in told]

    def tell_bytes(self, data: bytes) -> bytes:
        """What the main process gave; the others give anything."""
        (nbytes,) = self.tell([len(data)])
        told = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main and data else torch.empty(0)
        told = told if self.is_main else torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._wait(self._broadcast(told), None)
        return told.numpy().tobytes() if nbytes else b""

    def any_of(self, found: list[int]) -> list[int]:
        """Each of the truth values that is so on some process; all give as many."""
        mine = torch.tensor(found, dtype=torch.int64)
        for rank in range(1, self.size):
            if self.is_main:
                theirs = torch.empty_like(mine)
                self.receive(theirs, rank)
                mine |= theirs
            elif self.rank == rank:
                self.send(mine, MAIN)
        return self.tell(mine.tolist())

    def broadcast(self, tensor: Tensor) -> None:
        """The main process's values into the tensor of every other one; contiguous, on the processor."""
        if tensor.numel():
            self._wait(self._broadcast(_bytes_of(tensor)), None)

    def send(self, tensor: Tensor, to: int) -> None:
        """One tensor's values, from wherever it is."""
        self.begin_send(tensor, to)()

    def begin_send(self, tensor: Tensor, to: int) -> Callable[[], None]:
        """The same; what it returns waits until that is done, and the tensor must not change before."""
        data = _bytes_of(tensor.detach().cpu().contiguous())
        with _as_one():
            work = dist.isend(data, to, group=self._group)
        return lambda: self._wait(work, None, data)

    def receive(self, into: Tensor, sender: int, *, within: float | None = None) -> None:
        """What ``sender`` sends next: a tensor of that shape and dtype; contiguous, on the processor."""
        self.begin_receive(into, sender, within=within)()

    def begin_receive(self, into: Tensor, sender: int, *, within: float | None = None) -> Callable[[], None]:
        """The same; what it returns waits until it is there."""
        with _as_one():
            work = dist.irecv(_bytes_of(into), sender, group=self._group)
        return lambda: self._wait(work, within)

    def _broadcast(self, tensor: Tensor) -> Any:  # Any: torch has no type for it
        with _as_one():
            return dist.broadcast(tensor, MAIN, group=self._group, async_op=True)

    def _wait(self, work: Any, within: float | None, held: Tensor | None = None) -> None:
        """``held``: what must not be freed before."""
        if within is None:
            with _as_one():
                work.wait()
            return
        try:
            work.wait(timedelta(seconds=within))
        except RuntimeError as error:
            raise TimeoutError("the other processes of this peer are elsewhere") from error


@contextmanager
def _as_one() -> Iterator[None]:
    """Turn what torch says of a process that is gone into one line."""
    try:
        yield
    except RuntimeError as error:
        raise ProcessLost(
            f"another process of this peer has ended ({str(error).splitlines()[0][:120]}), and they train as one; see "
            "its last lines, then start all of them again with the same folder"
        ) from error


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
