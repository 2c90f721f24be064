"""The results of a run that is over: ``summary.json``, a table for people, ``loss.png``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decentral.errors import DiskError
from decentral.observe.health import in_units
from decentral.observe.lines import json_value

SUMMARY_FILE = "summary.json"
FIGURE_FILE = "loss.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSummary:
    """The numbers a demo ends with. Losses are held out, nats per byte; bytes are of all peers' sockets."""

    algorithm: str
    peers: int  # at the start, the newcomer not counted
    rounds: int
    inner_steps: int  # of one peer that was there from start to end
    seconds: float  # of the swarm, from its first inner step to its last
    loss_first: float
    loss_last: float
    loss_solo: float
    eval_bits_per_byte: float
    bytes_sent: int
    bytes_received: int
    bytes_dense_fp32_every_step: int
    reduction: float  # dense bytes over sent bytes
    anchor_digests: Mapping[str, str]  # name of each live peer -> hex, after the last round
    killed: int
    joined: int
    stray_processes: int


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of the figure: held-out bits per byte over what it cost."""

    name: str
    tokens: Sequence[float] = field(default_factory=tuple)  # trained on by everybody together
    nbytes: Sequence[float] = field(default_factory=tuple)  # sent by everybody together
    bits_per_byte: Sequence[float] = field(default_factory=tuple)
    seconds: Sequence[float] = field(default_factory=tuple)  # since the first inner step that was logged


def dense_allreduce_nbytes(*, num_parameters: int, steps: Sequence[int], num_peers: int) -> int:
    """Return the bytes that a ring all-reduce of float32 gradients at every step would send, over all peers.

    Each peer sends 2 * (N - 1) / N * 4 bytes per parameter and step; ``steps`` holds the inner steps of
    each peer.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    per_step = 2 * (num_peers - 1) * 4 * num_parameters / num_peers
    return round(per_step * sum(steps))


def write_summary(directory: Path, summary: DemoSummary | Mapping[str, Any]) -> None:
    """Write ``summary.json`` in one step."""
    values = asdict(summary) if isinstance(summary, DemoSummary) else summary
    temporary = directory / f".{SUMMARY_FILE}"
    try:
        temporary.write_text(json.dumps(json_value(values), indent=2) + "\n", encoding="utf-8")
        temporary.replace(directory / SUMMARY_FILE)
    except OSError as error:
        raise DiskError(f"{directory}: summary cannot be written ({error.strerror}); free some space") from error


def read_summary(directory: Path) -> dict[str, Any] | None:
    """Read what ``write_summary`` wrote; None where there is nothing that can be read."""
    try:
        found = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def print_table(summary: DemoSummary, console: Console, *, utilisation: float, solo_bits_per_byte: float) -> None:
    """Print what the demo found, swarm beside solo."""
    table = Table(title=f"{summary.algorithm}: {summary.peers} peers against one alone", title_justify="left")
    table.add_column("")
    table.add_column("swarm", justify="right")
    table.add_column("solo", justify="right")
    table.add_row("held-out loss, nats per byte", f"{summary.loss_last:.4f}", f"{summary.loss_solo:.4f}")
    table.add_row("held-out bits per byte", f"{summary.eval_bits_per_byte:.4f}", f"{solo_bits_per_byte:.4f}")
    table.add_row("inner steps per peer", str(summary.inner_steps), str(summary.inner_steps))
    table.add_row("rounds", str(summary.rounds), "-")
    table.add_row("sent, all peers", in_units(summary.bytes_sent), "-")
    table.add_row("received, all peers", in_units(summary.bytes_received), "-")
    dense = in_units(summary.bytes_dense_fp32_every_step)
    table.add_row("float32 all-reduce at every step would send", dense, "-")
    table.add_row("times fewer bytes", f"{summary.reduction:.0f}", "-")
    table.add_row("utilisation, inner-step time / wall time", f"{utilisation:.0%}", "-")
    table.add_row("killed / joined on the way", f"{summary.killed} / {summary.joined}", "-")
    console.print(table)
    for name, digest in sorted(summary.anchor_digests.items()):
        console.print(f"anchor of {name}: {digest[:16]}…", highlight=False)


def draw_figure(path: Path, curves: Sequence[Curve], *, title: str) -> None:
    """Draw held-out bits per byte over tokens, over bytes sent and over time; no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # 0.5 s to import: only who draws pays
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    over_tokens, over_bytes, over_time = figure.subplots(1, 3, sharey=True)
    for curve in curves:
        over_tokens.plot(curve.tokens, curve.bits_per_byte, label=curve.name, marker=".")
        over_time.plot([s / 60 for s in curve.seconds], curve.bits_per_byte, label=curve.name, marker=".")
        if any(curve.nbytes):
            over_bytes.plot([n / 1e6 for n in curve.nbytes], curve.bits_per_byte, label=curve.name, marker=".")
        elif curve.bits_per_byte:
            over_bytes.axhline(curve.bits_per_byte[-1], label=f"{curve.name}, no bytes", color="grey", ls="--")
    over_tokens.set(xlabel="tokens trained on, all peers together", ylabel="held-out bits per byte")
    over_bytes.set(xlabel="MB sent, all peers together")
    over_time.set(xlabel="minutes")
    for axes in (over_tokens, over_bytes, over_time):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise DiskError(f"{path}: figure cannot be written ({error.strerror}); free some space") from error
