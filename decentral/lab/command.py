"""``decentral lab`` and ``decentral tune``: methods side by side, as a study has them or on one's own model."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.group import stop_signals
from decentral.cli.options import as_json, presets_that_begin
from decentral.cli.quantities import Rate
from decentral.errors import DecentralError, UsageError

if TYPE_CHECKING:
    from decentral.lab.comparing import Found
    from decentral.lab.tuning import Tuned
    from decentral.manifest import Manifest

# ---- lab: methods side by side, by the study that a file declares ----


def _print_example(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(files("decentral.lab").joinpath("example.toml").read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command("lab")
@click.argument("study", metavar="STUDY.toml", type=click.Path(path_type=Path))
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
    """Compare methods as a study declares. It searches, reports seeds, and tells verdicts, bytes and hours.

    Runs that are in the folder are never made again, so that an ended study goes on where it was. A folder with a
    study and its cells may be named in the place of STUDY.toml.

    \b
    $ decentral lab study.toml --out results
    $ decentral lab results
    """
    from decentral.lab.call import Declared
    from decentral.lab.laboratory import STUDY
    from decentral.lab.terms import load_study

    if study.is_dir():  # of a study that is kept beside its cells
        out, study = out or study, study / STUDY
    declared = Declared(load_study(study), study.read_text(encoding="utf-8-sig"))
    folder = out or Path("decentral-lab") / declared.study.study.name
    with stop_signals():
        table = declared.run(out=folder, workers=workers, device=device, stream=sys.stderr)
    _print_study(table.found, folder, table.ran, as_json)


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


# ---- tune: one's own model by a handful of terms, of which the best are written ----


@click.command("tune")
@click.argument("source", metavar="SCRIPT.py:FUNCTION|RUN.toml")
@click.option("--data", type=click.Path(path_type=Path), metavar="PATH", help="Text that a run of text trains on.")
@click.option("--peers", type=click.IntRange(2, 64), default=2, show_default=True, help="How many train together.")
@click.option("--rounds", type=click.IntRange(min=4), help="Outer steps of the run; the terms', or 100.")
@click.option("--inner-steps", type=click.IntRange(min=1), metavar="H", help="Between two; the terms', or 30.")
@click.option("--link", type=Rate(), default="20mbit", show_default=True, help="Everybody's line, each way.")
@click.option("--preset", "presets", multiple=True, shell_complete=presets_that_begin, help="Try this one; repeatable.")
@click.option(
    "--outer-rate",
    "outer_rates",
    type=click.FloatRange(min=0, min_open=True),
    multiple=True,
    help="Try this outer learning rate; repeatable.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first peer.")
@click.option("--processes", type=click.IntRange(min=1), help="Trials at a time; 2 unless given, 1 for a short search.")
@click.option("--out", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the best terms there.")
@click.option("--force", is_flag=True, help="Write over an existing file.")
@as_json
def tune_command(
    source: str, data: Path | None, file: Path | None, force: bool, as_json: bool, link: float, **given: Any
) -> None:
    """Find the method and the outer rate for your own model. A few are tried on it here, beside a peer alone.

    FUNCTION(number) builds one peer's training: it returns the model, its optimizer, a function that makes one inner
    step, and one that returns the loss on data that nobody trains on. The number says whose data is read.

    RUN.toml has the model and the inner optimizer instead, where the task is text; all else in it is kept.

    \b
    $ decentral tune train.py:build --peers 4 --rounds 100 --inner-steps 30 --out run.toml
    """
    from decentral.cli.preflight import write_text

    if file is not None and file.exists() and not force:
        raise UsageError(f"{file} exists; --force writes over it, or name another file")
    from decentral.manifest import load_manifest

    with _users_mistakes(source):
        trained = load_manifest(Path(source)) if source.endswith(".toml") else Script.of(source)
        from decentral.lab.tuning import tune  # torch

        tuned = tune(
            trained,
            data=data,
            peers=given["peers"],
            rounds=given["rounds"],
            inner_steps=given["inner_steps"],
            link=link,
            presets=given["presets"],
            outer_rates=given["outer_rates"],
            first=given["seed"],
            processes=given["processes"],
            tell=lambda line: click.echo(line, err=True),
        )
    click.echo(json.dumps(_as_json(tuned)) if as_json else table(tuned))
    if file is not None:
        write_text(file, tuned.manifest.to_toml())
    if not as_json:
        click.echo(verdict(tuned, file))


@contextmanager
def _users_mistakes(source: str) -> Iterator[None]:
    """Tell what the user's script raises in a line; UsageError."""
    try:
        yield
    except (DecentralError, click.ClickException):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{source}: {type(error).__name__}: {said}; decentral --traceback tune ... shows where"
        ) from error


