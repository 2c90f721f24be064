"""``pause``, ``resume``, ``finish``, ``leave``, ``schedule``, ``set``: steer the peer that runs in a directory."""

import json
import time
from pathlib import Path
from typing import Any

import click

from decentral.cli.options import as_json, directory_of_a_peer, remember
from decentral.cli.quantities import Duration, Rate
from decentral.errors import ConfigError, RoundFailed, UsageError

_POLL_SECONDS = 0.2


@click.command("pause")
@directory_of_a_peer
@click.option("--for", "seconds", type=Duration(), metavar="TIME", help="Go on by itself after so long: 30min, 2h.")
@as_json
@click.pass_context
def pause_command(context: click.Context, directory: Path, seconds: float | None, as_json: bool) -> None:
    """Stay in the swarm without contributing, until resume. Nothing is lost.

    A peer of decentral start or join stops training meanwhile. A script with a loop of its own, and a peer of several
    processes, train on: only what they would contribute is held back. The answer says which it is.

    \b
    $ decentral pause --out decentral-run --for 2h
    """
    values = {} if seconds is None else {"until": time.time() + seconds}
    _ask("pause", remember(context, directory), as_json, values=values)


@click.command("resume")
@directory_of_a_peer
@as_json
@click.pass_context
def resume_command(context: click.Context, directory: Path, as_json: bool) -> None:
    """Contribute again after a pause. Training goes on if it had stopped.

    \b
    $ decentral resume --out decentral-run
    """
    _ask("resume", remember(context, directory), as_json)


@click.command("finish")
@directory_of_a_peer
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait until it has left.")
@as_json
@click.pass_context
def finish_command(context: click.Context, directory: Path, wait: float, as_json: bool) -> None:
    """Leave once the round that is made now is committed. What this peer did for it counts; at rest it leaves at once.

    \b
    $ decentral finish --out decentral-run
    """
    _ask("finish", remember(context, directory), as_json, wait=wait)


@click.command("leave")
@directory_of_a_peer
@click.option("--wait", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS", help="Wait until it has left.")
@as_json
@click.pass_context
def leave_command(context: click.Context, directory: Path, wait: float, as_json: bool) -> None:
    """Leave the swarm at the next step; finish waits for the round. It says goodbye and keeps a checkpoint.

    \b
    $ decentral leave --out decentral-run --wait 10
    """
    _ask("leave", remember(context, directory), as_json, wait=wait)


@click.command("schedule")
@click.argument("hours")
@directory_of_a_peer
@as_json
@click.pass_context
def schedule_command(context: click.Context, hours: str, directory: Path, as_json: bool) -> None:
    """Train only in these hours of the day, or always. They are local time; a restart keeps them.

    \b
    $ decentral schedule 22:00-07:00 --out decentral-run
    """
    _set("schedule", hours, remember(context, directory), as_json)


@click.command("set")
@click.argument("key", metavar="SETTING")
@click.argument("value")
@directory_of_a_peer
@as_json
@click.pass_context
def set_command(context: click.Context, key: str, value: str, directory: Path, as_json: bool) -> None:
    """Change a limit of a peer, now or for its next start. None lifts it. A restart keeps it.

    SETTING is one of max-upload, max-download, daily-upload, max-writes, threads, max-memory, max-compute, schedule,
    on-battery and only-when-idle, as the options of decentral start and join. What is set stands above such an option
    until the option is given another value.

    \b
    $ decentral set max-upload 5mbit
    $ decentral set only-when-idle on
    """
    _set(key, value, remember(context, directory), as_json)


def _set(key: str, value: str, directory: Path, as_json: bool) -> None:
    """Refused before anything is asked when the peer could not read it."""
    from decentral.preferences.preferences import Preferences, with_setting

    try:
        with_setting(Preferences(), key, value)
    except ConfigError as error:  # of what was typed, and of no manifest
        raise UsageError(str(error)) from None
    if key in ("max-upload", "max-download") and value.strip().lower() != "none":
        Rate().convert(value, None, None)  # it may be too little
    if not _runs(directory):
        _keep(directory, key, value, as_json)
        return
    _ask("set", directory, as_json, values={"key": key, "value": value})


def _runs(directory: Path) -> bool:
    """Raises UsageError where there never was a peer."""
    from decentral.observe.status import ENDED, is_running, read_status

    status = read_status(directory)
    return status.state not in ENDED and is_running(status)


def _keep(directory: Path, key: str, value: str, as_json: bool) -> None:
    from decentral.preferences.controls import keep_setting

    keep_setting(directory, key, value)
    kept = {"kept": "set", "key": key, "value": value}
    click.echo(json.dumps(kept) if as_json else f"no peer runs there now; kept for its next start: {key} {value}")


def _ask(
    request: str, directory: Path, as_json: bool, *, wait: float = 0.0, values: dict[str, Any] | None = None
) -> None:
    from decentral.observe.health import in_time
    from decentral.observe.requests import answer_to, ask_running

    status = ask_running(directory, request, **(values or {}))
    if wait:
        _wait_for_the_end(directory, wait)
    if as_json:
        asked: dict[str, object] = {"asked": request, "pid": status.pid, "peer": status.peer, **(values or {})}
        click.echo(json.dumps(asked | {"trains_while_paused": status.trains_while_paused}))
    elif request == "set":
        click.echo(f"asked: {' '.join(map(str, (values or {}).values()))}, now and after a restart")
    else:
        ends = "" if not values else f", or for {in_time(values['until'] - time.time() + 0.5)}"
        click.echo(f"asked: {answer_to(request, status, ends)}")


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
