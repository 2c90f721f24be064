"""``pause``, ``resume``, ``leave``: steer the peer that runs in a directory."""

import json
import time
from pathlib import Path

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.errors import RoundFailed, UsageError

_ANSWERS = {
    "pause": "will pause after this inner step: no training, no contributions until decentral resume",
    "resume": "trains on and contributes again",
    "leave": "finishes its round and leaves",
}
_POLL_SECONDS = 0.2


@click.command("pause")
@directory_of_a_peer
@as_json
@click.pass_context
def pause_command(context: click.Context, directory: Path, as_json: bool) -> None:
    """Stay in the swarm without contributing, until decentral resume. Nothing is lost.

    A peer of decentral start or join stops training meanwhile. A script with a loop of its own, and a peer of several
    processes, train on: only what they would contribute is held back. The answer says which it is.

    \b
    $ decentral pause --out decentral-run
    """
    _ask("pause", remember(context, directory), as_json)


@click.command("resume")
@directory_of_a_peer
@as_json
@click.pass_context
def resume_command(context: click.Context, directory: Path, as_json: bool) -> None:
    """Contribute again after a pause, and train on if training had stopped.

    \b
    $ decentral resume --out decentral-run
    """
    _ask("resume", remember(context, directory), as_json)


@click.command("leave")
@directory_of_a_peer
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait until it has left.")
@as_json
@click.pass_context
def leave_command(context: click.Context, directory: Path, wait: float, as_json: bool) -> None:
    """Leave the swarm: finish the round, say goodbye, keep a checkpoint.

    \b
    $ decentral leave --out decentral-run --wait 10
    """
    _ask("leave", remember(context, directory), as_json, wait=wait)


def _ask(request: str, directory: Path, as_json: bool, *, wait: float = 0.0) -> None:
    from decentral.observe.requests import ask
    from decentral.observe.status import is_running, read_status

    status = read_status(directory)
    if not is_running(status):
        raise UsageError(f"{directory}: the peer that ran here has ended (it was {status.state}); nothing to {request}")
    ask(directory, request)
    if wait:
        _wait_for_the_end(directory, wait)
    if as_json:
        asked: dict[str, object] = {"asked": request, "pid": status.pid, "peer": status.peer}
        click.echo(json.dumps(asked | {"trains_while_paused": status.trains_while_paused}))
    elif request == "pause" and status.trains_while_paused:
        click.echo("asked: the peer will contribute nothing until decentral resume; its own loop trains on meanwhile")
    else:
        click.echo(f"asked: the peer {_ANSWERS[request]}")


def _wait_for_the_end(directory: Path, seconds: float) -> None:
    import psutil

    from decentral.observe.status import is_running, read_status

    deadline = time.monotonic() + seconds
    status = read_status(directory)
    while is_running(status):
        left = deadline - time.monotonic()
        if left <= 0:
            raise RoundFailed(
                f"{directory}: the peer is still {status.state} after {seconds:g} s; it leaves when its "
                "round ends, decentral status tells more"
            )
        try:
            psutil.Process(status.pid).wait(min(_POLL_SECONDS, left))
        except psutil.TimeoutExpired:
            status = read_status(directory)
        except psutil.NoSuchProcess:
            return
