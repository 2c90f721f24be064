"""``decentral demo``: peers as real processes with real daemons on loopback, one killed, one late, a
baseline beside them.

Nothing is simulated: the demo types the commands a person would type, reads the files a person would
read, and ends with a table. Whatever happens, no process outlives it.
"""

import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from decentral.cli.demo.children import DemoProcess, Family
from decentral.cli.demo.result import DemoResult, collect
from decentral.cli.demo.terms import DemoPlan, make_plan
from decentral.cli.demo.watch import Churn, DemoProgress, watch
from decentral.cli.files import make_directory, write_text
from decentral.cli.preflight import check_place
from decentral.cli.stopping import Stop, stop_signals
from decentral.errors import RoundFailed, UsageError
from decentral.observe.metrics import NO_FIGURE, can_draw
from decentral.observe.report import FIGURE_FILE, draw_figure, print_table, write_summary
from decentral.observe.status import check_free

MARKER = ".decentral-demo"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_START_SECONDS = 90.0  # for a first peer to import torch and listen while other programs keep the machine busy
_SPARE_SECONDS = 120.0  # on top of one and a half times the asked time, before a demo that hangs is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says."""

    out: Path
    peers: int = 4
    algorithm: str = "sparseloco"
    minutes: float = 3.0
    seed: int = 0
    churn: bool = True

    @property
    def limit(self) -> float:
        """Seconds after which the demo is ended, done or not."""
        return 90 * self.minutes + _SPARE_SECONDS


def run_demo(options: DemoOptions, *, as_json: bool) -> int:
    """Run the demo and report; returns the exit code: 0 only when all anchors are equal and nothing is left running."""
    began = time.monotonic()
    check_replaceable(options.out)
    plan = make_plan(options.algorithm, num_peers=options.peers, minutes=options.minutes, seed=options.seed)
    clear(options.out)
    write_text(options.out / "run.toml", plan.manifest.to_toml())
    click.echo(plan.sentence, err=True)
    click.echo(f"to watch it in a browser: decentral dashboard --out {options.out}", err=True)
    with stop_signals() as stop, Family() as family:
        peers, solo, churn = _run(family, options, plan, stop, deadline=began + options.limit)
        strays = family.count_strays()
    result = collect(plan, peers, solo, churn, strays=strays)
    _report(options, result, as_json=as_json)
    if result.summary.rounds < plan.rounds:
        made = f"{result.summary.rounds} of {plan.rounds} rounds"
        click.echo(f"{made}: the time was up, this machine has become slower since it was measured", err=True)
    return _verdict(result)


def check_replaceable(out: Path) -> None:
    """UsageError for a directory with somebody else's files or with a demo that runs, DiskError where none can be."""
    check_place(out)
    if not out.exists():
        return
    if not (out / MARKER).exists() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and no earlier demo made it; name another directory with --out")
    for peer in out.iterdir():
        check_free(peer)


def clear(out: Path) -> None:
    """Make an empty directory for a demo; what an earlier demo left is removed."""
    check_replaceable(out)
    if (out / MARKER).exists():
        shutil.rmtree(out)
    make_directory(out)
    (out / MARKER).touch()


def _run(
    family: Family, options: DemoOptions, plan: DemoPlan, stop: Stop, *, deadline: float
) -> tuple[list[DemoProcess], DemoProcess, Churn]:
    out, terms = options.out, str(options.out / "run.toml")
    together = ["--listen", LOOPBACK, "--require-peers", str(options.peers), "--join-timeout", f"{options.limit:.0f}"]
    first = family.start("peer-0", out / "peer-0", ["start", terms, *together, "--out", str(out / "peer-0")])
    invite = first.first_line(_START_SECONDS).split()[-1]

    def join(name: str, extra: list[str]) -> DemoProcess:
        return family.start(name, out / name, ["join", invite, "--out", str(out / name), *extra])

    peers = [first] + [join(f"peer-{i}", together) for i in range(1, options.peers)]
    solo = family.start(
        "solo", out / "solo", ["start", terms, "--solo", "--pace", str(out / "peer-0"), "--out", str(out / "solo")]
    )
    churn = Churn(
        rounds=plan.rounds,
        ends=time.monotonic() + plan.limit,
        victim=peers[-1] if options.churn and len(peers) > 1 else None,
        add=(lambda: join("newcomer", ["--listen", LOOPBACK])) if options.churn else None,
    )
    with DemoProgress(sys.stderr, plan.rounds) as progress:
        watch(peers, solo, churn, progress, stop=stop, deadline=deadline)
    return peers + ([churn.newcomer] if churn.newcomer else []), solo, churn


def _report(options: DemoOptions, result: DemoResult, *, as_json: bool) -> None:
    from rich.console import Console

    write_summary(options.out, result.summary)
    title = f"{result.summary.algorithm}, {result.summary.peers} peers, {result.num_parameters:,} parameters"
    figure = f"figure: {options.out / FIGURE_FILE}"
    if can_draw():
        draw_figure(options.out / FIGURE_FILE, result.curves, title=title)
    else:
        figure = NO_FIGURE
    if as_json:
        click.echo(json.dumps(asdict(result.summary)))
        return
    console = Console(file=sys.stdout, highlight=False)
    print_table(result.summary, console, utilisation=result.utilisation, solo_bits_per_byte=result.solo_bits_per_byte)
    console.print(f"{figure}   numbers: {options.out / 'summary.json'}", markup=False)


def _verdict(result: DemoResult) -> int:
    summary = result.summary
    if len(set(summary.anchor_digests.values())) != 1:
        click.echo("error: the peers' anchors differ after the last round; their events.jsonl say more", err=True)
        return RoundFailed.exit_code
    if summary.stray_processes:
        click.echo(f"error: {summary.stray_processes} processes outlived their peers; they were ended", err=True)
        return RoundFailed.exit_code
    return 0
