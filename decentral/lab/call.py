"""A study as a Python call, from a notebook or a script; `decentral lab` makes the same call for a file.

    table = decentral.lab.study([MyMethod(), "diloco"], task=MyWork, rounds=20, learning_rates=[0.01]).run()

What is declared becomes the tables of a study file, and is checked as these.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from decentral.compressors.base import Method as CompressorMethod
from decentral.errors import UsageError
from decentral.lab import own
from decentral.lab.comparing import Found
from decentral.lab.laboratory import Here, Memory, Progress, Runner, Store, Workers, run_study
from decentral.lab.plan import Plan
from decentral.lab.results import collect, write_report
from decentral.lab.running import run_cell
from decentral.lab.tables import as_json, tables_md
from decentral.lab.terms import Study, check_device, check_installed, study_of
from decentral.observe.screen import bar
from decentral.optimizers import OuterMethod
from decentral.optimizers.base import keys_of

__all__ = ["Declared", "StudyLine", "Table", "study", "usual_workers"]

Keys = Mapping[str, Any]  # Any: values of every TOML type, or objects where it is said
One = str | OuterMethod | type[OuterMethod] | Keys


def study(
    methods: Sequence[One] | Mapping[str, One],
    *,
    task: Any = "language",  # Any: a class or an object, as decentral.lab.own has it
    learning_rates: Sequence[float],
    rounds: int | None = None,
    tokens: int | None = None,
    peers: int = 4,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    search_seeds: Sequence[int] = (101,),
    name: str = "study",
    model: Keys | None = None,
    data: Keys | None = None,
    inner: Keys | None = None,
    grid: Keys | None = None,
    references: Sequence[str | Keys] = ("data-parallel", "alone"),
    controls: Sequence[Keys] = (),
    links: Sequence[Keys] = (),
    compare: Sequence[Keys] = (),
    **aims: object,
) -> Declared:
    """Return a checked study. ConfigError, in one line, for what cannot be.

    A method is a preset's name, an outer method as object or class, or a dict of a ``[[method]]``, whose ``preset`` and
    ``compressor`` may be objects; give a dict of them by name where two would have one. ``aims`` are the other keys of
    ``[study]``: base, margin, points, windows, alpha.
    """
    own.forget()
    listed = [methods] if isinstance(methods, str | type | OuterMethod) else methods
    named = listed.items() if isinstance(listed, Mapping) else ((None, one) for one in listed)
    entries = [_method(one, called) for called, one in named]
    declared: dict[str, Any] = {"name": name, "task": _task(task), "peers": peers, **aims}
    declared |= {"learning_rates": _list(learning_rates), "seeds": _list(seeds), "search_seeds": _list(search_seeds)}
    declared |= {key: value for key, value in (("rounds", rounds), ("tokens", tokens)) if value is not None}
    tables: dict[str, Any] = {"study": declared, "method": entries}
    tables["reference"] = [{"name": one, "kind": one} if isinstance(one, str) else dict(one) for one in references]
    for key, each in (("control", controls), ("link", links), ("compare", compare)):
        tables[key] = [dict(one) for one in each]
    for key, keys in (("model", model), ("data", data), ("inner", inner), ("grid", grid)):
        tables[key] = keys or {}
    return Declared(study_of(tables), _as_toml(tables))


def _list(given: object) -> object:
    """Give a file's check what a file would have, and all else as it is."""
    return list(given) if isinstance(given, tuple | range) else given


def _task(task: Any) -> str:  # Any: as above
    """Return its name; a class of a module has the one by which other processes find it."""
    if isinstance(task, str):
        return task
    importable = isinstance(task, type) and task.__module__ != "__main__" and task.__qualname__.isidentifier()
    return own.bring_task(task, f"{task.__module__}:{task.__qualname__}" if importable else "")


def _method(given: One, name: str | None) -> dict[str, Any]:  # Any: values of a TOML table
    """The table of a method."""
    table: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"preset": given}
    preset, compressor = table.get("preset"), table.get("compressor")
    if isinstance(preset, type | OuterMethod):
        made = preset() if isinstance(preset, type) else preset
        table["preset"] = own.bring_method(type(made))
        table["outer"] = keys_of(made) | dict(table.get("outer", {}))
    if isinstance(compressor, CompressorMethod):
        own.bring_compressor(type(compressor))
    if compressor is not None and not isinstance(compressor, Mapping):
        table["compressor"] = {"chain": str(compressor)}
    return {"name": name or str(table.get("preset")).rpartition(":")[2], **table}


# ---- a checked study, and its run ----


@dataclass(frozen=True)
class Declared:
    """A study that can be run."""

    study: Study
    text: str = field(repr=False)  # as a file
    brought: own.Brought = field(default_factory=lambda: own.brought().copy(), repr=False)

    def run(
        self,
        *,
        out: str | Path | None = None,
        workers: int | None = None,
        device: str = "cpu",
        stream: IO[str] | None = None,
    ) -> Table:
        """Run what is missing, and return the table, which a notebook shows.

        ``out``: a folder that keeps cells, tables and figures, so that the same call goes on; None keeps nothing.
        ``workers``: processes; unset: as many as processors, or none, so that cells are run here, where a class is of
        the notebook itself, which no other process can import. 0 is here, too. ``stream``: of the bar; unset: the
        notebook, or stderr.
        """
        self.brought.use()
        check_installed(self.study)
        check_device(self.study, device)
        plan, store = Plan(self.study), Memory() if out is None else Store(Path(out))
        run = partial(run_cell, device=device, brought=self.brought)
        with _keep(store, self.text), _runner(workers, device, run) as runner:
            there = store.known()
            line = _line(stream, plan.done(there))
            try:
                known = run_study(plan, store, runner, line.tell)
            finally:
                line.end()
            found = collect(plan, known)
            if isinstance(store, Store):
                write_report(store, found)
        return Table(found, len(known) - len(there))


