"""The cells that a study wants, from what is known so far: the search first, then what it chose on the reported seeds.

Every entry tries the same inner learning rates on the search's seeds; then, at the best, constants of its own, at most
as many settings again. A control has the settings of its method. Everything is chosen at each point of the grid.

Where time decides what is merged (a quorum, overlap, a pace by seconds, pairs that wait for a slow peer), a link is
part of the cell, and the entry is reported for each link; its search is without one. Elsewhere one cell does for all
links: hours follow from its steps and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from decentral.lab.cells import Cell, Flips
from decentral.lab.own import is_own, version_of_method
from decentral.lab.running import Outcome, text_of
from decentral.lab.terms import (
    Link,
    Method,
    Place,
    Reference,
    Settings,
    Study,
    Values,
    combinations,
    grid_of,
    is_paced,
    kind_of,
)
from decentral.manifest import Manifest
from decentral.optimizers import make_outer

__all__ = ["Chosen", "Contestant", "Plan", "Reported"]

Known = Mapping[str, Outcome]  # by cell id


@dataclass(frozen=True, slots=True)
class Contestant:
    """A line of the tables: an entry or a control, at a point of the grid."""

    name: str
    entry: str
    point: Values
    flips: Flips | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The outcome of a contestant's search, so far as it is known."""

    wanted: tuple[Cell, ...] = ()  # cells without which it is not known
    place: Place | None = None  # what is chosen; None: not yet, or nothing gave a number
    over: bool = False


@dataclass(frozen=True, slots=True)
class Reported:
    """A cell that is reported."""

    contestant: Contestant
    place: Place
    seed: int
    link: str | None  # where the cell is of one
    cell: Cell


