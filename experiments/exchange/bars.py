"""Cells of the grid, the bar that each is held against, and the table of them. Pure.

A cell is the lines of a swarm: `20x0.025` is 20 Mbit/s each way and 25 ms from a peer to the core, `10/50x0.025` 10 up
and 50 down, `20x0.025+loss` the first with a trouble. From peer to peer a trip takes twice the delay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from decentral.benchmarks.exchange import Case, ExchangeResult, Step, reduce_bound
from tests.natlab.wires import Line

TROUBLES = {  # how the table calls them; but for a jitter they are the last peer's
    "slow": "one at a tenth",
    "loss": "one loses 1 % of its packets",
    "jitter": "a jitter of 30 ms",
    "drop": "one falls to a tenth for a minute",
    "after": "the round after that minute",
}
FAST, NEAR = (20.0, 50.0, 100.0), (0.012, 0.025, 0.04, 0.08)  # Mbit/s; s to the core
TRIPS = 6  # one way, from the last inner step to the new anchor
HIDDEN = 0.5  # of the processor's time that should pass while bytes are under way
SLACK = 0.1  # s
SENT = 1.15  # of the bytes that a peer on lines like the others' has to send
PAIR = 1.15  # of a pair's bound
REDUCE = ((0.025, 1.10), (0.08, 1.25))  # of float32's bound at such delays and evenly in between
_CELL = re.compile(r"([\d.]+)(?:/([\d.]+))?x([\d.]+)(?:\+(slow|loss|jitter|drop))?")


@dataclass(frozen=True, slots=True)
class Cell:
    """Lines of equal rates and delays, but for the trouble."""

    up: float  # Mbit/s
    down: float
    delay: float  # s from a peer to the core
    trouble: str = ""  # of TROUBLES

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Raises ValueError."""
        found = _CELL.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no cell: MBITxSECONDS, UP/DOWNxSECONDS, with +slow, +loss, +jitter or +drop")
        up, down, delay, trouble = found.groups()
        return cls(float(up), float(down or up), float(delay), trouble or "")

    def __str__(self) -> str:
        rates = f"{self.up:g}" if self.up == self.down else f"{self.up:g}/{self.down:g}"
        return f"{rates}x{self.delay:g}" + (f"+{self.trouble}" if self.trouble else "")

    @property
    def label(self) -> str:
        """The cell in words."""
        rates = f"{self.up:g} Mbit/s" if self.up == self.down else f"{self.up:g} up, {self.down:g} down"
        return f"{rates}, {1000 * self.delay:g} ms" + (f", {TROUBLES[self.trouble]}" if self.trouble else "")

    @property
    def before(self) -> Cell:
        """The cell in which its rounds begin."""
        return replace(self, trouble="") if self.trouble == "drop" else self

    def lines(self, count: int) -> list[Line]:
        """So many lines, the last one with the trouble."""
        jitter = 0.03 if self.trouble == "jitter" else 0.0
        every = [Line(up=self.up, down=self.down, delay=self.delay, jitter=jitter)] * count
        last = every[-1]
        if self.trouble in ("slow", "drop"):
            last = at_a_tenth(last)
        if self.trouble == "loss":
            last = replace(last, loss=0.01)
        return [*every[:-1], last]


BASE = Cell(20.0, 20.0, 0.025)
GRID = [Cell(rate, rate, delay) for rate in FAST for delay in NEAR]


def _with(*troubles: str) -> list[Cell]:
    return [*GRID, Cell(10.0, 50.0, 0.025), *(replace(BASE, trouble=trouble) for trouble in troubles)]


