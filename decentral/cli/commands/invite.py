"""``invite``: the line that lets others join the run of a peer here, or four words and a number to say instead."""

import json
from functools import partial
from pathlib import Path

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.errors import UsageError


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
    """Print the line that lets others join the run of the peer here; with --words, what you can say instead.

    \b
    $ decentral invite --words --out decentral-run
    """
    invite = _invite_of(remember(context, directory))
    if words:
        _say(invite, relays, lan=lan, as_json=as_json)
        return
    if relays or not lan:
        raise UsageError("--relay and --no-lan are about how words are exchanged; add --words")
    click.echo(json.dumps({"invite": invite}) if as_json else f"decentral join {invite}")


def _invite_of(directory: Path) -> str:
    from decentral.observe.status import is_running, read_status

    status = read_status(directory)
    if not is_running(status):
        raise UsageError(f"{directory}: the peer that ran here has ended; start it again, then invite")
    if not status.invite:
        raise UsageError(
            f"{directory}: the peer is still {status.state} and cannot be reached yet; try again in a moment"
        )
    return status.invite


def _say(invite: str, relays: tuple[str, ...], *, lan: bool, as_json: bool) -> None:
    import anyio

    from decentral.cli.spoken import relays_at, relays_of
    from decentral.cli.stopping import stop_signals
    from decentral.observe.health import short_name
    from decentral.swarm.meeting import LASTS, host_words, spoken_place
    from decentral.swarm.words import new_code
    from decentral.wire.keys import peer_name

    code, known = new_code(), tuple(dict.fromkeys((*relays_at(relays), *relays_of(invite))))

    def ready(places: list[str]) -> None:
        elsewhere = [spoken_place(relay) for relay in known if spoken_place(relay) in places]
        line = f'decentral join "{code}"' + "".join(f" --relay {place}" for place in elsewhere)
        told = {"words": str(code), "relays": elsewhere, "seconds": LASTS}
        click.echo(json.dumps(told) if as_json else line)
        waits = f"good for {LASTS / 60:g} min and one person, at {', '.join(places)}; Ctrl-C takes it back"
        click.echo(waits, err=True)

    with stop_signals():
        guest = anyio.run(partial(host_words, code, invite, known, lan=lan, ready=ready), backend="asyncio")
    click.echo(f"{short_name(peer_name(guest))} knew the words and has the invite; they are void now", err=True)
