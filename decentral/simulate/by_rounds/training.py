"""Until when each peer trains in a round, and what it offers: all its inner steps, or what it has when others wait."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decentral.consensus.machine import TICK
from decentral.consensus.timing import Deadline
from decentral.simulate.by_rounds.machine import Boundary, MachineModel


@dataclass(frozen=True, slots=True)
class RoundWork:
    """One peer's training in one round, from ``start`` to a full contribution or a crash."""

    machine: MachineModel
    opened: float  # when it could contribute to the round
    start: Boundary
    made: list[Boundary]
    crashed: bool

    def until(self, time: float) -> None:
        """Take back what is made later: a commit came before."""
        past = [one for one in self.made if one.time <= time]
        self.machine.back_to(past[-1] if past else self.start, self.made[len(past) :])


@dataclass(frozen=True, slots=True)
class Offering:
    """What a peer contributes to a round."""

    work: RoundWork
    time: float
    full: bool

    @property
    def machine(self) -> MachineModel:
        """Whose it is."""
        return self.work.machine


def work_of(machine: MachineModel, opened: float, interval: int, overlap: int, *, named: bool) -> RoundWork:
    """Let it train until it has a full contribution to the round that is open for it since ``opened``.

    ``named``: whether the commit that opened it names what the machine had in flight.
    """
    if machine.at.sent is not None and not overlap:  # it waits for that commit
        machine.waited(opened)
        machine.merged(named=named)
    machine.skip(opened)
    start, made = machine.at, list[Boundary]()
    while not made or not (made[-1].open and made[-1].since >= interval):
        if machine.step() is None:
            return RoundWork(machine, opened, start, made, crashed=True)
        if machine.at.time >= opened:
            if machine.at.sent is not None and machine.at.since - machine.at.sent >= overlap:
                machine.merged(named=named)
            is_open = machine.at.sent is None and machine.at.since > 0
            machine.at = replace(machine.at, open=is_open)
        made.append(machine.at)
    return RoundWork(machine, opened, start, made, crashed=False)


class Hurry:
    """When peers that are slower offer what they have: known better with every full contribution that comes.

    Those that came in one round have seen the same, and are of one mind.
    """

    def __init__(self, deadlines: Deadlines, works: Sequence[RoundWork]) -> None:
        self._deadlines, self._opened = deadlines, min((work.opened for work in works), default=0.0)
        self._generations = {work.machine.generation for work in works}
        self._first: float | None = None
        self._told = defaultdict[int, list[tuple[float, float]]](list)  # since when it is known by when to offer

    def came(self, offer: float, there: float, opened: float) -> None:
        """A full contribution was offered, and was there; to a peer for which the round was ``opened`` then."""
        self._first, is_first = (offer, True) if self._first is None else (self._first, False)
        for generation in self._generations:
            deadline, told = self._deadlines.of(generation), self._told[generation]
            if is_first:
                told.append((offer, deadline.early_at(self._opened, self._first)))
            deadline.observe(there - opened)
            told.append((there, deadline.early_at(self._opened, self._first)))

    def by(self, generation: int, time: float) -> float:
        """By when one should offer, as is known at ``time``; never, while nobody has offered all steps."""
        return next((early for since, early in reversed(self._told[generation]) if since <= time), math.inf)


class Deadlines:
    """What was learnt of how late others are, by those who came in the same round."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self._limits = floor, ceiling
        self._of = dict[int, Deadline]()

    def of(self, generation: int) -> Deadline:
        """Theirs."""
        return self._of.setdefault(generation, Deadline(*self._limits))


def offers_of(
    works: Sequence[RoundWork], deadlines: Deadlines, interval: int, heard_after: float, copies: float
) -> list[Offering]:
    """What they offer; who is slower than the others by more than they wait offers what it has in time.

    ``heard_after``: seconds until an offer is heard of; ``copies``: bytes that each sends to have its frame everywhere.
    """
    hurry, offers = Hurry(deadlines, works), list[Offering]()
    for work in sorted(works, key=lambda work: work.made[-1].time if work.made else math.inf):
        offer = _offer(work, hurry, interval)
        if offer is not None:
            offers.append(offer)
            if offer.full:
                heard = offer.time + heard_after
                hurry.came(heard, heard + copies / offer.machine.up, work.opened)
    return offers


def _offer(work: RoundWork, hurry: Hurry, interval: int) -> Offering | None:
    for place, one in enumerate(work.made):
        full = one.since >= interval
        if one.open and (full or hurry.by(work.machine.generation, one.time) - one.time <= one.seconds + TICK / 2):
            work.machine.back_to(replace(one, sent=one.since), work.made[place + 1 :])
            del work.made[place + 1 :]
            return Offering(work, one.time, full)
    return None
