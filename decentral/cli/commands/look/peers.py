"""``decentral peers``: the members of the swarm, as the peer that runs in a directory sees them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.cli.shown.last_status import read_peer


@click.command("peers")
@directory_of_a_peer
@as_json
@click.pass_context
def peers_command(context: click.Context, directory: Path, as_json: bool) -> None:
    """List the members of the swarm as this peer sees them.

    \b
    $ decentral peers --out decentral-run --json
    """
    status, alive = read_peer(remember(context, directory))
    if as_json:
        click.echo(json.dumps({"epoch": status.epoch, "members": list(status.members)}))
        return
    from decentral.observe.health import in_units
    from decentral.observe.status import presence

    if not alive:
        click.echo("the peer has ended; this is what it saw last:", err=True)
    for member in status.members:
        you = "  (you)" if member.get("peer") == status.peer else ""
        traffic = f"{in_units(member.get('bytes_sent', 0))} to, {in_units(member.get('bytes_received', 0))} from"
        click.echo(f"{member.get('peer', '?')}  {presence(member)}  {_after(member)}  {traffic}{_way(member)}{you}")
    if not status.members:
        click.echo("nobody yet: no member of the run is known here", err=True)


def _after(member: Mapping[str, Any]) -> str:
    """How many outer steps a member has made; in gossip the others do not tell, and a follower does not ask."""
    made = member.get("round")
    return "round ?" if made is None else f"round {made}"


def _way(member: Mapping[str, Any]) -> str:
    """How a member is reached, as far as it is known: path, time to an answer, uplink, share that went relayed."""
    parts = [str(member.get("path") or "")]
    if member.get("answers_in") is not None:
        parts.append(f"{1000 * member['answers_in']:.0f} ms")
    if member.get("uplink_bits"):
        parts.append(f"sends {member['uplink_bits'] / 1e6:.1f} Mbit/s")
    if member.get("relayed_share"):
        parts.append(f"{100 * member['relayed_share']:.0f} % relayed")
    return "".join(f"  {part}" for part in parts if part)
