"""Passes over a model that is being trained, in the memory where it lies: a row per parameter, vectors beside them.

While they run, training stands still. So each is one pass, writes nothing as long as the model but what is asked for,
and rounds as the same steps one by one do. The norms' last bits depend on the number of threads and of rows.
"""
# Shape suffix: N = values of all rows, in order; flat float32 on the processor.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.alloc import fresh
from decentral.tensors.compiled import compiled
from decentral.tensors.lying import LANES, flat, lie_alike
from decentral.tensors.threads import WORTH_IT, spread

__all__ = ["as_rows", "carry_and_copy", "carry_rows", "copy_and_difference", "copy_and_norm"]

Rows = Sequence[Tensor]
Arrays = tuple[Any, ...]  # numpy's


def as_rows(tensors: Iterable[Tensor]) -> Rows | None:
    """The tensors, each flat; None where one is not float32 on the processor and in a row, or two share memory: what
    is changed where it lies would be changed twice.
    """
    given = [tensor.detach() for tensor in tensors]
    if not all(map(lie_alike, given)):
        return None
    ends = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in given if one.numel())
    if any(stop > start for (_, stop), (start, _) in pairwise(ends)):
        return None
    return [one.view(-1) for one in given]


def carry_rows(rows: Rows, sent_N: Tensor, anchor_N: Tensor) -> None:
    """``rows <- anchor + (rows - sent)``, and ``anchor`` bit for bit where the two are equal."""
    _over(rows, (sent_N, anchor_N), _carry)
    _changed(rows)


def carry_and_copy(rows: Rows, sent_N: Tensor, anchor_N: Tensor) -> tuple[Tensor, float]:
    """`carry_rows`; what they are then, new, and the norm of ``anchor - rows``."""
    copy_N = fresh(anchor_N.numel())
    squares = _over(rows, (sent_N, anchor_N, copy_N), _carry_and_copy)
    _changed(rows)
    return copy_N, math.sqrt(sum(squares))


def copy_and_norm(rows: Rows, base_N: Tensor) -> tuple[Tensor, float]:
    """The rows, new, and the norm of ``base - rows``: finite if, and only if, all of it is."""
    copy_N = fresh(base_N.numel())
    return copy_N, math.sqrt(sum(_over(rows, (base_N, copy_N), _copy_and_squares)))


def copy_and_difference(rows: Rows, base_N: Tensor) -> tuple[Tensor, Tensor, float]:
    """The rows, ``base - rows``, both new, and the norm of that: finite if, and only if, all of it is."""
    copy_N, made_N = fresh(base_N.numel()), fresh(base_N.numel())
    return copy_N, made_N, math.sqrt(sum(_over(rows, (base_N, copy_N, made_N), _copy_and_difference)))


def _changed(rows: Rows) -> None:
    """A graph that still needs the old values hears of it, as it does of torch's own writes."""
    for row in rows:  # not all at once: whether older versions of torch take a list is not documented
        torch.autograd.graph.increment_version(row)


def _over(rows: Rows, beside: Sequence[Tensor], kernel: Callable[..., Any]) -> list[float]:
    """What the kernel gives of each piece of the rows and of the vectors beside them, cut alike for the threads."""
    numel = sum(row.numel() for row in rows)
    assert all(lie_alike(one) and one.numel() == numel for one in beside), "vectors as long as the rows together"
    jobs = _jobs([flat(row) for row in rows], [flat(one) for one in beside], numel)
    found = spread(lambda cuts: [float(kernel(*cut)) for cut in cuts], jobs, numel)
    return [one for job in found for one in job]


def _jobs(rows: Sequence[Any], beside: Sequence[Any], numel: int) -> list[list[Arrays]]:
    """For each thread pieces of rows, as many values for all of them, in order."""
    threads = torch.get_num_threads() if numel >= WORTH_IT else 1
    each, jobs, at = max(1, -(-numel // threads)), list[list[Arrays]]([[]]), 0
    for row in rows:
        start = 0
        while start < row.size:
            if at == each * len(jobs):
                jobs.append([])
            stop = min(row.size, start + each * len(jobs) - at)
            cuts = tuple(one[at : at + stop - start] for one in beside)
            jobs[-1].append((row[start:stop], *cuts))
            at, start = at + stop - start, stop
    return jobs


@compiled
def _carry(live, sent, anchor):  # type: ignore[no-untyped-def]
    for i in range(live.size):
        moved = anchor[i] + (live[i] - sent[i])
        live[i] = anchor[i] if live[i] == sent[i] else moved
    return 0.0


@compiled
def _carry_and_copy(live, sent, anchor, copy):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            moved = anchor[i] + (live[i] - sent[i])
            value = anchor[i] if live[i] == sent[i] else moved
            live[i] = value
            copy[i] = value
            left = anchor[i] - value
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        moved = anchor[i] + (live[i] - sent[i])
        value = anchor[i] if live[i] == sent[i] else moved
        live[i] = value
        copy[i] = value
        left = anchor[i] - value
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()


@compiled
def _copy_and_squares(live, base, copy):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            copy[i] = live[i]
            left = base[i] - live[i]
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        copy[i] = live[i]
        left = base[i] - live[i]
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()


@compiled
def _copy_and_difference(live, base, copy, made):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            copy[i] = live[i]
            left = base[i] - live[i]
            made[i] = left
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        copy[i] = live[i]
        left = base[i] - live[i]
        made[i] = left
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()
