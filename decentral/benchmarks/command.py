"""``decentral bench``: compressors, rounds and transports on this machine, side by side with what others ship."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import as_json
from decentral.cli.progress import Countdown
from decentral.cli.quantities import Rate
from decentral.errors import DataError, UsageError

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
def _count_turns(num_turns: int) -> Iterator[Callable[[], None]]:
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
    with _count_turns(len(sets) * len(contestants) * (repeats + 1)) as on_done:
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
    with tempfile.TemporaryDirectory(prefix="decentral-bench-") as folder, _count_turns(rounds + 1) as on_done:
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


@bench_command.command("stages")
@click.option("--peers", type=click.IntRange(2, 16), default=4, show_default=True, help="Whose frames come in a round.")
@click.option("--megabytes", type=click.IntRange(min=16), default=120, show_default=True, help="Float32 of one peer.")
@click.option("--compressor", default="topk(k=64, chunk=4096) >> signmag2", show_default=True, help="As in a manifest.")
@click.option("--rounds", type=AT_LEAST_ONE, default=5, show_default=True, help="Timed, after one that is not.")
@as_json
def stages_bench(peers: int, megabytes: int, compressor: str, rounds: int, as_json: bool) -> None:
    """Processor time of one peer's gather, stage by stage, for a model of one tensor and for a language model's.

    \b
    $ decentral bench stages --json
    """
    import torch

    from decentral.benchmarks.exchange import Case
    from decentral.benchmarks.stages import measure

    torch.set_num_threads(1)
    rates = (1.0,) * peers  # there is no network
    case = Case(kind="gather", rows=megabytes * 256, ups=rates, downs=rates, compressor=compressor, rounds=rounds)
    with _count_turns(2 * (rounds + 1)) as on_done:
        found = measure(case, on_done)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{'ms of processor':<16}{'one tensor':>12}{found[-1]['tensors']:>8} tensors")
    for row in found:
        click.echo(f"{row['stage']:<16}{row['one_ms']:12.1f}{row['many_ms']:16.1f}  {row['what']}")


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
    with (
        tempfile.TemporaryDirectory(prefix="decentral-bench-") as folder,
        _count_turns(len(kinds) * repeats) as on_done,
    ):
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
