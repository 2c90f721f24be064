"""``decentral lab``: methods side by side on many replicas in one process, by the study that a file declares."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from decentral.cli.group import stop_signals
from decentral.cli.options import as_json

if TYPE_CHECKING:
    from decentral.lab.comparing import Found
    from decentral.lab.laboratory import Store
    from decentral.lab.plan import Plan
    from decentral.lab.running import Outcome


def _print_example(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(files("decentral.lab").joinpath("example.toml").read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command("lab")
@click.argument("study", metavar="STUDY.toml", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--example", is_flag=True, is_eager=True, expose_value=False, callback=_print_example, help="Print a study."
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Its folder; decentral-lab/NAME.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Processes of one thread; as many as processors, and one on another device.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="Where models train, as cuda or cuda:1; digits: processor."
)
@as_json
def lab_command(study: Path, out: Path | None, workers: int | None, device: str, as_json: bool) -> None:
    """Compare methods as a study declares: search, reported seeds, verdicts, bytes, hours.

    Runs that are in the folder are never made again, so that an ended study goes on where it was.

    \b
    $ decentral lab study.toml --out results
    """
    from decentral.lab.laboratory import Store
    from decentral.lab.plan import Plan
    from decentral.lab.results import found_by, write_report
    from decentral.lab.terms import check_device, check_installed, load_study

    declared = load_study(study)
    check_installed(declared)
    check_device(declared, device)
    plan, store = Plan(declared), Store(out or Path("decentral-lab") / declared.study.name)
    store.begin(study.read_text(encoding="utf-8-sig"))
    try:
        there = store.known()
        known = _run_cells(plan, store, there, workers or _usual_workers(device), device)
        found = found_by(plan, known)
        write_report(store, found)
    finally:
        store.end()
    _print_study(found, store.folder, len(known) - len(there), as_json)


def _usual_workers(device: str) -> int:
    """One where models share a card: each process has a context and models of its own there, and a cell that ran out
    of memory is kept as one that failed.
    """
    return (os.cpu_count() or 1) if device == "cpu" else 1


def _run_cells(plan: Plan, store: Store, there: dict[str, Outcome], workers: int, device: str) -> dict[str, Outcome]:
    """All cells that are missing."""
    from decentral.lab.laboratory import Progress, Workers, run_study
    from decentral.lab.running import run_cell

    line = StudyLine(sys.stderr, plan.done(there))

    def on_progress(progress: Progress) -> None:
        line(progress.done, progress.of, progress.told)

    try:
        with stop_signals(), Workers(workers, partial(run_cell, device=device)) as processes:
            return run_study(plan, store, processes, on_progress)
    finally:
        line.end()


def _print_study(found: Found, folder: Path, ran: int, as_json: bool) -> None:
    """The result on stdout; code 1 where something stands in the way of trusting it."""
    from decentral.lab import tables
    from decentral.lab.comparing import problems

    troubles = problems(found)
    if as_json:
        summary = {"folder": str(folder), "ran": ran, "problems": troubles, "rows": tables.as_json(found)}
        click.echo(json.dumps(summary | {"pairs": tables.pairs_json(found)}))
    else:
        click.echo(tables.tables_md(found))
        click.echo(f"{ran} cells were run; all is in {folder}")
    if troubles:
        raise click.exceptions.Exit(1)


# ---- the line that tells how far it is ----

_CLEAR = "\r\x1b[2K"  # to the beginning of the line, and empty it


class StudyLine:
    """Call it with what is done, of how many, and what is told of the last one. The time left is as it went so far."""

    def __init__(self, stream: IO[str], there: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._there = stream, clock, there
        self._began, self._is_terminal = clock(), stream.isatty()

    def __call__(self, done: int, of: int, told: str) -> None:
        """One more cell."""
        line = f"{done} of {of} cells, {self._left(done, of)} left; {told}"
        self._stream.write(f"{_CLEAR}{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear what a terminal shows."""
        if self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _left(self, done: int, of: int) -> str:
        made = done - self._there
        if made < 1:
            return "no telling how long"
        seconds = round((self._clock() - self._began) / made * (of - done))
        return f"about {seconds} s" if seconds < 120 else f"about {seconds // 60} min"
