"""``service``: a peer or a relay that the system starts by itself, and stops by leaving in good order."""

import json
import sys
from pathlib import Path

import click

from decentral.cli.options import as_json

_name = click.option("--name", default="peer", show_default=True, help="What the service is called.")


@click.group("service")
def service_command() -> None:
    """Have this system run a peer or a relay: after a restart, in the background, last in every queue.

    \b
    $ decentral service install -- join INVITE --out decentral-run --schedule 22:00-07:00
    """


@service_command.command("install")
@_name
@click.option("--show", is_flag=True, help="Print the file, and change nothing.")
@click.argument("words", metavar="-- COMMAND [ARGS...]", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def install_command(context: click.Context, name: str, show: bool, words: tuple[str, ...]) -> None:
    """Write a systemd user unit (a launchd agent on macOS) that runs decentral start, join or relay, and start it.

    \b
    $ decentral service install --name overnight -- join INVITE --schedule 22:00-07:00
    """
    from decentral.cli.service.agent import agent, task
    from decentral.cli.service.installing import install, place
    from decentral.cli.service.plan import plan
    from decentral.cli.service.unit import unit

    planned = plan(context.find_root(), name, words, Path.cwd())
    if sys.platform == "win32":
        click.echo(task(planned))
    elif show:
        click.echo(unit(planned) if place(name).suffix == ".service" else agent(planned).decode(), nl=False)
    else:
        for line in install(planned):
            click.echo(line)


@service_command.command("status")
@as_json
def status_command(as_json: bool) -> None:
    """List the services that were installed, and what the system says of each.

    \b
    $ decentral service status
    """
    from decentral.cli.service.installing import installed, state

    found = {name: state(name) for name in installed()}
    if as_json:
        click.echo(json.dumps(found))
    for name, words in ({} if as_json else found).items():
        click.echo(f"{name:<16} {words}")
    if not found:
        click.echo("no service is installed; decentral service install -- join INVITE", err=True)


@service_command.command("remove")
@_name
def remove_command(name: str) -> None:
    """Stop a service, which leaves at its next step, and forget it. What it has learnt stays in its folder.

    \b
    $ decentral service remove --name overnight
    """
    from decentral.cli.service.installing import remove
    from decentral.cli.service.plan import check_name

    check_name(name)
    for line in remove(name):
        click.echo(line)
