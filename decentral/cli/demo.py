"""``decentral demo``: peers as real processes on loopback, one killed, one late, beside a baseline.

Nothing is simulated: the demo types the commands a person would type, reads the files a person would read, and ends
with a table. Whatever happens, no process outlives it.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from torch import Tensor

from decentral.cli.demo_processes import Churn, DemoProcess, DemoProgress, Family, watch
from decentral.cli.group import Stop, stop_signals
from decentral.cli.preflight import check_place, make_directory, write_text
from decentral.cli.terms import scale_of
from decentral.cli.training_context import WINDOWS
from decentral.errors import DecentralError, RoundFailed, UsageError
from decentral.manifest import Manifest, fresh_salt, preset_manifest
from decentral.manifest.presets import suit
from decentral.observe.metrics import NO_FIGURE, can_draw, read_metrics
from decentral.observe.report import (
    FIGURE_FILE,
    SUMMARY_FILE,
    Curve,
    DemoSummary,
    dense_allreduce_nbytes,
    draw_figure,
    print_table,
    write_summary,
)
from decentral.observe.status import Status, check_free, read_status
from decentral.replica.codec import codec_of
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig, demo_tables
from decentral.tensors.threads import on_threads
from decentral.training.inner import build_inner, inner_step
from decentral.trial.check import check_learns

MARKER = ".decentral-demo"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_LISTENING_SECONDS = 90.0  # for a first peer to import torch and listen while other programs keep the machine busy
_SPARE_SECONDS = 120.0  # on top of one and a half times the asked time, before a demo that hangs is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of ``decentral demo``."""

    out: Path
    peers: int = 4
    algorithm: str = "diloco"
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
    click.echo(f"to watch it in a browser: decentral dashboard --out {shlex.quote(str(options.out))}", err=True)
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
    invite = first.first_line(_LISTENING_SECONDS).split()[-1]

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


# ---- what is trained, for how long ----
#
# As many rounds as fit the asked minutes on this machine, which is measured first.

SLACK = 1.25  # of the asked time, for a machine that others keep busy: then the run ends with fewer rounds
MIN_ROUNDS = 6  # a third, a half and an end need to be different rounds
_TIMED_STEPS = 10
_START_SECONDS = 4.5  # of one core, per process: importing torch and accelerate, building the model
_ROUND_SECONDS = 0.5  # waiting for one another at a round, measured with four peers on two cores

# On loopback a peer that is gone is gone: seconds, not the minute an ocean needs.
LOOPBACK_SWARM = {"deadline_floor": 2.0, "deadline_ceiling": 20.0, "lease": 12.0, "shrink_after": 20.0}
PAIR_CEILING = 8.0  # seconds: a pair has nobody else to go on with while a dead partner's lease runs out


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The manifest of a demo and where its model starts."""

    algorithm: str
    manifest: Manifest
    rounds: int
    loss_first: float  # nats per byte, held out
    bits_first: float
    step_seconds: float  # one inner step with a core to itself
    expected_seconds: float
    limit: float  # seconds after which the run ends with fewer rounds

    @property
    def sentence(self) -> str:
        """The announcement of what is about to happen, for people."""
        steps = self.rounds * self.manifest.inner.steps // self.manifest.outer.fragments
        return (
            f"{self.algorithm}: {self.rounds} rounds, {steps} inner steps per peer, "
            f"{1000 * self.step_seconds:.0f} ms each alone, about {self.expected_seconds / 60:.1f} minutes"
        )


def make_plan(algorithm: str, *, num_peers: int, minutes: float, seed: int) -> DemoPlan:
    """Choose the number of rounds. Raises DataError without source to train on, ConfigError where no run is founded."""
    manifest = demo_manifest(algorithm, seed=seed)
    check_learns(manifest)  # else its first peer says so, after a while
    corpus = load_corpus(None, held_out=manifest.data.held_out)
    bits, step_seconds = _measure(manifest, corpus)
    codec_of(manifest).warm_up()  # once here, instead of in every peer at a time
    interval = manifest.inner.steps // manifest.outer.fragments
    crowd = max(1.0, (num_peers + 1) / num_cores())  # processes that share a core; the solo peer is one of them
    start = _START_SECONDS * crowd
    per_round = interval * step_seconds * crowd + _ROUND_SECONDS
    rounds = max(MIN_ROUNDS, math.floor((60 * minutes - start) / per_round))
    expected = start + rounds * per_round
    limit = max(60 * minutes, expected) * SLACK
    manifest = suit(algorithm, manifest, rounds, scale_of(manifest))  # as init writes them for a run so long
    return DemoPlan(
        algorithm,
        manifest.changed(run={"rounds": rounds, "minutes": round(limit / 60, 2)}),
        rounds,
        bits * math.log(2),
        bits,
        step_seconds,
        expected,
        limit,
    )


def demo_manifest(algorithm: str, *, seed: int) -> Manifest:
    """The preset with the demo's model and the outer settings that were tuned for some hundred inner steps."""
    manifest = preset_manifest(
        algorithm,
        run={"name": f"demo-{algorithm}", "salt": fresh_salt(), "seed": seed},
        swarm=LOOPBACK_SWARM,
        **demo_tables(algorithm),
    )
    return manifest.changed(swarm={"deadline_ceiling": PAIR_CEILING}) if manifest.exchange.kind == "pair" else manifest


