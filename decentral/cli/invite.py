"""``invite``: the line that lets others join the run of a peer here, or four words and a number to say instead."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.errors import InviteError, UsageError

if TYPE_CHECKING:
    from decentral.manifest.terms import Data
    from decentral.observe.status import Status


@click.command("invite")
@directory_of_a_peer
@click.option(
    "--words",
    is_flag=True,
    help="Four words and a number to say over a telephone, good for ten minutes and one person; waits meanwhile.",
)
@click.option(
    "--relay",
    "relays",
    multiple=True,
    metavar="ADDR",
    help="With --words: a relay at which you both meet, repeatable, as decentral relay prints it, or HOST:PORT; "
    "the peer's own relays and the local network are used anyway.",
)
@click.option("--lan/--no-lan", default=True, show_default=True, help="With --words: meet on the local network, too.")
@as_json
@click.pass_context
def invite_command(
    context: click.Context, directory: Path, words: bool, relays: tuple[str, ...], lan: bool, as_json: bool
) -> None:
    """Print the line by which others join, or words to say instead. It is for the run of the peer here.

    \b
    $ decentral invite --words --out decentral-run
    """
    from decentral.observe.status import read_status

    invite = _invite_of(remember(context, directory))
    if words:
        _say(invite, relays, lan=lan, as_json=as_json)
        return
    if relays or not lan:
        raise UsageError("--relay and --no-lan are about how words are exchanged; add --words")
    whom = whom_it_reaches(read_status(directory))
    if as_json:
        click.echo(json.dumps({"invite": invite, "reaches": whom}))
        return
    click.echo(f"decentral join {invite}{_brings(directory)}")
    click.echo(f"reaches: {whom}", err=True)


def whom_it_reaches(status: Status) -> str:
    """Say whom the invite of a peer reaches, and which of its relays do not answer."""
    from decentral.swarm.invite import Invite, reach

    whom = "not known"
    with suppress(InviteError):  # of another version
        whom = reach(Invite.parse(status.invite).addresses)
    return "; ".join((whom, *(f"relay {relay} does not answer" for relay in status.silent_relays)))


def _brings(directory: Path) -> str:
    """The option that the run of the peer here wants of everybody who joins."""
    from decentral.manifest import load_manifest
    from decentral.node.folder import MANIFEST_FILE

    terms = directory / MANIFEST_FILE
    if not terms.exists() or (manifest := load_manifest(terms)).model.task == "custom":
        return ""
    return text_wanted(manifest.data)


def text_wanted(data: Data) -> str:
    """Say what else the line that joins a run of this text needs: nothing, where the text comes by itself."""
    if data.corpus == "stdlib" or data.shared is not None:
        return ""
    return " --data " + shlex.quote(f"PATH/TO/{data.corpus}")


def _invite_of(directory: Path) -> str:
    from decentral.observe.status import is_running, read_status
    from decentral.swarm.invite import whole_invite

    status = read_status(directory)
    if not is_running(status):
        raise UsageError(f"{directory}: the peer that ran here has ended; start it again, then invite")
    if not status.invite:
        raise UsageError(
            f"{directory}: the peer is still {status.state} and cannot be reached yet; try again in a moment"
        )
    return whole_invite(status.invite, directory)


def _say(invite: str, relays: tuple[str, ...], *, lan: bool, as_json: bool) -> None:
    import anyio

    from decentral.cli.group import stop_signals
    from decentral.observe.health import short_name
    from decentral.swarm.meeting import LASTS, host_words, short_address
    from decentral.swarm.words import new_code
    from decentral.wire.keys import peer_name

    code, known = new_code(), tuple(dict.fromkeys((*relays_at(relays), *relays_of(invite))))

    def ready(places: list[str]) -> None:
        elsewhere = [short_address(relay) for relay in known if short_address(relay) in places]
        line = f'decentral join "{code}"' + "".join(f" --relay {place}" for place in elsewhere)
        told = {"words": str(code), "relays": elsewhere, "seconds": LASTS}
        click.echo(json.dumps(told) if as_json else line)
        waits = f"good for {LASTS / 60:g} min and one person, at {', '.join(places)}; Ctrl-C takes it back"
        click.echo(waits, err=True)

    with stop_signals():
        guest = anyio.run(partial(host_words, code, invite, known, lan=lan, ready=ready), backend="asyncio")
    click.echo(f"{short_name(peer_name(guest))} knew the words and has the invite; they are void now", err=True)


# ---- words in the place of an invite ----
#
# They are read from the command line, and exchanged for the invite.

SEARCH_SECONDS = 60.0  # to find who invites, where nothing else was asked for


def as_one_text(invite: str, arguments: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Words that were typed without quotes are one invite; what follows them stays a script's arguments."""
    from decentral.swarm.words import WORDS

    apart = (invite, *arguments[:WORDS])
    spoken = len(apart) == WORDS + 1 and all(one.isalpha() for one in apart[:-1]) and apart[-1][:1].isdecimal()
    return (" ".join(apart), tuple(arguments[WORDS:])) if spoken else (invite, tuple(arguments))


def invite_of(
    said: Sequence[str], relays: Sequence[str], *, lan: bool = True, seconds: float | None = None
) -> tuple[str, tuple[str, ...]]:
    """An invite line as it is, or the one that words are exchanged for; and the relays' whole addresses.

    Raises InviteError, NoPeersError.
    """
    from decentral.swarm.words import looks_spoken

    text = " ".join(said)
    return _exchange(text, relays, lan=lan, seconds=seconds) if looks_spoken(text) else (text, tuple(relays))


def _exchange(words: str, relays: Sequence[str], *, lan: bool, seconds: float | None) -> tuple[str, tuple[str, ...]]:
    import anyio

    from decentral.swarm.meeting import find_invite
    from decentral.swarm.words import parse_code

    code = parse_code(words)
    known = relays_at(relays)
    click.echo(f"looking for who invites at {code.number} ...", err=True)
    look = partial(find_invite, code, known, lan=lan, seconds=SEARCH_SECONDS if seconds is None else seconds)
    return str(anyio.run(look, backend="asyncio")), known


def relays_at(given: Sequence[str]) -> tuple[str, ...]:
    """Their multiaddrs; HOST and HOST:PORT are asked who they are. Raises TransportError."""
    import anyio

    from decentral.swarm.meeting import relay_at

    return tuple(where if where.startswith("/") else anyio.run(relay_at, where) for where in given)


def relays_of(invite: str) -> tuple[str, ...]:
    """Return the relays that the invite's addresses lead through."""
    from decentral.swarm.invite import Invite
    from decentral.transport.protocols.circuit import relay_of

    found = (relay_of(address) for address in Invite.parse(invite).addresses)
    return tuple(dict.fromkeys(relay[1] for relay in found if relay is not None))
