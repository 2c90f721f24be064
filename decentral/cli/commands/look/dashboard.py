"""``dashboard``: the page in the browser, live or of a run that is over."""

from __future__ import annotations

from pathlib import Path

import click

from decentral.cli.failure import INTERRUPTED
from decentral.cli.options import directory_of_a_peer, remember
from decentral.cli.page import check_page_there


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
@click.option("--token", metavar="TOKEN", help="What viewers must know; one is made where others can reach the page.")
@click.pass_context
def dashboard_command(
    context: click.Context, directory: Path, replay: Path | None, port: int, host: str, token: str | None
) -> None:
    """Show a peer and its swarm in the browser, read-only. DIR may also hold several peers, as a demo's does.

    \b
    $ decentral dashboard --out demo-run
    """
    check_page_there()
    import decentral
    from decentral.dashboard.serving import Place, listen

    place = Place(host=host, port=port, token=token)
    listening = listen(
        replay or remember(context, directory), place, version=decentral.__version__, replay=replay is not None
    )
    click.echo(listening.place.address)
    waits = "" if replay is not None or directory.is_dir() else f"; {directory} is not there yet, it waits for a peer"
    click.echo(f"the page is up, Ctrl-C ends it{waits}", err=True)
    try:
        listening.serve()
    except KeyboardInterrupt:
        context.exit(INTERRUPTED)