@contextmanager
def _keep(store: Store | Memory, text: str) -> Iterator[None]:
    """A folder that nobody else uses meanwhile."""
    if isinstance(store, Memory):
        yield
        return
    store.begin(text)
    try:
        yield
    finally:
        store.end()


@contextmanager
def _runner(workers: int | None, device: str, run: Callable[..., Any]) -> Iterator[Runner]:
    """Processes, or this one. UsageError where processes could not know what this one was given."""
    mine = own.brought().of_main
    if workers and mine:
        raise UsageError(
            f"workers={workers}: {mine[0]} is defined in this notebook or script, which other processes do not see; "
            "move it to a module, or leave workers out"
        )
    count = usual_workers(device) if workers is None else workers
    if mine or not count:
        yield Here(run)
        return
    with Workers(count, run) as processes:
        yield processes


def usual_workers(device: str) -> int:
    """Return the number of processors, or 1 where models share a card.

    There each process has a context and models of its own, and a cell that ran out of memory is kept as failed.
    """
    return (os.cpu_count() or 1) if device == "cpu" else 1


# ---- what it came to ----


@dataclass(frozen=True)
class Table:
    """The rows of a study; text is its tables.md."""

    found: Found = field(repr=False)
    ran: int  # cells that were not there before

    @property
    def rows(self) -> list[dict[str, Any]]:  # Any: text and numbers
        """A dict for each row: the method, its losses by seed and their mean, differences, verdict, bytes."""
        return [_flat(row) for row in as_json(self.found)]

    def to_pandas(self) -> Any:  # Any: pandas is none of our dependencies
        """Return the rows as a DataFrame. UsageError where pandas is not installed."""
        if find_spec("pandas") is None:
            raise UsageError("a DataFrame takes pandas; pip install pandas, or read rows")
        import pandas  # type: ignore[import-untyped]  # as above

        return pandas.DataFrame(self.rows)

    def __str__(self) -> str:
        return tables_md(self.found)

    def _repr_html_(self) -> str:
        """Return the tables for a notebook; what is no table stays text."""
        return "".join(_as_html(part) for part in str(self).strip().split("\n\n"))


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:  # Any: as above
    losses = list(row["losses"].values())
    told = {"name": row["name"], "role": row["role"], **row["point"], **row["settings"]}
    told |= {"loss": sum(losses) / len(losses) if losses else None, "losses": row["losses"]}
    rest = {key: row.get(key) for key in ("to_alone", "to_data_parallel", "share", "low", "high", "verdict", "trouble")}
    nbytes = row["nbytes"]
    return told | rest | {"nbytes": sum(nbytes) / len(nbytes) if nbytes else None, "hours": row["hours"]}


def _as_html(part: str) -> str:
    """A paragraph of tables.md."""
    lines = part.splitlines()
    if not part.startswith("|"):
        return f"<p>{escape(part.lstrip('# '))}</p>"
    rows = [[escape(cell.strip()) for cell in line.strip("|").split(" | ")] for line in lines if "| ---" not in line]
    head, *body = ["".join(f"<{kind}>{cell}</{kind}>" for cell in row) for kind, row in _cells_of(rows)]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _cells_of(rows: Sequence[list[str]]) -> Iterator[tuple[str, list[str]]]:
    for place, row in enumerate(rows):
        yield "td" if place else "th", row


def _as_toml(tables: Mapping[str, Any]) -> str:  # Any: as in a study file
    """The file that declares the same."""
    lines = []
    for name, table in tables.items():
        for each in table if isinstance(table, list) else [table] if table else []:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            lines += [f"{json.dumps(key)} = {_value(value)}" for key, value in each.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:  # Any: of every TOML type
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


# ---- the line that tells how far it is ----

_CLEAR = "\r\x1b[2K"  # to the beginning of the line, and empty it


class StudyLine:
    """Call it with what is done, of how many, and what is told of the last one. The time left is as it went so far."""

    def __init__(self, stream: IO[str], there: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._there = stream, clock, there
        self._began, self._is_terminal = clock(), stream.isatty()

    def tell(self, progress: Progress) -> None:
        """Write the line after one more cell."""
        done, of = progress.done, progress.of
        self._show(done / of, f"{done} of {of} cells, {self._left(done, of)} left; {progress.told}")

    def end(self) -> None:
        """Clear what a terminal shows."""
        if self._is_terminal:
            self._write(_CLEAR)

    def _show(self, share: float, line: str) -> None:
        self._write(f"{_CLEAR}{bar(share)} {line}" if self._is_terminal else f"{line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _left(self, done: int, of: int) -> str:
        made = done - self._there
        if made < 1:
            return "no telling how long"
        seconds = round((self._clock() - self._began) / made * (of - done))
        return f"about {seconds} s" if seconds < 120 else f"about {seconds // 60} min"


class _NotebookLine(StudyLine):
    """A line below a cell of a notebook, with its own bar."""

    def __init__(self, there: int) -> None:
        super().__init__(sys.stderr, there)
        shown: Any = import_module("IPython.display")  # Any: untyped, and there in a notebook only
        self._html, self._display = shown.HTML, shown.display(shown.HTML(""), display_id=True)
        self._is_terminal = False

    def _show(self, share: float, line: str) -> None:
        self._display.update(self._html(f'<progress value="{share:.3f}"></progress> {escape(line)}'))


def _line(stream: IO[str] | None, there: int) -> StudyLine:
    shell: Any = sys.modules.get("IPython")  # Any: as above
    if stream is None and shell is not None and hasattr(shell.get_ipython(), "kernel"):
        return _NotebookLine(there)
    return StudyLine(stream or sys.stderr, there)
