"""The same work on many tensors, on as many threads as torch may use; results come in order, whatever finished first.

Encoding spends its time in compiled code that releases the GIL. Small jobs stay on the calling thread, where nothing
has to be handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")

WORTH_IT = 1 << 20  # elements in all


def spread(work: Callable[[T], R], jobs: Sequence[T], numel: int) -> list[R]:
    """``[work(job) for job in jobs]``; the first error is raised, once all have ended.

    ``numel``: see `elements_here`.
    """
    threads = torch.get_num_threads()
    if threads == 1 or numel < WORTH_IT or len(jobs) == 1:
        return [work(job) for job in jobs]
    inference = torch.is_inference_mode_enabled()  # each thread has its own

    def inherited(job: T) -> R:
        with torch.inference_mode(inference):
            return work(job)

    return list(_pool(threads).map(inherited, jobs))


def lumps(sizes: Sequence[int], least: int) -> Iterator[slice]:
    """All places, in runs of at least so many elements, but for the last; one that is as large is a run by itself."""
    start = held = 0
    for i, size in enumerate(sizes):
        if size >= least and i > start:
            yield slice(start, i)
            start, held = i, 0
        held += size
        if held >= least:
            yield slice(start, i + 1)
            start, held = i + 1, 0
    if start < len(sizes):
        yield slice(start, len(sizes))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def elements_here(tensor: Tensor) -> int:
    """Elements that the processor works on: of another device's tensor none, as a thread only tells that what to do."""
    return tensor.numel() if tensor.device.type == "cpu" else 0


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="decentral-encode")


class ThreadsWanted:
    """torch's threads as somebody wants them, and what they were before where nobody does any more."""

    def __init__(self) -> None:
        self._wanted: int | None = None
        self._before = 0

    def want(self, count: int | None) -> None:
        """So many from now on; None: as many as before anybody wanted others."""
        if count == self._wanted:
            return
        if self._wanted is None:
            self._before = torch.get_num_threads()
        self._wanted = count
        torch.set_num_threads(count or self._before)
