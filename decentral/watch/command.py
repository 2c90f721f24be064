"""``decentral watch``: it needs the extra ``watch``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import click

from decentral.cli.group import INTERRUPTED
from decentral.cli.options import directory_of_a_peer, remember
from decentral.errors import UsageError


@click.command("watch")
@directory_of_a_peer
@click.pass_context
def watch_command(context: click.Context, directory: Path) -> None:
    """Show a peer and its swarm in this terminal. Keys pause, resume and leave.

    DIR may also hold several peers, as a demo's does. q closes the view and nothing else, ? tells the keys.

    \b
    $ decentral watch --out decentral-run
    """
    _check_textual_there()
    _check_terminal()
    from decentral.watch.app import Watch

    ended = Watch(remember(context, directory)).run(mouse=False)  # so that the terminal's own way to select text works
    if isinstance(ended, KeyboardInterrupt):
        context.exit(INTERRUPTED)
    if ended is not None:
        raise ended


def _check_textual_there() -> None:
    """UsageError where the package is missing."""
    if importlib.util.find_spec("textual") is None:
        from decentral.plugins import to_install  # 0.03 s, which only those pay who need it

        raise UsageError(f"the view needs textual; {to_install('watch')}")


def _check_terminal() -> None:
    """UsageError where nothing can be drawn, or no key can be read."""
    streams = (sys.stdin, sys.stdout, sys.stderr)  # it is drawn on stderr, but who pipes stdout wants text
    if not all(stream.isatty() for stream in streams) or os.environ.get("TERM") in ("dumb", "unknown"):
        raise UsageError("this is not a terminal that a view can be drawn on; decentral status says the same in lines")
