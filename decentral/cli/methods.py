"""``optimizers``, ``aggregation``, ``compressors``, ``feedback``: what a manifest can name, and where it comes from."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from decentral.cli.options import as_json

_OWN_LINE = ("name", "spelling", "layout", "equation", "source")  # the first two head a block, the others end it


@click.command("optimizers")
@as_json
def optimizers_command(as_json: bool) -> None:
    """List the outer optimizers a manifest can name.

    \b
    $ decentral optimizers
    """
    from decentral.optimizers import describe_optimizers

    _print(describe_optimizers(), as_json)


@click.command("aggregation")
@as_json
def aggregation_command(as_json: bool) -> None:
    """List the rules by which contributions may become one vector.

    \b
    $ decentral aggregation
    """
    from decentral.optimizers import describe_aggregations

    _print(describe_aggregations(), as_json)


@click.command("compressors")
@as_json
def compressors_command(as_json: bool) -> None:
    """List the compressors that a manifest can name. Each has its bits per value.

    \b
    $ decentral compressors --json
    """
    from decentral.compressors import describe_compressors

    _print(describe_compressors(), as_json)


@click.command("feedback")
@as_json
def feedback_command(as_json: bool) -> None:
    """List what may become of what compression left unsent.

    \b
    $ decentral feedback
    """
    from decentral.compressors import describe_feedback

    _print(describe_feedback(), as_json)


def _print(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, default=str))
        return
    for row in rows:
        facts = (f"{key.replace('_', ' ')} {_cell(row[key])}" for key in row if key not in _OWN_LINE)
        click.echo(f"{row.get('spelling', row.get('name'))}")
        click.echo(f"    {', '.join(facts)}")
        for key in _OWN_LINE[2:]:
            if row.get(key):
                click.echo(f"    {row[key]}")


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_cell(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
