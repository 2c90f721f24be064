"""``decentral doctor``: what this machine can, and whether others reach it."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from decentral.cli.options import as_json, cards_by_name, remember


@click.command("doctor")
@click.argument("invite", nargs=-1)
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Where a run would be kept; its disk is checked.",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDR",
    callback=cards_by_name,
    help="Multiaddr, or network card, that the peer will listen on; all interfaces by default.",
)
@click.option("--relay", "relays", multiple=True, metavar="ADDR", help="A relay to ask, as decentral relay prints it.")
@as_json
@click.pass_context
def doctor_command(
    context: click.Context,
    invite: tuple[str, ...],
    directory: Path,
    listen: tuple[str, ...],
    relays: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check what a peer needs here: versions, device, disk, transport, and whether others can dial this machine.

    The words of decentral invite --words do instead of an invite: they are used up then, and it prints the invite.

    \b
    $ decentral doctor INVITE
    """
    from decentral.cli.doctor.checks import examine
    from decentral.cli.spoken import invite_of
    from decentral.swarm.invite import Invite

    line: str | None = None
    if invite:
        line, relays = invite_of(invite, relays)
        Invite.parse(line)  # before minutes are spent on what is none
        if len(invite) > 1 or line != invite[0]:
            click.echo(f"the words are used up; join with: decentral join {line}", err=True)
    findings = examine(remember(context, directory), line, listen=listen, relays=relays)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<5} {finding.what:<10} {finding.detail}")
    if any(finding.verdict == "fail" for finding in findings):
        context.exit(1)