def _measure(manifest: Manifest, corpus: Corpus) -> tuple[float, float]:
    """Held-out bits per byte of the untrained model, and seconds of one inner step on one thread."""
    with on_threads(1):  # as the peers will run
        config = LanguageModelConfig.of(manifest.model)
        model: Any = build_language_model(config, seed=manifest.run.seed)
        bits = bits_per_byte(model, corpus.held_out, context=config.context, num_windows=WINDOWS)
        optimizers = build_inner(manifest.inner, model)
        seconds = []
        for step in range(_TIMED_STEPS):
            batch = batch_at(
                corpus.train,
                seed=0,
                peer=b"calibration",
                step=step,
                batch_size=manifest.data.batch_size,
                context=config.context,
            )
            began = time.perf_counter()
            inner_step(manifest.inner, optimizers, partial(_loss, model, batch))
            model.zero_grad()
            seconds.append(time.perf_counter() - began)
    return bits, sorted(seconds)[_TIMED_STEPS // 2]


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- summary and figure ----
#
# From the directories that the processes left.


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a demo."""

    summary: DemoSummary
    curves: Sequence[Curve]
    utilisation: float  # mean over the peers that lived to the end
    solo_bits_per_byte: float
    num_parameters: int


def collect(
    plan: DemoPlan, peers: Sequence[DemoProcess], solo: DemoProcess, churn: Churn, *, strays: int
) -> DemoResult:
    """Read every directory. Raises DecentralError when one that ended well left no summary."""
    ends = {peer.name: _read_summary(peer.directory) for peer in peers if not peer.killed}
    alone = _read_summary(solo.directory)
    lost = [_last_status(peer.directory) for peer in peers if peer.killed]
    first = ends["peer-0"]
    steps = [end["inner_steps"] for end in ends.values()] + [status.inner_steps for status in lost]
    sent = sum(end["bytes_sent"] for end in ends.values()) + sum(status.bytes_sent for status in lost)
    received = sum(end["bytes_received"] for end in ends.values()) + sum(status.bytes_received for status in lost)
    num_start = len(peers) - (churn.newcomer is not None)
    dense = dense_allreduce_nbytes(num_parameters=first["num_parameters"], steps=steps, num_peers=num_start)
    summary = DemoSummary(
        algorithm=plan.algorithm,
        peers=num_start,
        rounds=first["round"],
        inner_steps=first["inner_steps"],
        seconds=round(first["seconds"], 2),
        loss_first=plan.loss_first,
        loss_last=_mean(end["loss"] for end in ends.values()),
        loss_solo=alone["loss"],
        eval_bits_per_byte=_mean(end["bits_per_byte"] for end in ends.values()),
        bytes_sent=sent,
        bytes_received=received,
        bytes_dense_fp32_every_step=dense,
        reduction=round(dense / max(sent, 1), 1),
        anchor_digests={name: end["anchor_digest"] for name, end in ends.items()},
        killed=len(churn.killed),
        joined=int(churn.newcomer is not None),
        stray_processes=strays,
    )
    return DemoResult(
        summary,
        (_swarm_curve(plan, [peer.directory for peer in peers]), _solo_curve(plan, solo.directory)),
        _mean(end["utilisation"] for end in ends.values()),
        alone["bits_per_byte"],
        first["num_parameters"],
    )


def _read_summary(directory: Path) -> dict[str, Any]:
    path = directory / SUMMARY_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DecentralError(f"{path}: no summary was left ({error}); see stderr.txt beside it") from error
    assert isinstance(found, dict)
    return found


def _last_status(directory: Path) -> Status:
    try:
        return read_status(directory)
    except UsageError:  # killed before it wrote one
        return Status()


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _swarm_curve(plan: DemoPlan, directories: Sequence[Path]) -> Curve:
    """The anchor as the first peer saw it, over what every peer had trained and sent when that round ended."""
    tokens, nbytes, bits, seconds = [0.0], [0.0], [plan.bits_first], [0.0]
    began = _began(directories[0])
    everybody = [list(read_metrics(directory, "outer")) for directory in directories]
    for row in everybody[0]:
        if "bits_per_byte" in row:
            tokens.append(sum(_until(rows, row["round"], "tokens") for rows in everybody))
            nbytes.append(sum(_until(rows, row["round"], "bytes_sent") for rows in everybody))
            bits.append(row["bits_per_byte"])
            seconds.append(row["seconds"] - began)
    return Curve("swarm", tokens, nbytes, bits, seconds)


def _began(directory: Path) -> float:
    """When a peer's training began, on its log's clock: before that it waited for the others."""
    return next((float(row["seconds"]) for row in read_metrics(directory)), 0.0)


def _until(rows: Sequence[dict[str, Any]], round_: int, key: str) -> float:
    """A peer's count after a round; its last one when it was gone by then, 0 when it was not there yet."""
    return max((float(row[key]) for row in rows if row["round"] <= round_), default=0.0)


def _solo_curve(plan: DemoPlan, directory: Path) -> Curve:
    rows = [row for row in read_metrics(directory, "outer") if "bits_per_byte" in row]
    tokens = (0.0, *(row["tokens"] for row in rows))
    began = _began(directory)
    bits = (plan.bits_first, *(row["bits_per_byte"] for row in rows))
    return Curve("solo", tokens, (0.0,) * len(tokens), bits, (0.0, *(row["seconds"] - began for row in rows)))
