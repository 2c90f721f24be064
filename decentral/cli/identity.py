"""``identity``: the key that names a peer. Show it, keep a copy, put one in place."""

import json
import os
import shutil
from pathlib import Path

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.errors import DiskError, UsageError

KEY_FILE = "identity.key"


@click.group("identity")
def identity_command() -> None:
    """Show, copy or replace the key that names a peer.

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
    name = _name(_key(remember(context, directory)))
    click.echo(json.dumps({"peer": name}) if as_json else name)


@identity_command.command("export")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@directory_of_a_peer
@click.pass_context
def export(context: click.Context, file: Path, directory: Path) -> None:
    """Copy the private key to FILE, readable by you alone.

    \b
    $ decentral identity export my-peer.key --out decentral-run
    """
    key = _key(remember(context, directory))
    _copy(key, file)
    click.echo(f"{file}: the key of {_name(file)}; who has it can speak as this peer")


@identity_command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@directory_of_a_peer
@click.pass_context
def import_(context: click.Context, file: Path, directory: Path) -> None:
    """Put the key in FILE in place, before the peer is started.

    \b
    $ decentral identity import my-peer.key --out decentral-run
    """
    if not file.is_file():
        raise UsageError(f"{file}: no such file; name what decentral identity export wrote")
    name = _name(file)
    remember(context, directory).mkdir(parents=True, exist_ok=True)
    _copy(file, directory / KEY_FILE)
    click.echo(f"{directory}: the peer is {name} from its next start on")


def _key(directory: Path) -> Path:
    key = directory / KEY_FILE
    if not key.is_file():
        raise UsageError(f"{directory}: no {KEY_FILE}; a peer makes one at its first start, or name another --out")
    return key


def _name(key: Path) -> str:
    """Name of the peer whose key this is; reading it checks it."""
    from decentral.swarm.identity import Identity
    from decentral.wire.keys import peer_name

    return peer_name(Identity.load_or_create(key).signer.peer)


def _copy(source: Path, target: Path) -> None:
    """Copy without ever being readable by others, and never over another key."""
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out, source.open("rb") as key:
            shutil.copyfileobj(key, out)
    except FileExistsError:
        raise UsageError(f"{target} exists and is not overwritten; move it away first") from None
    except OSError as error:
        raise DiskError(f"{target}: cannot be written ({error.strerror}); choose another place") from error
