"""``relay``: a public peer that carries the bytes of others and trains nothing."""

from pathlib import Path

import click

from decentral.cli.options import INVITE
from decentral.cli.quantities import Rate, Size

LISTEN = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001")  # a port of its own: invites name it for months


@click.command("relay")
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDR",
    help="Multiaddr to listen on, repeatable; TCP port 4001 on all interfaces when not given.",
)
@click.option(
    "--announce",
    multiple=True,
    metavar="ADDR",
    help="Where others can dial it, when this machine cannot know that, such as /dns4/relay.example.org/tcp/4001.",
)
@click.option(
    "--max-peers",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Peers that can be reached through it at a time.",
)
@click.option(
    "--max-rate", type=Rate(), metavar="RATE", help="Pass on no faster than this, such as 50mbit. No cap else."
)
@click.option(
    "--max-memory",
    type=Size(),
    default="256MB",
    show_default=True,
    metavar="SIZE",
    help="Memory of the process, whatever peers do; it bounds how many connections are relayed at a time.",
)
@click.option(
    "--metrics", metavar="[HOST:]PORT", help="Answer Prometheus there, such as 9400, on localhost; /healthz, too."
)
@click.option(
    "--identity",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("relay.key"),
    show_default=True,
    help="Key file, made when there is none. Keep it: the relay's address ends in its name.",
)
@click.option(
    "--keep",
    "kept",
    type=INVITE,
    multiple=True,
    metavar="INVITE",
    envvar="DECENTRAL_KEEP",
    show_envvar=True,
    help="Follow this run, and give its last state to those who come when all peers have gone; repeatable, for 4 runs. "
    "- asks for the invite, @FILE reads it.",
)
@click.option(
    "--keep-in",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("relay-kept"),
    show_default=True,
    help="Folder of what is kept; each run has one in it.",
)
@click.option(
    "--keep-disk",
    type=Size(),
    default="10GB",
    show_default=True,
    metavar="SIZE",
    help="A run whose state takes more is not kept.",
)
@click.pass_context
def relay_command(
    context: click.Context,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    max_peers: int,
    max_rate: float | None,
    max_memory: int,
    metrics: str | None,
    identity: Path,
    kept: tuple[str, ...],
    keep_in: Path,
    keep_disk: int,
) -> None:
    """Carry the bytes of peers that cannot be dialled. Prints what they give as --relay; runs until Ctrl-C.

    \b
    $ decentral relay --max-rate 50mbit
    """
    from decentral.cli.relaying import Keeping, RelayPlan, run_relay
    from decentral.transport.protocols.circuit import RelayLimits

    limits = RelayLimits.within(max_memory, places=max_peers, rate=max_rate)
    plan = RelayPlan(listen or LISTEN, announce, limits, metrics, identity, Keeping(kept, keep_in, keep_disk))
    context.exit(run_relay(plan))