class Plan:
    """The cells of one study. Pure: what is known comes as an argument."""

    def __init__(self, study: Study) -> None:
        self.study, self._settings = study, Settings(study)
        self._text = text_of(study.study.task)
        self._made: dict[tuple[object, ...], Cell] = {}  # manifests are checked once

    @cached_property
    def contestants(self) -> list[Contestant]:
        """Point by point, in the order of the file."""
        return [one for point in grid_of(self.study) for one in self._at(point)]

    def _at(self, point: Values) -> Iterator[Contestant]:
        for entry in self.study.entries:
            yield Contestant(entry.name, entry.name, point)
        for control in self.study.control:
            yield Contestant(control.name, control.of, point, control.flips)

    # ---- what is still to be run ----

    def due_cells(self, known: Known) -> list[Cell]:
        """Cells that can be run now, each once, in the order in which they are wanted."""
        found: dict[str, Cell] = {}
        for contestant in self.contestants:
            chosen = self.choose(contestant, known)
            cells = [*chosen.wanted, *(one.cell for one in self.report(contestant, chosen))]
            found |= {cell.id: cell for cell in cells if cell.id not in known}
        return list(found.values())

    def size(self) -> int:
        """Cells from the first to the last, if every search finds something: as many as can be told beforehand."""
        aims = self.study.study
        whole = set[str]()
        others = 0
        for contestant in self.contestants:
            first = self._first(contestant)
            for place in self._rates(contestant) if self._searches(contestant) else ():
                whole |= {self._cell(contestant, place, seed).id for seed in aims.search_seeds}
            if contestant.flips is None:
                others += len(list(self._own(contestant, first))) * len(aims.search_seeds)
            others += len(list(self.report(contestant, Chosen(place=first, over=True))))
        return len(whole) + others

    def done(self, known: Known) -> int:
        """Cells of this study that are known."""
        found = set[str]()
        for contestant in self.contestants:
            found |= {cell.id for _, _, cell in self.search_cells(contestant, known)}
            found |= {one.cell.id for one in self.report(contestant, self.choose(contestant, known))}
        return len(found & known.keys())

    # ---- the search ----

    def choose(self, contestant: Contestant, known: Known) -> Chosen:
        """The settings of the least loss on the search's seeds, or the cells that say which they are."""
        if not self._searches(contestant):
            return Chosen(place=self._first(contestant), over=True)
        rates = list(self._rates(contestant))
        if missing := self._missing(contestant, rates, known):
            return Chosen(tuple(missing))
        best = self._best(contestant, rates, known)
        if best is None:
            return Chosen(over=True)
        tried = [best, *self._own(contestant, best)]
        if missing := self._missing(contestant, tried, known):
            return Chosen(tuple(missing))
        return Chosen(place=self._best(contestant, tried, known), over=True)

    def search_cells(self, contestant: Contestant, known: Known) -> list[tuple[Place, int, Cell]]:
        """Return the cells that the search has tried, of a contestant that has one of its own."""
        if contestant.flips is not None or not self._searches(contestant):
            return []
        rates = list(self._rates(contestant))
        best = self._best(contestant, rates, known)
        places = [*rates, *(self._own(contestant, best) if best is not None else ())]
        seeds = self.study.study.search_seeds
        return [(place, seed, self._cell(contestant, place, seed)) for place in places for seed in seeds]

    def _searches(self, contestant: Contestant) -> bool:
        """Not where there is nothing to choose from."""
        return len(self.study.study.learning_rates) > 1 or bool(self._entry(contestant).search)

    def _first(self, contestant: Contestant) -> Place:
        return next(self._rates(contestant))

    def _rates(self, contestant: Contestant) -> Iterator[Place]:
        for rate in self.study.study.learning_rates:
            yield Place(contestant.entry, contestant.point, rate)

    def _own(self, contestant: Contestant, best: Place) -> Iterator[Place]:
        if search := self._entry(contestant).search:
            yield from (replace(best, own=own) for own in combinations(search))

    def _missing(self, contestant: Contestant, places: Sequence[Place], known: Known) -> list[Cell]:
        cells = [self._cell(contestant, p, seed) for p in places for seed in self.study.study.search_seeds]
        return [cell for cell in cells if cell.id not in known]

    def _best(self, contestant: Contestant, places: Sequence[Place], known: Known) -> Place | None:
        """The first of those of the least loss; None where no one has a number on every seed."""
        losses = {place: self._loss(contestant, place, known) for place in places}
        numbers = {place: loss for place, loss in losses.items() if loss is not None}
        return min(numbers, key=numbers.__getitem__) if numbers else None

    def _loss(self, contestant: Contestant, place: Place, known: Known) -> float | None:
        seeds = self.study.study.search_seeds
        outcomes = [known.get(self._cell(contestant, place, seed).id) for seed in seeds]
        losses = [None if outcome is None else outcome.loss for outcome in outcomes]
        return None if None in losses else sum(loss for loss in losses if loss is not None) / len(losses)

    # ---- what is reported ----

    def report(self, contestant: Contestant, chosen: Chosen) -> Iterator[Reported]:
        """Its cells on the reported seeds, once its settings are chosen."""
        place = chosen.place
        if place is None:
            return
        for link in self._links(contestant, place):
            for seed in self.study.study.seeds:
                cell = self._cell(contestant, place, seed, link, contestant.flips)
                yield Reported(contestant, place, seed, None if link is None else link.name, cell)

    def _links(self, contestant: Contestant, place: Place) -> list[Link | None]:
        """None: one cell for all links."""
        entry = self._entry(contestant)
        if isinstance(entry, Reference) or not self.study.link:
            return [None]
        manifest = self._settings.manifest(place, 0)
        minding = [link for link in self.study.link if _minds_time(manifest, link)]
        rest: list[Link | None] = [None] if len(minding) < len(self.study.link) else []
        return rest + list(minding)

    def _cell(
        self,
        contestant: Contestant,
        place: Place,
        seed: int,
        link: Link | None = None,
        flips: Flips | None = None,
    ) -> Cell:
        key = (place, seed, link and link.name, flips)
        if key not in self._made:
            self._made[key] = self._new(contestant, place, seed, link, flips)
        return self._made[key]

    def _new(self, contestant: Contestant, place: Place, seed: int, link: Link | None, flips: Flips | None) -> Cell:
        aims, entry = self.study.study, self._entry(contestant)
        kind, peers = kind_of(entry), self._settings.peers(contestant.point)
        is_text = not is_own(aims.task) and aims.task != "digits"
        shares = (
            aims.task == "language-uneven" or not is_text
        )  # what rank 0 has of the data depends on how many share it
        manifest = self._settings.manifest(place, seed)
        return Cell.of(
            kind,
            aims.task,
            1 if kind == "alone" and not shares else peers,
            manifest,
            steps=self._settings.steps(place),
            points=aims.points,
            windows=aims.windows if is_text else 0,
            text=self._text + (version_of_method(manifest.outer.method) if kind == "swarm" else ""),
            flips=flips,
            line=None if link is None else link.line,
            alpha=(aims.alpha or 1.0) if aims.task == "digits" else None,
        )

    def _entry(self, contestant: Contestant) -> Method | Reference:
        return self._settings.entries[contestant.entry]


def _minds_time(manifest: Manifest, link: Link) -> bool:
    """Return whether a link decides what is merged when."""
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    waits_unalike = method.topology == "pair" and (link.slow > 1 or link.thin > 1)
    return bool(manifest.outer.overlap or is_paced(manifest) or waits_unalike)
