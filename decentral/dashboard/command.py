"""``decentral dashboard``, and the page beside another command: both need the extra ``dashboard``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import decentral
from decentral.cli.group import INTERRUPTED
from decentral.cli.options import TOKEN, directory_of_a_peer, remember
from decentral.errors import UsageError

_PACKAGES = ("starlette", "uvicorn")


def check_installed() -> None:
    """Raise UsageError where a package of the extra is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        from decentral.plugins import to_install  # 0.03 s, which only those pay who need it

        raise UsageError(f"the page needs {' and '.join(missing)}; {to_install('dashboard')}")


@click.command("dashboard")
@directory_of_a_peer
@click.option(
    "--replay",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Show the run that DIR holds round by round, with a slider, instead of a live one.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=7070, show_default=True, help="0: any that is free.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDR",
    help="Where to listen; with any but this machine's own address the page asks for a token.",
)
@click.option(
    "--token",
    type=TOKEN,
    metavar="TOKEN",
    envvar="DECENTRAL_PAGE_TOKEN",
    show_envvar=True,
    help="What viewers must know; one is made where others can reach the page. - asks for it, @FILE reads it.",
)
@click.pass_context
def dashboard_command(
    context: click.Context, directory: Path, replay: Path | None, port: int, host: str, token: str | None
) -> None:
    """Show a peer and its swarm in the browser, read-only. DIR may also hold several peers, as a demo's does.

    \b
    $ decentral dashboard --out demo-run
    """
    check_installed()
    from decentral.dashboard.live import peers_in
    from decentral.dashboard.server import Place, listen

    place = Place(host=host, port=port, token=token)
    listening = listen(
        replay or remember(context, directory), place, version=decentral.__version__, replay=replay is not None
    )
    click.echo(listening.place.address)
    click.echo("the page is up, Ctrl-C ends it", err=True)
    if replay is None and not peers_in(directory):
        click.echo(f"it waits for a peer: {_nobody_in(directory)}", err=True)
    try:
        listening.serve()
    except KeyboardInterrupt:
        context.exit(INTERRUPTED)


def _nobody_in(directory: Path) -> str:
    """Say that no peer has run there yet, and where some have."""
    from decentral.observe.status import read_status

    try:
        read_status(directory)
    except UsageError as error:
        return str(error)
    return f"{directory}: no peer has run here"  # one begins just now


@contextmanager
def page_beside(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of one peer for as long as the block lasts; at another port where the usual one is taken."""
    from decentral.dashboard.server import Place, listen

    try:
        listening = listen(directory, Place(), version=decentral.__version__)
    except UsageError:
        listening = listen(directory, Place(port=0), version=decentral.__version__)
    say(f"the page: {listening.place.address}")
    with listening.serve_on_thread():
        yield
