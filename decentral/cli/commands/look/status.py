"""``decentral status``: what the peer that runs in a directory says of itself."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.cli.shown.last_status import read_peer

if TYPE_CHECKING:
    from decentral.observe.status import Status


@click.command("status")
@directory_of_a_peer
@click.option("--prometheus", is_flag=True, help="Numbers in Prometheus' text format, for a textfile collector.")
@as_json
@click.pass_context
def status_command(context: click.Context, directory: Path, prometheus: bool, as_json: bool) -> None:
    """Say in one sentence how the peer is, and what it cost since it started.

    Ends with code 1 when the peer is gone without a word, killed or crashed; in JSON, "alive" tells whether it runs.

    \b
    $ decentral status --out decentral-run
    """
    from decentral.observe.status import is_lost

    if prometheus and as_json:
        raise click.UsageError("--prometheus and --json are two formats; name one")
    status, alive = read_peer(remember(context, directory))
    if prometheus:
        from decentral.cli.shown.status_numbers import text

        click.echo(text(status, alive=alive), nl=False)
    elif as_json:
        click.echo(json.dumps({**asdict(status), "alive": alive}))
    else:
        _print_status(status, alive=alive)
    if is_lost(status):
        context.exit(1)


def _print_status(status: "Status", *, alive: bool) -> None:
    from decentral.observe.health import in_time, in_units

    click.echo(status.health)
    rounds = "" if status.rounds is None else f" of {status.rounds}"
    click.echo(
        f"run       {status.run or '?'} ({status.algorithm or '?'}), round {status.round}{rounds}, epoch {status.epoch}"
    )
    click.echo(f"peer      {status.peer or '?'}, {status.inner_steps} inner steps")
    if losses := _losses(status):
        click.echo(f"loss      {losses}{'' if status.own_loop else ', nats per token'}")
    if alive and status.seconds_left:
        click.echo(f"left      {in_time(status.seconds_left)}, as it goes now")
    click.echo(f"traffic   {in_units(status.bytes_sent)} sent, {in_units(status.bytes_received)} received")
    if status.bytes_measuring:
        click.echo(
            f"besides   {in_units(status.bytes_measuring)} sent to peers that measured this line (decentral doctor)"
        )
    if limits := _limits(status):
        click.echo(f"limits    {limits}")
    if settings := _settings(status):
        click.echo(f"settings  {settings}")
    if status.uplink_bits:
        click.echo(f"uplink    {status.uplink_bits / 1e6:g} Mbit/s, from the transfers made")
    click.echo(f"members   {len(status.members)}{'' if alive else ', when it was last here'}")
    if status.diagnostics:
        click.echo(f"updates   {_diagnostics(status)}")
    if status.invite:
        click.echo(f"invite    {status.invite}")


def _losses(status: "Status") -> str:
    """Those of training and of held-out text, as far as they are known."""
    known = (("", status.loss), ("held-out ", status.held_out_loss))
    return ", ".join(f"{name}{loss:.4f}" for name, loss in known if loss is not None)


def _diagnostics(status: "Status") -> str:
    """What the newest round told of the swarm, and which figures are not as usual."""
    from decentral.observe.diagnostics import in_words

    part = ", of the part that this peer sums" if status.diagnosed_part else ""
    out = f"; out of band: {', '.join(status.out_of_band)}" if status.out_of_band else ""
    return f"{in_words(status.diagnostics)} (round {status.diagnosed_round}{part}){out}"


def _limits(status: "Status") -> str:
    """What the person of this peer allows it."""
    from decentral.observe.health import in_units

    caps = (("up", status.max_upload), ("down", status.max_download))
    parts = [f"{8 * rate / 1e6:g} Mbit/s {way}" for way, rate in caps if rate is not None]
    if status.daily_upload is not None:
        parts.append(f"{in_units(status.sent_today)} of {in_units(status.daily_upload)} sent today (UTC)")
    return ", ".join(parts)


def _settings(status: "Status") -> str:
    """What its person wants otherwise than usual, and what of all that is set outlives the process."""
    parts = [", ".join(f"{key} {value}" for key, value in status.preferences.items())]
    if status.kept_settings:
        parts.append(f"kept over restarts: {', '.join(status.kept_settings)}")
    return "; ".join(part for part in parts if part)
