"""The cut of a model into stages for the machines that are to be one replica: who gets which fragments.

Every order of the machines and every cut into neighbouring fragments is tried, as four machines and sixteen fragments
are 11,000 of them. The best is that whose slowest stage takes the least time for a token, to compute it or to send it
on; of those alike, the one that sends least, and leaves most memory.

Where the machines do not hold all fragments, and the run's terms allow it, some between two stages are left out: tokens
go by them, as blocks only add to what they are given. Few are better than many; the first and the last are never.

Sources of cutting by speed, memory and lines of unlike machines: Yang et al., "Holmes: Towards Distributed Training
Across Clusters with Heterogeneous NIC Environment", 2023, arXiv:2312.03549; "Zorse: Optimizing LLM Training Efficiency
on Heterogeneous GPU Clusters", 2025, arXiv:2507.10392.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise, permutations

__all__ = ["MOST_FRAGMENTS", "MOST_STAGES", "Cut", "Machine", "cut_for", "holes_of"]

MOST_STAGES, MOST_FRAGMENTS = 4, 64  # of the latter a million cuts for four machines


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine, as far as a cut depends on it."""

    memory: int  # bytes that training may take
    speed: float  # parameters times tokens a second, forward and back
    uplink: float | None = None  # bytes a second; None: not known, and taken for no limit
    home: frozenset[str] = frozenset()  # local networks that it is in


@dataclass(frozen=True, slots=True)
class Cut:
    """The stages of a replica, first to last."""

    machines: tuple[int, ...]  # by their places in what was given
    parts: tuple[range, ...]  # fragments of each
    seconds: float  # that the slowest of them takes for a token


def cut_for(
    machines: Sequence[Machine],
    work: Sequence[int],
    needs: Callable[[range], int],
    nbytes: float,
    holes: Iterable[range] = (range(0),),
) -> Cut | None:
    """Return the best cut that takes all of ``machines``; None: none fits into their memory.

    ``work``: parameters that a token is multiplied with, of each fragment; ``needs``: bytes of memory that training a
    part takes; ``nbytes``: of a token that cross a boundary, one way; ``holes``: of which one is left out.
    """
    partitions = chain.from_iterable(_partitions(len(work), len(machines), hole) for hole in holes)
    found = min(_all_cuts(partitions, machines, work, needs, nbytes), key=lambda one: one[0], default=None)
    return None if found is None else found[1]


def holes_of(skippable: Sequence[bool], most: int) -> list[range]:
    """Return the runs of at most ``most`` fragments that may be left out, short ones first.

    ``skippable``: of each fragment, whether it gives what it takes.
    """
    inner = len(skippable) - 1
    return [
        range(first, first + count)
        for count in range(1, most + 1)
        for first in range(1, inner - count + 1)
        if all(skippable[first : first + count])
    ]


def _all_cuts(
    partitions: Iterable[tuple[range, ...]],
    machines: Sequence[Machine],
    work: Sequence[int],
    needs: Callable[[range], int],
    nbytes: float,
) -> Iterator[tuple[tuple[float, float, float], Cut]]:
    for parts in partitions:
        memory, load = [needs(part) for part in parts], [sum(work[part.start : part.stop]) for part in parts]
        for order in permutations(range(len(machines))):
            stages = [machines[place] for place in order]
            if any(need > stage.memory for need, stage in zip(memory, stages, strict=True)):
                continue
            compute = max(count / stage.speed for count, stage in zip(load, stages, strict=True))
            sending = list(_sending(stages, nbytes))
            seconds = max(compute, *sending)
            tightest = max(need / stage.memory for need, stage in zip(memory, stages, strict=True))
            yield (seconds, sum(sending), tightest), Cut(order, parts, seconds)


def _sending(stages: Sequence[Machine], nbytes: float) -> Iterator[float]:
    """Seconds a token of each uplink: states go on and gradients back, and what stays at home takes none."""
    crossings = [0] * len(stages)
    for place, (one, other) in enumerate(pairwise(stages)):
        if not one.home & other.home:
            crossings[place] += 1
            crossings[place + 1] += 1
    for count, stage in zip(crossings, stages, strict=True):
        yield count * nbytes / stage.uplink if stage.uplink else 0.0  # not measured: all are taken for alike


def _partitions(fragments: int, stages: int, hole: range) -> Iterator[tuple[range, ...]]:
    """Cut what is left without the hole, where one cut is at the hole, and number it as it was."""
    for inner in combinations(range(1, fragments - len(hole)), stages - 1):
        if not hole or hole.start in inner:
            ends = pairwise((0, *inner, fragments - len(hole)))
            shifts = ((first, stop, len(hole) if hole and first >= hole.start else 0) for first, stop in ends)
            yield tuple(range(first + shift, stop + shift) for first, stop, shift in shifts)
