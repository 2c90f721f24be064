"""Commands that measure: this machine, simulated swarms, methods side by side."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.group import stop_signals
from decentral.cli.options import as_json
from decentral.cli.progress import Countdown, StudyLine
from decentral.cli.quantities import Duration, Rate
from decentral.errors import DataError, UsageError

if TYPE_CHECKING:
    from decentral.lab.comparing import Found
    from decentral.lab.laboratory import Store
    from decentral.lab.plan import Plan
    from decentral.lab.running import Outcome
    from decentral.simulate.simulation import By

# ---- bench: this machine ----
#
# Side by side with what others ship.

AT_LEAST_ONE = click.IntRange(min=1)
TILE = 64  # rows and columns of what top-k chooses from
TRANSPORTS = ("daemon", "native", "py-libp2p")
_COLUMNS = (
    ("bits_per_value", "bits/value", ".4f"),
    ("bits_per_kept", "bits/kept", ".2f"),
    ("entropy_bound_bits", "bound", ".4f"),
    ("encode_MBps", "encode MB/s", ".0f"),
    ("decode_MBps", "decode MB/s", ".0f"),
    ("peak_extra_share", "extra/dense", ".2f"),
    ("relative_error", "error", ".4f"),
    ("relative_error_kept", "of kept", ".4f"),
)


@click.group("bench")
def bench_command() -> None:
    """Measure on this machine, beside what others ship.

    \b
    $ decentral bench compressors
    """


@contextmanager
def _counted(num_turns: int) -> Iterator[Callable[[], None]]:
    """How far it is, on stderr; to be called after each turn."""
    done = 0
    with Countdown(sys.stderr) as countdown:

        def on_done() -> None:
            nonlocal done
            done += 1
            countdown(done / num_turns)

        yield on_done


@bench_command.command("compressors")
@click.option("--data", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Tensors (.safetensors).")
@click.option(
    "--rows",
    type=click.IntRange(min=TILE),
    default=2048,
    show_default=True,
    help="Of 2048 Gaussian values; a multiple of 64.",
)
@click.option("--repeats", type=AT_LEAST_ONE, default=5, show_default=True, help="Timed runs of each; the best counts.")
@click.option("--threads", type=AT_LEAST_ONE, default=1, show_default=True, help="Threads for torch and for encoding.")
@click.option("--only", help="Only methods with this in their name.")
@as_json
def compressors_bench(
    data: Path | None, rows: int, repeats: int, threads: int, only: str | None, as_json: bool
) -> None:
    """Bits, speed, memory and error of every compressor, of hivemind's, of zstd, of SparseLoCo as published.

    \b
    $ decentral bench compressors --json
    """
    import torch

    from decentral.benchmarks import compressors as benchmark
    from decentral.benchmarks.contestants import others, ours

    if rows % TILE:
        raise UsageError(f"--rows {rows}: want a multiple of {TILE}, so that all methods see whole tiles")
    contestants = [c for c in (*ours(), *others()) if only is None or only in c.name]
    if not contestants:
        raise UsageError(f"--only {only}: no method has that in its name; decentral compressors lists them")
    torch.set_num_threads(threads)
    found, sets = [], _data(data, rows)
    with _counted(len(sets) * len(contestants) * (repeats + 1)) as on_done:
        for name, tensor_N, shapes in sets:
            found += benchmark.measure(contestants, name, tensor_N, shapes, repeats=repeats, on_done=on_done)
    if as_json:
        click.echo(json.dumps([row.as_json() for row in found]))
    else:
        _print_methods([row.as_json() for row in found])


def _data(data: Path | None, rows: int) -> list[tuple[str, Any, tuple[tuple[int, ...], ...]]]:
    import torch

    shape = (rows, 2048)
    gaussian = torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten()
    if data is None:
        return [("gaussian", gaussian, (shape,))]
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = list(load_file(data).values())
    except SafetensorError as error:
        raise DataError(f"--data {data}: not tensors ({error}); name a file in safetensors' format") from error
    flat = torch.cat([tensor.float().flatten() for tensor in tensors])
    return [("gaussian", gaussian, (shape,)), (data.stem, flat, tuple(tuple(t.shape) for t in tensors))]


def _print_methods(rows: list[dict[str, Any]]) -> None:
    widest = max(len(row["method"]) for row in rows) + 2
    data = None
    for row in rows:
        if row["data"] != data:
            data = row["data"]
            click.echo(f"{data:<{widest}}" + "".join(f"{title:>13}" for _, title, _ in _COLUMNS))
        if row["failed"]:
            click.echo(f"{row['method']:<{widest}}does not run here: {row['failed']}")
            continue
        cells = (f"{row[key]:{form}}" if row[key] is not None else "-" for key, _, form in _COLUMNS)
        click.echo(f"{row['method']:<{widest}}" + "".join(f"{cell:>13}" for cell in cells))


_AGREED = {"gather": "replicas equal", "reduce": "replicas equal", "pair": "all have met"}
_NOT_AGREED = {"gather": "replicas UNEQUAL", "reduce": "replicas UNEQUAL", "pair": "SOME WERE ALONE"}


@bench_command.command("exchange")
@click.option("--peers", type=click.IntRange(2, 16), default=4, show_default=True, help="Processes, each a peer.")
@click.option(
    "--kind",
    type=click.Choice(["gather", "reduce", "pair"]),
    default="reduce",
    show_default=True,
    help="Every body to every peer, the mean of all by partitions, or of two who swap.",
)
@click.option("--megabytes", type=click.IntRange(min=1), default=4, show_default=True, help="Float32 of one peer.")
@click.option("--compressor", default="none", show_default=True, help="As in a manifest.")
@click.option("--up", type=Rate(), default="20mbit", show_default=True, help="What each peer may send.")
@click.option("--down", type=Rate(), help="And receive; the same when not given.")
@click.option("--slow", type=Rate(), help="What the last peer may send, instead.")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Timed, after one that is not."
)
@click.option("--transport", type=click.Choice(TRANSPORTS), help="The daemon where there is one.")
@as_json
def exchange_bench(
    peers: int,
    kind: str,
    megabytes: int,
    compressor: str,
    up: float,
    down: float | None,
    slow: float | None,
    rounds: int,
    transport: str | None,
    as_json: bool,
) -> None:
    """Whole rounds of real peers on this machine, each behind caps, over what such links need at least.

    \b
    $ decentral bench exchange --peers 4 --kind gather --up 20mbit
    """
    import tempfile

    from decentral.benchmarks.exchange import Case, measure

    case = Case(
        kind=kind,
        rows=megabytes * 256,
        ups=(*[up] * (peers - 1), up if slow is None else slow),
        downs=(up if down is None else down,) * peers,
        compressor=compressor,
        rounds=rounds,
        transport=transport,
    )
    with tempfile.TemporaryDirectory(prefix="decentral-bench-") as folder, _counted(rounds + 1) as on_done:
        found = measure(case, Path(folder), on_done=on_done).to_json()
    if as_json:
        click.echo(json.dumps(found))
        return
    equal = _AGREED[kind] if found["equal"] else _NOT_AGREED[kind]
    click.echo(
        f"{found['seconds']:.2f} s a round, {found['over_bound']:.2f} times the {found['bound_seconds']:.2f} s that "
        f"the links need; {found['processor_seconds']:.2f} s of processor per peer, training held for "
        f"{1000 * found['held_seconds']:.0f} ms; {equal}"
    )


@bench_command.command("transport")
@click.option("--megabytes", type=AT_LEAST_ONE, default=64, show_default=True, help="Of one stream, 2^20 bytes each.")
@click.option("--repeats", type=AT_LEAST_ONE, default=5, show_default=True, help="Streams; the median counts.")
@click.option("--only", type=click.Choice(TRANSPORTS), help="One of them; all that this system has when not given.")
@as_json
def transport_bench(megabytes: int, repeats: int, only: str | None, as_json: bool) -> None:
    """Streams and small requests between two processes on loopback; the transports take turns.

    \b
    $ decentral bench transport --json
    """
    import tempfile

    from decentral.benchmarks.transport import measure
    from decentral.transport.choice import check_there, kinds_here

    check_there(only)
    kinds = [only] if only else kinds_here()
    with tempfile.TemporaryDirectory(prefix="decentral-bench-") as folder, _counted(len(kinds) * repeats) as on_done:
        results = measure(kinds, Path(folder), nbytes=megabytes << 20, repeats=repeats, on_done=on_done)
        found = [row.as_json() for row in results]
    if as_json:
        click.echo(json.dumps(found))
        return
    for row in found:
        click.echo(
            f"{row['transport']:<10}{row['MBps']:8.0f} MB/s{row['processor_ms_per_MB']:8.2f} ms of processor a MB"
            f"{row['request_ms']:8.2f} ms for a request of 1 kB (p90 {row['request_ms_p90']:.2f})"
        )


# ---- simulate: a run on given links ----

ROUNDS = 20
LEARNING_ROUNDS = 150  # after 20 a sparse swarm has sent a third of the model, and the lone peer has learnt it
MOST_PEERS = 1024  # of one epoch
MANY = 16  # peers from which on messages take half a minute and more
PROFILES = ("lab", "home", "spot", "storm", "cliff", "even")


@click.command("simulate")
@click.argument("manifest", metavar="RUN.toml", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--peers", default=4, show_default=True, type=click.IntRange(1, MOST_PEERS), help="Simulated peers.")
@click.option("--profile", type=click.Choice(PROFILES), help="Links and machines; home, with --link even.")
@click.option("--link", type=Rate(), help="Every peer's line, each way, as 20mbit, instead of the profile's lines.")
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same run, to the last event.")
@click.option(
    "--rounds", type=click.IntRange(1), help=f"Outer steps to simulate; {ROUNDS}, with --learn {LEARNING_ROUNDS}."
)
@click.option(
    "--step-seconds", type=click.FloatRange(min=0, min_open=True), help="Of one inner step on the median peer; 1."
)
@click.option("--step-time", type=Duration(), help="The same with its unit, as 0.4s.")
@click.option("--parameters", type=click.IntRange(1), help="Of the model; taken from the manifest when it says so.")
@click.option(
    "--by",
    type=click.Choice(["messages", "rounds"]),
    help=f"Run the protocol, or reckon its rounds: seconds for any swarm. Rounds from {MANY} peers on, if they can be.",
)
@click.option("--learn", is_flag=True, help="Train a small model; its loss, and what a peer alone reaches as long.")
@as_json
def simulate_command(
    manifest: Path,
    peers: int,
    profile: str | None,
    link: float | None,
    seed: int,
    rounds: int | None,
    step_seconds: float | None,
    step_time: float | None,
    parameters: int | None,
    by: By | None,
    learn: bool,
    as_json: bool,
) -> None:
    """Run the real protocol on simulated machines and links, hours in seconds; or reckon what it would take.

    \b
    $ decentral simulate run.toml --peers 8 --profile home
    $ decentral simulate run.toml --peers 8 --profile storm --seed 7 --json
    $ decentral simulate run.toml --peers 8 --profile spot --learn
    $ decentral simulate run.toml --peers 8 --link 20mbit --step-time 0.4s
    $ decentral simulate run.toml --peers 256 --by rounds
    """
    from decentral.manifest import check_methods, load_manifest
    from decentral.simulate.by_rounds.forecast import is_by_rounds
    from decentral.simulate.simulation import forecast

    if step_seconds is not None and step_time is not None:
        raise UsageError("--step-seconds and --step-time are one and the same; give one of them")
    profile = profile or ("home" if link is None else "even")
    terms = load_manifest(manifest)
    check_methods(terms)
    if by is None:
        by = "rounds" if peers >= MANY and not learn and is_by_rounds(terms, profile) else "messages"
    with Countdown(sys.stderr) as countdown:
        found = forecast(
            terms,
            peers=peers,
            profile=profile,
            link=link,
            seed=seed,
            rounds=rounds or (LEARNING_ROUNDS if learn else ROUNDS),
            step_seconds=step_seconds or step_time or 1.0,
            parameters=parameters,
            learn=learn,
            by=by,
            on_progress=countdown,
        )
    if as_json:
        click.echo(json.dumps(found))
    else:
        _print_forecast(found, profile, peers)
    if found.get("problems"):
        raise click.exceptions.Exit(1)


def _fewer(found: dict[str, object]) -> str:
    """A round has twice its training and the longest wait; what takes longer is not simulated to its end."""
    return f"only {found['rounds']} of {found['asked']} rounds, which are too slow to make more in their time,"


def _print_forecast(found: dict[str, object], profile: str, peers: int) -> None:
    reckoned = ", reckoned by rounds; --by messages runs the protocol" if found["by"] == "rounds" else ""
    made = f"{found['rounds']} rounds" if found["rounds"] == found["asked"] else _fewer(found)
    click.echo(f"{made} of {peers} peers ({profile}) in {found['seconds']:,.0f} simulated seconds{reckoned}")
    counts = ("pairs", "unpaired") if "pairs" in found else ("commits", "contributors")
    for name in (
        *counts,
        "seconds_per_round",
        "utilisation",
        "bytes_per_peer",
        "join_seconds",
        "divergence",
        "hangs",
        "trace_hash",
    ):
        if name in found:
            click.echo(f"{name:16} {found[name]}")
    if "loss" in found:
        alone = (
            f"{found['loss_alone']} for a median peer alone as long, which makes {found['steps_alone']:,} inner steps"
        )
        click.echo(f"{'loss':16} {found['loss']} of a small model, after {found['steps']:,} per peer; {alone}")
    for problem in found.get("problems", ()):  # type: ignore[attr-defined]
        click.echo(f"problem          {problem}")


# ---- lab: methods side by side ----
#
# On many replicas in one process, by the study that a file declares.


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
