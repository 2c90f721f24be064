"""``decentral logs``: what has happened to the peer that runs in a directory, and what happens."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.cli.quantities import Duration
from decentral.cli.shown.last_status import read_peer

_LOOK_SECONDS = 0.25  # between two looks at what is new
_LOGGED = "metrics"  # events of peer.log


@click.command("logs")
@directory_of_a_peer
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many events.")
@click.option("--event", help="Only events of this name, such as commit.")
@click.option("--since", type=Duration(), metavar="TIME", help="Only those of the last 30min, 2h; all of them.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until the peer ends or Ctrl-C.")
@as_json
@click.pass_context
def logs_command(
    context: click.Context,
    directory: Path,
    last: int,
    event: str | None,
    since: float | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Show the last events of the peer; what a loop has logged with --event metrics only.

    \b
    $ decentral logs --out decentral-run --last 5 --event commit
    """
    from decentral.errors import UsageError
    from decentral.observe.events import EVENTS_FILE, event_line, read_events
    from decentral.observe.lines import there

    if not there(remember(context, directory) / EVENTS_FILE):
        raise UsageError(f"{directory}: no peer has run here; name the directory it was started with by --out")
    shape = json.dumps if as_json else event_line
    if since is not None and context.get_parameter_source("last") is not click.core.ParameterSource.COMMANDLINE:
        last = sys.maxsize
    begin = 0.0 if since is None else time.time() - since
    if follow:
        context.exit(_follow(directory, last, event, begin, shape))
    rows = list(read_events(directory, last=last, event=event, since=begin, without=_without(event)))
    for row in rows:
        click.echo(shape(row))
    if not rows:
        wanted = "" if event is None else f" called {event!r}"
        click.echo(f"no event{wanted} {'yet' if since is None else 'in that time'}", err=True)


def _without(event: str | None) -> tuple[str, ...]:
    """A loop may log every step, and what happened beside it would be a line in fifteen."""
    return () if event == _LOGGED else (_LOGGED,)


def _follow(directory: Path, last: int, event: str | None, begin: float, shape: Callable[[dict[str, Any]], str]) -> int:
    """Print events as they come, until the peer ends; returns the exit code, Ctrl-C's when that ended it before."""
    from decentral.cli.failure import INTERRUPTED
    from decentral.observe.events import follow_events

    nobody = threading.Event()
    try:
        for row in follow_events(
            directory,
            last=last,
            event=event,
            without=_without(event),
            idle=lambda: _idle(nobody),
            ended=lambda: _has_ended(directory),
        ):
            if float(row.get("t") or 0) >= begin:
                click.echo(shape(row))
    except KeyboardInterrupt:
        return INTERRUPTED
    click.echo(f"the peer has ended: {read_peer(directory)[0].health}", err=True)
    return 0


def _idle(nobody: threading.Event) -> None:
    nobody.wait(_LOOK_SECONDS)


def _has_ended(directory: Path) -> bool:
    """Whether its process is gone. A folder whose status says nothing, or nothing that this version reads, never is."""
    from decentral.errors import DecentralError

    try:
        return not read_peer(directory)[1]
    except DecentralError:
        return False
