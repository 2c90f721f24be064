"""``identity``: the key that names a peer. Show it, keep a copy, put one in place."""

import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.errors import UsageError

if TYPE_CHECKING:
    from decentral.swarm.identity import Identity

KEY_FILE = "identity.key"


@click.group("identity")
def identity_command() -> None:
    """Show, copy or put in place the key that names a peer.

    \b
    $ decentral identity show --out decentral-run
    """


@identity_command.command("show")
@directory_of_a_peer
@as_json
@click.pass_context
def show(context: click.Context, directory: Path, as_json: bool) -> None:
    """Print the peer's name; the key itself is not shown.

    \b
    $ decentral identity show --out decentral-run
    """
    name = _identity(remember(context, directory)).name
    click.echo(json.dumps({"peer": name}) if as_json else name)


@identity_command.command("export")
@directory_of_a_peer
@click.pass_context
def export(context: click.Context, directory: Path) -> None:
    """Print the secret key as one line, for a backup or another machine. Whoever reads it can be this peer.

    \b
    $ decentral identity export --out decentral-run > my-peer.key
    """
    text = _identity(remember(context, directory)).export_text()
    _hide_from_others()
    click.echo(text)


@identity_command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@directory_of_a_peer
@click.pass_context
def import_(context: click.Context, file: Path, directory: Path) -> None:
    """Put the key of FILE (- for stdin) in place, before the peer is started.

    \b
    $ decentral identity import my-peer.key --out decentral-run
    """
    from decentral.cli.preflight import Before, check_place, undo_on_error
    from decentral.swarm.identity import Identity

    check_place(remember(context, directory))
    with undo_on_error(directory, Before.of(directory)):
        identity = Identity.import_text(_text(file), directory / KEY_FILE)
    click.echo(f"{directory}: the peer is {identity.name} from its first start on")


def _hide_from_others() -> None:
    """Take from others the right to read the file that stdout was sent to, before a key is in it."""
    with suppress(OSError, ValueError, AttributeError):  # no file, or not this user's own
        descriptor = sys.stdout.fileno()
        if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, stat.S_IMODE(mode) & 0o700)


def _identity(directory: Path) -> "Identity":
    from decentral.swarm.identity import Identity

    key = directory / KEY_FILE
    if not key.is_file():
        raise UsageError(f"{directory}: no {KEY_FILE}; a peer makes one at its first start, or name another --out")
    return Identity.load(key)


def _text(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read(4096)
    try:
        return file.read_text(encoding="ascii", errors="replace")[:4096]
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); name what identity export wrote") from error
