"""Rounds of gather, reduce and pair on many lines, each held against its bar: the table of docs/links.md.

    python -m experiments.exchange.grid --json grid.json --table docs/links.md
    python -m experiments.exchange.grid --only gather-4 --cells 30x0.06,8/40x0.03 --rounds 5
    python -m experiments.exchange.grid --only reduce-6 --against hivemind --json grid.json

As `lab.py`, and with the same peers; a swarm is started once and its lines change while it runs, since a start takes
longer than all rounds of a cell. After each change two rounds are not counted. See `bars.py` for cells and bars. What a
file of raw figures has already stays in it, and in the table, until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from decentral.benchmarks.exchange import ExchangeResult, Step, Worker, terms
from decentral.errors import DecentralError
from experiments.exchange.bars import SWARMS, Cell, Row, Swarm, at_a_tenth, in_order, replaced, table
from experiments.exchange.lab import OURS, in_turns, teams_on
from experiments.exchange.rival_peer import SYSTEMS
from tests.natlab.lab import Host, Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.nat import PORT_PRESERVING
from tests.natlab.wires import Line, Wire

WARM = 2  # rounds until transports and estimates know the lines
DROP = 60.0  # s that a line stays at a tenth
LIMIT = 600  # s in which a cell must be done, so that peers that hang do not hang the grid

Found = dict[str, list[Step]]  # rounds by system
Measured = dict[str, dict[Cell, Found]]  # by swarm and lines


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(SWARMS), action="append", default=[], help="may be repeated")
    parser.add_argument(
        "--cells", type=_cells, default=None, help="instead of the swarm's own: 20x0.025,10/50x0.04+loss"
    )
    parser.add_argument("--rounds", type=int, default=3, help="counted in each cell")
    parser.add_argument(
        "--against", choices=sorted(SYSTEMS), action="append", default=[], help="beside gloo, in reduce"
    )
    parser.add_argument("--json", type=Path, default=None, help="raw figures of every round, old and new")
    parser.add_argument("--table", type=Path, default=None, help="a page to write the table into; stdout without it")
    return parser.parse_args()


def main() -> int:
    """See above."""
    given, failed = options(), False
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    measured = read_figures(given.json)
    for name in given.only or SWARMS:
        swarm, cells = _asked(SWARMS[name], given.against), in_order(given.cells or SWARMS[name].cells)
        try:
            for cell, found in _measure(swarm, cells, given.rounds):
                measured.setdefault(name, {})[cell] = found
        except DecentralError as error:  # what was measured before it stays
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
        if given.json is not None:
            write_figures(measured, given.json)
        if given.table is not None:
            page = given.table.read_text(encoding="utf-8")
            given.table.write_text(replaced(page, _table(measured)), encoding="utf-8")
    if given.table is None:
        print(_table(measured))
    return int(failed)


def _cells(text: str) -> list[Cell]:
    try:
        return [Cell.parse(one) for one in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _asked(swarm: Swarm, against: Sequence[str]) -> Swarm:
    more = against if swarm.kind == "reduce" else ()
    return replace(swarm, against=sorted({*swarm.against, *more}))


def read_figures(path: Path | None) -> Measured:
    """What a file of raw figures holds, if it is there."""
    measured: Measured = {}
    for one in json.loads(path.read_text()) if path is not None and path.exists() else ():
        steps = [Step(**step | {"each": tuple(step["each"])}) for step in one["steps"]]
        measured.setdefault(one["swarm"], {}).setdefault(Cell(**one["cell"]), {})[one["system"]] = steps
    return measured


def write_figures(measured: Measured, path: Path) -> None:
    """Every round of every cell, as JSON."""
    every = [
        {"swarm": name, "cell": asdict(cell), "system": system, **_result(name, cell, steps).to_json()}
        for name, cells in measured.items()
        for cell, found in cells.items()
        for system, steps in found.items()
    ]
    path.write_text(json.dumps(every, indent=1) + "\n")


def _table(measured: Measured) -> str:
    made = table([row for name in SWARMS if name in measured for row in _rows(name, measured[name])])
    return f"{made}\nOn {_cores()} cores.\n"


def _rows(name: str, cells: Mapping[Cell, Found]) -> Iterator[Row]:
    for cell in in_order(list(cells)):
        found, plain = cells[cell], replace(cell, trouble="")
        ours = _result(name, cell, found[OURS])
        yield Row(
            swarm=SWARMS[name],
            cell=cell,
            ours=ours,
            rivals={system: _result(name, cell, found[system]).seconds for system in found if system != OURS},
            untroubled=_result(name, plain, cells[plain][OURS]).seconds if plain in cells else None,
            deadline=terms(ours.case).swarm.deadline_floor,
            cores=_cores(),
        )


def _result(name: str, cell: Cell, steps: Sequence[Step]) -> ExchangeResult:
    return ExchangeResult(SWARMS[name].case(cell), tuple(steps))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# ---- one swarm, cell after cell ----


def _measure(swarm: Swarm, cells: Sequence[Cell], rounds: int) -> Iterator[tuple[Cell, Found]]:
    """Start the swarm on the first cell's lines and see it through all of them. Raises DecentralError."""
    with _limited(), Lab() as lab:
        signal.alarm(LIMIT)
        hosts = _settle(lab, swarm, cells[0])
        with teams_on(hosts, swarm.case(cells[0]), swarm.against) as teams:
            for cell in cells:
                signal.alarm(LIMIT)
                print(f"{swarm.kind}, {swarm.peers} peers, {cell.label}", file=sys.stderr, flush=True)
                _become(hosts, cell.before.lines(swarm.wires))
                if cell.trouble == "drop":
                    yield from _through_a_drop(teams[OURS], hosts[-1].wire, cell)
                else:
                    compared = teams if cell.trouble in ("", "jitter") else {OURS: teams[OURS]}
                    yield cell, in_turns(compared, WARM, rounds)


def _settle(lab: Lab, swarm: Swarm, cell: Cell) -> list[Host]:
    """A host for each peer: with a line and an address of its own, or in the one house."""
    lines = cell.before.lines(swarm.wires)
    abroad = swarm.peers - swarm.at_home
    hosts = [lab.public(f"peer{number}", line) for number, line in enumerate(lines[:abroad])]
    if swarm.at_home:
        house = lab.household("house", PORT_PRESERVING, lines[-1])
        hosts += [house.host(f"peer{abroad + number}") for number in range(swarm.at_home)]
    return hosts


def _become(hosts: Sequence[Host], lines: Sequence[Line]) -> None:
    wires = dict.fromkeys(host.wire for host in hosts)  # those at home share one
    for wire, line in zip(wires, lines, strict=True):
        wire.become(line)


def _through_a_drop(workers: Sequence[Worker], wire: Wire, cell: Cell) -> Iterator[tuple[Cell, Found]]:
    """Rounds while a line is at a tenth, and the first one after that."""
    teams, good = {OURS: workers}, wire.line
    in_turns(teams, WARM, 0)
    began, steps = time.monotonic(), list[Step]()
    wire.become(at_a_tenth(good))
    while time.monotonic() < began + DROP:
        steps += in_turns(teams, 0, 1)[OURS]
    yield cell, {OURS: steps}
    wire.become(good)
    yield replace(cell, trouble="after"), in_turns(teams, 0, 1)


@contextmanager
def _limited() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise DecentralError(f"a cell was not done within {LIMIT} s; its swarm is ended")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