def at_a_tenth(line: Line) -> Line:
    """The same line, ten times slower each way."""
    assert line.up is not None
    assert line.down is not None
    return replace(line, up=line.up / 10, down=line.down / 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """Peers that are started once and stay for all their cells."""

    kind: str  # gather, reduce, pair
    peers: int
    megabytes: int  # of float32
    compressor: str = "none"
    at_home: int = 0  # of the peers, the last ones: behind one gateway and one line
    against: Sequence[str] = ()
    cells: Sequence[Cell] = ()

    @property
    def wires(self) -> int:
        """Lines, of which those at home share one."""
        return self.peers - self.at_home + bool(self.at_home)

    def case(self, cell: Cell) -> Case:
        """The lines as each peer has them; of a shared one its part."""
        lines = cell.lines(self.wires)
        parts = [(line, 1) for line in lines[: self.peers - self.at_home]] + [(lines[-1], self.at_home)] * self.at_home
        return Case(
            kind=self.kind,
            rows=self.megabytes * 256,
            ups=tuple(1.25e5 * (line.up or 0.0) / sharing for line, sharing in parts),
            downs=tuple(1.25e5 * (line.down or 0.0) / sharing for line, sharing in parts),
            compressor=self.compressor,
            capped=False,
            rounds=10_000,
            transport="native",  # that of every install
        )


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """From thin lines to fast ones: an uplink that was faster is believed in for sixteen frames more."""
    troubles = ["", *TROUBLES]
    return sorted(
        cells, key=lambda cell: (min(line.up or 0.0 for line in cell.before.lines(2)), troubles.index(cell.trouble))
    )


def _gather(peers: int, at_home: int = 0, cells: Sequence[Cell] = GRID) -> Swarm:
    sparse = "topk(k=64, chunk=4096) >> signmag2"
    return Swarm(kind="gather", peers=peers, megabytes=120, compressor=sparse, at_home=at_home, cells=cells)


SWARMS = {
    "gather-4": _gather(4),
    "gather-6": _gather(6, cells=_with(*list(TROUBLES)[:-1])),
    "gather-10": _gather(10),
    "gather-6-home": _gather(6, at_home=2, cells=[BASE]),
    "reduce-6": Swarm(kind="reduce", peers=6, megabytes=6, against=("gloo",), cells=_with("slow", "loss", "jitter")),
    "pair-4": Swarm(kind="pair", peers=4, megabytes=8, cells=_with("loss", "jitter")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Rounds of one swarm on the lines of one cell, and what they are held against."""

    swarm: Swarm
    cell: Cell
    ours: ExchangeResult
    rivals: Mapping[str, float]  # s of theirs, in turns with ours
    untroubled: float | None  # s of ours in the same cell without its trouble, if that was measured
    deadline: float  # s that a late peer may have others wait
    cores: int

    @property
    def links(self) -> float:
        """Seconds that the links alone need; of a reduce, for float32."""
        case = self.ours.case
        return reduce_bound(4096 * case.rows, case.ups, case.downs) if self.swarm.kind == "reduce" else self.ours.bound

    @property
    def trips(self) -> float:
        """Seconds of the trips that a round may wait for, each over two lines."""
        jitter = self.cell.lines(1)[0].jitter
        return TRIPS * 2 * (self.cell.delay + jitter / 2)

    @property
    def seconds(self) -> float:
        """What is judged: of the slowest peer; with one in trouble, of the slowest other."""
        if not self._is_anothers:
            return self.ours.seconds
        return ExchangeResult(self.ours.case, tuple(_of_the_others(step) for step in self.ours.steps)).seconds

    @property
    def alone(self) -> float:
        """What a peer with all these cores for itself would see, if the others' work on them is hidden as far as a bar
        has it: without half of (peers - 1) x processor seconds / cores.
        """
        return self.ours.seconds - (1 - HIDDEN) * (self.swarm.peers - 1) * self.ours.processor / self.cores

    @property
    def bar(self) -> float | None:
        """Seconds that it may take; None where there is nothing to compare with."""
        if self._is_anothers:
            return None if self.untroubled is None else self.untroubled + self.deadline
        if self.swarm.kind == "gather":
            busy = self.swarm.peers * self.ours.processor / self.cores
            return self.links + self.trips + (1 - HIDDEN) * busy + SLACK
        if self.swarm.kind == "pair":
            return PAIR * self.links
        return min(_reduce_share(self.cell.delay) * self.links, self.rivals.get("gloo", float("inf")))

    @property
    def most_processor(self) -> float:
        """Seconds of processor that a round of 31.5 M parameters may cost each peer."""
        return 0.10 + 0.03 * self.swarm.peers if self.swarm.kind == "gather" else float("inf")

    @property
    def most_sent(self) -> float:
        """The share of what it has to send that no peer may exceed."""
        return SENT if not self._is_anothers and not self.swarm.at_home else float("inf")

    @property
    def num_whole(self) -> int:
        """Rounds in which all contributed, the first leader got its votes and all ended equal."""
        whole = self.ours.case.contributors
        return sum(step.equal and step.ballot == 0 and step.contributors == whole for step in self.ours.steps)

    @property
    def _is_anothers(self) -> bool:
        return self.cell.trouble not in ("", "jitter")

    def cells(self) -> list[str]:
        """What the table shows, **bold** where it misses its bar."""
        ours, bar, rounds = self.ours, self.bar, len(self.ours.steps)
        home = f", {self.swarm.at_home} in one house" if self.swarm.at_home else ""
        return [
            f"{self.swarm.kind}, {self.swarm.peers} peers",
            self.cell.label + home,
            f"{ours.seconds:.2f}",
            f"{self.seconds:.2f}" if self._is_anothers else "",
            "" if self.untroubled is None or not self.cell.trouble else f"{self.untroubled:.2f}",
            f"{self.links:.2f}",
            f"{self.trips:.2f}",
            _judged(ours.processor, self.most_processor),
            "" if bar is None else f"{bar:.2f}",
            "" if bar is None else _judged(self.seconds / bar, 1.0),
            f"{self.alone:.2f}",
            _judged(ours.over_sent, self.most_sent),
            "all" if self.num_whole == rounds else f"**{self.num_whole} of {rounds}**",
            *(f"{self.rivals[system]:.2f}" if system in self.rivals else "" for system in ("gloo", "hivemind")),
        ]


HEAD = (
    *("swarm", "lines, delay to the core", "seconds", "the others", "untroubled", "links", f"{TRIPS} trips"),
    *("processor", "bar", "of the bar", "alone", "sent", "whole", "gloo", "hivemind"),
)


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    cells = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    return "".join("".join(f"| {cell} " if cell else "| " for cell in row) + "|\n" for row in cells)


def replaced(page: str, made: str) -> str:
    """The page with ``made`` between its comments `<!-- grid -->` and `<!-- /grid -->`. ValueError without them."""
    before, begins, rest = page.partition("<!-- grid -->\n")
    _, ends, after = rest.partition("<!-- /grid -->")
    if not ends:
        raise ValueError("no place for the table: a line <!-- grid -->, and after it <!-- /grid -->")
    return f"{before}{begins}\n{made}{ends}{after}"


def _judged(value: float, most: float) -> str:
    return f"**{value:.2f}**" if value > most else f"{value:.2f}"


def _reduce_share(delay: float) -> float:
    (near, least), (far, most) = REDUCE
    return least + (most - least) * min(1.0, max(0.0, (delay - near) / (far - near)))


def _of_the_others(step: Step) -> Step:
    return replace(step, seconds=max(step.each[:-1]))
