"""``support``: one file to send along with a question."""

from pathlib import Path

import click

from decentral.cli.options import directory_of_a_peer, remember


@click.command("support")
@directory_of_a_peer
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("decentral-support.zip"),
    show_default=True,
    help="The file to write.",
)
@click.option("--doctor/--no-doctor", default=True, show_default=True, help="Ask decentral doctor, too: some seconds.")
@click.pass_context
def support_command(context: click.Context, directory: Path, target: Path, doctor: bool) -> None:
    """Write one zip for whoever helps: versions, doctor, terms, status, the last events and numbers.

    No key, no token, no invite, no model, no data; addresses and your home folder are replaced by words. Look into it
    before you send it.

    \b
    $ decentral support --out decentral-run
    """
    from decentral.cli.support.gathering import write_support

    names = write_support(remember(context, directory), target, examined=doctor)
    click.echo(f"{target}: {', '.join(names)}; look into it before you send it")