# ---- the user's function ----


@dataclass(frozen=True, slots=True)
class Script:
    """A function of a file, looked up again in every process."""

    path: Path
    name: str

    @classmethod
    def of(cls, source: str) -> Script:
        """From ``train.py:build``. UsageError unless there are such a file and such a function."""
        path, _, name = source.rpartition(":")
        if not path.endswith(".py") or not name.isidentifier():
            raise UsageError(f"{source!r} names no function of a script; write it as train.py:build")
        if not Path(path).is_file():
            raise UsageError(
                f"{path}: there is no such file; name the script whose function builds one peer's training"
            )
        script = cls(Path(path).resolve(), name)
        script.function()
        return script

    def function(self) -> Callable[[int], Any]:
        """The function itself. UsageError where the script has none of that name."""
        found = getattr(_load(self.path), self.name, None)
        if not callable(found):
            raise UsageError(f"{self.path.name} has no function {self.name!r}; it builds one peer's training")
        made: Callable[[int], Any] = found
        return made

    def __call__(self, number: int) -> Any:
        """Build for the peer of this number."""
        return self.function()(number)


def _load(path: Path) -> ModuleType:
    """The script as a module, once in a process; as if it was imported, so that its main part does not run."""
    name = f"_tuned_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # its neighbours, as python train.py finds them
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ---- what it came to, in words ----


def table(tuned: Tuned) -> str:
    """A row for each candidate, the best first, with a peer alone among them."""
    from decentral.lab.tuning import LOOKS

    rounds = tuned.found.rounds
    rows = {"alone": tuned.found.alone, **tuned.found.losses}
    order = sorted(rows, key=lambda name: (-len(rows[name]), _last(rows[name])))
    width = max(map(len, rows))
    heads = [f"round {max(1, round(share * rounds))}" for share in LOOKS]
    lines = [f"{'held-out loss after':<{width}}  " + "".join(f"{head:>12}" for head in heads)]
    for name in order:
        cells = [f"{loss:.4g}" if math.isfinite(loss) else "diverged" for loss in rows[name]]
        lines.append(f"{name:<{width}}  " + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def _last(losses: list[float]) -> float:
    return losses[-1] if math.isfinite(losses[-1]) else math.inf


def verdict(tuned: Tuned, file: Path | None) -> str:
    """The best, against a peer alone, and where it is written."""
    found = tuned.found
    best, manifest = found.best, tuned.manifest
    assert best is not None, "else there is no manifest"
    loss, alone = found.losses[best][-1], found.alone[-1]
    where = "add --out run.toml to write it" if file is None else f"written to {file}"
    if found.gain <= 0:
        return (
            f"Training together does not pay at {found.rounds} rounds of {manifest.inner.steps} steps: the best, "
            f"{best}, ends at {loss:.4g}, a peer alone at {alone:.4g}. Try more rounds, or other data for each peer; "
            f"{where}."
        )
    return f"{best} ends at {loss:.4g}, a peer alone at {alone:.4g}; {where}.{_at_an_edge(tuned, manifest)}"


def _at_an_edge(tuned: Tuned, best: Manifest) -> str:
    """Say that another rate may be better still, where the best is the last of those that were tried."""
    method, rate = best.outer.method, best.outer.learning_rate
    tried = sorted(
        one.manifest.outer.learning_rate or 0.0 for one in tuned.candidates if one.manifest.outer.method == method
    )
    if rate is None or len(tried) < 2 or tried[0] < rate < tried[-1]:
        return ""
    edge, beyond = ("largest", 1.2 * rate) if rate == tried[-1] else ("smallest", rate / 1.2)
    return f" It is the {edge} rate that was tried: --outer-rate {rate:g} --outer-rate {beyond:.2g} goes on from there."


def _as_json(tuned: Tuned) -> dict[str, Any]:  # Any: JSON
    """For programs."""
    found = tuned.found
    finite = {name: [one if math.isfinite(one) else None for one in losses] for name, losses in found.losses.items()}
    return {
        "rounds": found.rounds,
        "alone": [one if math.isfinite(one) else None for one in found.alone],
        "losses": finite,
        "seconds_per_round": {name: round(seconds, 3) for name, seconds in tuned.seconds.items()},
        "best": found.best,
        "gain": found.gain if math.isfinite(found.gain) else None,
    }
