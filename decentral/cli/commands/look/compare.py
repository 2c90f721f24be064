"""``compare``: runs side by side, as one table and one figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentral.cli.options import as_json

if TYPE_CHECKING:
    from decentral.observe.compare import SeenRun

_OF_EVERY_RUN = ("run.name", "run.salt")  # differ between any two runs, and say nothing
_MOST = 8  # runs: their columns still fit a wide terminal


@click.command("compare")
@click.argument("directories", metavar="RUN_A RUN_B ...", nargs=-1, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("compare.png"),
    show_default=True,
    help="Where the figure goes.",
)
@as_json
def compare_command(directories: tuple[Path, ...], figure: Path, as_json: bool) -> None:
    """Set the runs of two or more run directories side by side: what each reached, and what it cost.

    One peer's directory stands for its run: any of its peers. Runs may go on meanwhile.

    \b
    $ decentral compare sparse dense --figure both.png
    """
    from decentral.manifest import differing
    from decentral.observe.compare import common_kind, draw, names_of, read_run
    from decentral.observe.metrics import NO_FIGURE, can_draw

    if not 2 <= len(directories) <= _MOST:
        raise click.UsageError(f"you named {len(directories)}; name 2 to {_MOST} run directories")
    runs = [read_run(directory) for directory in directories]
    kind, names = common_kind(runs), names_of(runs)
    drawn = can_draw()
    if drawn:
        draw(figure, {name: run.curves[kind] for name, run in zip(names, runs, strict=True)}, kind=kind)
    terms = {k: v for k, v in differing([run.manifest for run in runs]).items() if k not in _OF_EVERY_RUN}
    if as_json:
        told = [{"run": name, **_numbers(run, kind)} for name, run in zip(names, runs, strict=True)]
        click.echo(
            json.dumps({"compared": kind, "runs": told, "terms": terms, "figure": str(figure) if drawn else None})
        )
        return
    rows = {"": names, **_rows(runs, kind)}
    rows |= {key: ["unset" if value is None else str(value) for value in values] for key, values in terms.items()}
    click.echo(_aligned(rows))
    click.echo(f"\n{kind} over steps and cost: {figure}" if drawn else f"\n{NO_FIGURE}")


def _numbers(run: SeenRun, kind: str) -> dict[str, object]:
    """What is told of one run; what is not known is null."""
    values, status = [point.value for point in run.curves[kind]], run.status
    sent = max((point.nbytes for point in run.curves[kind] if point.nbytes is not None), default=None)
    return {
        "method": run.manifest.outer.method,
        "round": None if status is None else status.round,
        "rounds": run.manifest.run.rounds,
        "inner_steps": run.steps,
        "seconds": run.seconds,
        "last": values[-1],
        "best": min(values),
        "bytes_sent": (None if status is None else status.bytes_sent) if sent is None else sent,
        "contributed": status.rounds_contributed / status.rounds_seen if status and status.rounds_seen else None,
    }


def _rows(runs: Sequence[SeenRun], kind: str) -> dict[str, list[str]]:
    """The table, row by row."""
    from decentral.observe.health import in_time, in_units

    found = [_numbers(run, kind) for run in runs]

    def row(key: str, shown: str = "{}") -> list[str]:
        return ["?" if one[key] is None else shown.format(one[key]) for one in found]

    sent = ["?" if one["bytes_sent"] is None else in_units(float(str(one["bytes_sent"]))) for one in found]
    return {
        "method": row("method"),
        "round": [f"{made} of {whole}" for made, whole in zip(row("round"), row("rounds"), strict=True)],
        "inner steps": row("inner_steps"),
        f"{kind}, last": row("last", "{:.4f}"),
        f"{kind}, best": row("best", "{:.4f}"),
        "sent by this peer": sent,
        "time": [in_time(run.seconds) for run in runs],
        "rounds contributed to": row("contributed", "{:.0%}"),
    }


def _aligned(rows: dict[str, list[str]]) -> str:
    """Columns as wide as their widest word."""
    first = max(map(len, rows))
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines = []
    for name, words in rows.items():
        cells = (word.rjust(width) for word, width in zip(words, widths, strict=True))
        lines.append("  ".join([name.ljust(first), *cells]).rstrip())
    return "\n".join(lines)
