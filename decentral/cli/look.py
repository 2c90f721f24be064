"""Commands that show how a peer, its swarm or its runs are, and change nothing."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.group import INTERRUPTED
from decentral.cli.invite import whom_it_reaches
from decentral.cli.options import INVITE, as_json, cards_by_name, directory_of_a_peer, remember
from decentral.cli.progress import read_peer
from decentral.cli.quantities import Duration
from decentral.errors import DecentralError, UsageError

if TYPE_CHECKING:
    from decentral.observe.compare import SeenRun
    from decentral.observe.status import Status

# ---- status: one peer, by its own word ----


@click.command("status")
@directory_of_a_peer
@click.option("-v", "--verbose", is_flag=True, help="With the epoch of the members, and figures of the newest round.")
@click.option("--prometheus", is_flag=True, help="Numbers in Prometheus' text format, for a textfile collector.")
@as_json
@click.pass_context
def status_command(context: click.Context, directory: Path, verbose: bool, prometheus: bool, as_json: bool) -> None:
    """Say in one sentence how the peer is, and what it has cost.

    Ends with code 1 when the peer is gone without a word, killed or crashed, was stopped by its disk, or is frozen; in
    JSON, "alive" tells whether its process is there, "frozen_seconds" for how long it has written nothing.

    \b
    $ decentral status --out decentral-run
    """
    from decentral.observe.status import is_lost

    if prometheus and as_json:
        raise click.UsageError("--prometheus and --json are two formats; name one")
    status, alive = read_peer(remember(context, directory))
    if prometheus:
        from decentral.observe.metrics import peer_exposition

        click.echo(peer_exposition(status, alive=alive), nl=False)
    elif as_json:
        click.echo(json.dumps({**asdict(status), "alive": alive}))
    else:
        _print_status(status, alive=alive, verbose=verbose)
        if status.invite:
            click.echo(f"invite    {_invite_here(status.invite, directory)}")
            click.echo(f"reaches   {whom_it_reaches(status)}")
    if is_lost(status) or status.frozen_seconds or (status.problem and not alive):
        context.exit(1)


def _invite_here(invite: str, directory: Path) -> str:
    """Return the invite whole on a terminal; else without its token, as the output of ``status`` is kept in logs."""
    from decentral.swarm.invite import whole_invite

    whole = invite
    with suppress(DecentralError):
        whole = whole_invite(invite, directory)
    if whole == invite or sys.stdout.isatty():
        return whole
    return f"{invite} (without its token: decentral invite --out {shlex.quote(str(directory))})"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A status, whether its process runs, and the words of a quantity by its name."""

    status: Status
    alive: bool
    text: Callable[[str], str]
    verbose: bool = False


def _print_status(status: Status, *, alive: bool, verbose: bool) -> None:
    from decentral.observe.health import quantity_text
    from decentral.observe.status import STATUS_LINES

    seen = _Seen(status, alive, partial(quantity_text, status), verbose)
    click.echo(status.health)
    for label, name in STATUS_LINES:
        if line := _LINES[name](seen) if name in _LINES else seen.text(name):
            click.echo(f"{label:<9} {line}")


def _run_line(seen: _Seen) -> str:
    status, rounds = seen.status, "" if seen.status.rounds is None else f" of {seen.status.rounds}"
    epoch = f", epoch {status.epoch}" if seen.verbose else ""
    return f"{status.run or '?'} ({status.algorithm or '?'}), round {status.round}{rounds}{epoch}"


def _loss_line(seen: _Seen) -> str:
    """Give the losses of training and of held-out text, as far as they are known."""
    known = (("", seen.text("loss")), ("held-out ", seen.text("held_out_loss")))
    losses = ", ".join(f"{name}{loss}" for name, loss in known if loss)
    return losses if seen.status.own_loop or not losses else f"{losses}, nats per token"


def _sample_line(seen: _Seen) -> str:
    """Give what the model says after a few words that it was given."""
    from decentral.observe.health import sample_of

    said = sample_of(seen.status)
    return f"{said['text']} (after round {said['round']}, from “{said['prompt']}” on)" if said else ""


def _limits_line(seen: _Seen) -> str:
    """Give what the person of this peer allows it."""
    caps = (("up", seen.status.max_upload), ("down", seen.status.max_download))
    parts = [f"{8 * rate / 1e6:g} Mbit/s {way}" for way, rate in caps if rate is not None]
    if seen.status.daily_upload is not None:
        parts.append(f"{seen.text('sent_today')} of {seen.text('daily_upload')} sent today (UTC)")
    return ", ".join(parts)


def _line_of_gifts(seen: _Seen) -> str:
    """Give what this peer gave over all its lives."""
    status = seen.status
    tokens = f", {status.given_tokens:,} tokens" if status.given_tokens else ""
    share = "" if status.given_share is None else f": {100 * status.given_share:.3g} % of the run"
    gave = f"{status.given_rounds:,} rounds, {status.inner_steps:,} inner steps{tokens}, {seen.text('given_seconds')}"
    return f"{gave}, {seen.text('given_bytes')} sent, in all its lives{share}" if status.given_seconds else ""


def _disk_line(seen: _Seen) -> str:
    """Give what it wrote today, and the bound."""
    bound = "" if seen.status.max_writes is None else f" of {seen.text('max_writes')}"
    over = seen.status.max_writes is not None and seen.status.written_today > seen.status.max_writes
    why = ": rounds alone write more, and checkpoints wait for up to an hour" if over else ""
    return f"{seen.text('written_today')}{bound} written today (UTC){why}" if seen.status.written_today else ""


def _settings_line(seen: _Seen) -> str:
    """Give what its person wants otherwise than usual, and what of all that is set outlives the process."""
    parts = [", ".join(f"{key} {value}" for key, value in seen.status.preferences.items())]
    if seen.status.kept_settings:
        parts.append(f"kept over restarts: {', '.join(seen.status.kept_settings)}")
    return "; ".join(part for part in parts if part)


def _updates_line(seen: _Seen) -> str:
    """Give what the newest round told of the swarm, and which figures are not as usual."""
    from decentral.observe.diagnostics import in_words

    status = seen.status
    if not status.diagnostics or not (seen.verbose or status.out_of_band):
        return ""
    part = ", of the part that this peer sums" if status.diagnosed_part else ""
    out = f"; out of band: {', '.join(status.out_of_band)}" if status.out_of_band else ""
    return f"{in_words(status.diagnostics)} (round {status.diagnosed_round}{part}){out}"


_LINES: Mapping[str, Callable[[_Seen], str]] = {  # of fields that take more than their number; empty: no line
    "run": _run_line,
    "peer": lambda seen: (
        f"{seen.status.peer or '?'}{_name_beside(seen.status.name)}, {seen.text('inner_steps')} inner steps"
    ),
    "loss": _loss_line,
    "sample": _sample_line,
    "seconds_left": lambda seen: (
        f"{seen.text('seconds_left')}, as it goes now" if seen.alive and seen.status.seconds_left else ""
    ),
    "bytes_sent": lambda seen: f"{seen.text('bytes_sent')} sent, {seen.text('bytes_received')} received",
    "bytes_measuring": lambda seen: (
        f"{seen.text('bytes_measuring')} sent to peers that measured this line (decentral doctor)"
        if seen.status.bytes_measuring
        else ""
    ),
    "given_rounds": _line_of_gifts,
    "written_today": _disk_line,
    "max_upload": _limits_line,
    "preferences": _settings_line,
    "uplink_bits": lambda seen: (
        f"{seen.text('uplink_bits')}, from the transfers made" if seen.status.uplink_bits else ""
    ),
    "members": lambda seen: f"{seen.text('members')}{'' if seen.alive else ', when it was last here'}",
    "diagnostics": _updates_line,
}


# ---- peers: the swarm, as one peer sees it ----


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
        who = f"{member.get('peer', '?')}{_name_beside(member.get('name'))}"
        click.echo(f"{who}  {presence(member)}  {_after(member)}  {traffic}{_way(member)}{you}")
    if not status.members:
        click.echo("nobody yet: no member of the run is known here", err=True)


def _name_beside(name: object) -> str:
    """Say what a peer calls itself, behind its key: anybody may take any name."""
    return f" ({name})" if name else ""


def _after(member: Mapping[str, Any]) -> str:
    """Say how many outer steps a member has made; in gossip the others do not tell, and a follower does not ask."""
    made = member.get("round")
    return "round ?" if made is None else f"round {made}"


def _way(member: Mapping[str, Any]) -> str:
    """Say how a member is reached, as far as it is known: path, time to an answer, uplink, share that went relayed."""
    parts = [str(member.get("path") or "")]
    if member.get("answers_in") is not None:
        parts.append(f"{1000 * member['answers_in']:.0f} ms")
    if member.get("uplink_bits"):
        parts.append(f"sends {member['uplink_bits'] / 1e6:.1f} Mbit/s")
    if member.get("relayed_share"):
        parts.append(f"{100 * member['relayed_share']:.0f} % relayed")
    return "".join(f"  {part}" for part in parts if part)


# ---- logs: events, past and new ----

_LOOK_SECONDS = 0.25  # between two looks at what is new
_LOGGED = "metrics"  # events of peer.log
Lines = Callable[[dict[str, Any]], list[str]]  # of an event: none, one or two


@click.command("logs")
@directory_of_a_peer
@click.option("--last", type=click.IntRange(min=1), default=20, show_default=True, help="How many events.")
@click.option("--event", help="Only events of this name, such as commit.")
@click.option("--since", type=Duration(), metavar="TIME", help="Only those of the last 30min, 2h; all of them.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens, until the peer ends or Ctrl-C.")
@as_json
@click.pass_context
def logs_command(
    context: click.Context,
    directory: Path,
    last: int,
    event: str | None,
    since: float | None,
    follow: bool,
    as_json: bool,
) -> None:
    """Tell what happened to the peer, in sentences. --json has the events whole; what a loop has logged is there with
    --event metrics only.

    \b
    $ decentral logs --out decentral-run --last 5 --event commit
    """
    from decentral.observe.events import EVENTS_FILE, read_events
    from decentral.observe.lines import there

    if not there(remember(context, directory) / EVENTS_FILE):
        read_peer(directory)  # UsageError where none has run
        raise UsageError(f"{directory}: no events are kept there; a baseline (start --solo) writes none")
    shape = _as_json if as_json else _sentences(directory)
    if since is not None and context.get_parameter_source("last") is not click.core.ParameterSource.COMMANDLINE:
        last = sys.maxsize
    begin = 0.0 if since is None else time.time() - since
    if follow:
        context.exit(_follow(directory, last, event, begin, shape))
    rows = list(read_events(directory, last=last, event=event, since=begin, without=_without(event)))
    for line in chain.from_iterable(map(shape, rows)):
        click.echo(line)
    if not rows:
        click.echo(_no_event(directory, event, "yet" if since is None else "in that time"), err=True)


def _no_event(directory: Path, event: str | None, when: str) -> str:
    """Say that none came; of one that has a name, which names did."""
    if event is None:
        return f"no event {when}"
    from decentral.observe.events import read_events

    names = sorted({str(row.get("event")) for row in read_events(directory)})
    return f"no event called {event!r} {when}" + (f"; there are {', '.join(names)}" if names else "")


def _without(event: str | None) -> tuple[str, ...]:
    """Return which events to leave out: a loop may log every step, and what happened beside it would be a line in
    fifteen.
    """
    return () if event == _LOGGED else (_LOGGED,)


def _as_json(row: dict[str, Any]) -> list[str]:
    return [json.dumps(row)]


def _sentences(directory: Path) -> Lines:
    """Return what tells events in their order, with the day where it is not today, and peers' names as they are now."""
    from decentral.observe.events import plain_words, time_of
    from decentral.observe.health import with_names
    from decentral.observe.story import Story, number

    story, today = Story(), time.strftime("%Y-%m-%d")
    called, asked_at = _names_in(directory), time.time()

    def lines(row: dict[str, Any]) -> list[str]:
        nonlocal called, asked_at
        if time_of(row) > asked_at:  # it came while this goes on: so may a name have
            called, asked_at = _names_in(directory), time.time()
        at = time.localtime(number(row.get("t")) or 0)
        day = time.strftime("%Y-%m-%d", at)
        stamp = time.strftime("%H:%M:%S", at) if day == today else f"{day} {time.strftime('%H:%M:%S', at)}"
        told = [plain_words(row)] if row.get("event") == _LOGGED else story.tell(row)
        return [f"{stamp} {with_names(sentence, called)}" for sentence in told]

    return lines


def _names_in(directory: Path) -> Mapping[str, str]:
    """Return what peers call themselves, as the status says; none where it cannot be read."""
    from decentral.observe.health import names_in
    from decentral.observe.status import read_status

    with suppress(DecentralError):
        return names_in(read_status(directory))
    return {}


def _follow(directory: Path, last: int, event: str | None, begin: float, shape: Lines) -> int:
    """Print events as they come, until the peer ends; returns the exit code, Ctrl-C's when that ended it before."""
    from decentral.observe.events import follow_events, time_of

    nobody = threading.Event()
    try:
        for row in follow_events(
            directory,
            last=last,
            event=event,
            without=_without(event),
            idle=lambda: _idle(nobody),
            ended=lambda: _has_ended(directory),
        ):
            for line in shape(row) if time_of(row) >= begin else ():
                click.echo(line)
    except KeyboardInterrupt:
        return INTERRUPTED
    click.echo(f"the peer has ended: {read_peer(directory)[0].health}", err=True)
    return 0


def _idle(nobody: threading.Event) -> None:
    nobody.wait(_LOOK_SECONDS)


def _has_ended(directory: Path) -> bool:
    """Tell whether its process is gone; False where the status says nothing, or nothing that this version reads."""
    try:
        return not read_peer(directory)[1]
    except DecentralError:
        return False


# ---- compare: runs side by side ----
#
# As one table and one figure.

_OF_EVERY_RUN = ("run.name", "run.salt")  # differ between any two runs, and say nothing
_MOST_RUNS = 8  # their columns still fit a wide terminal


@click.command("compare")
@click.argument("directories", metavar="RUN_A RUN_B ...", nargs=-1, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("compare.png"),
    show_default=True,
    help="Where the figure goes.",
)
@as_json
def compare_command(directories: tuple[Path, ...], figure: Path, as_json: bool) -> None:
    """Set two or more runs side by side: what each reached. What it cost is told, too.

    One peer's directory stands for its run: any of its peers. Runs may go on meanwhile.

    \b
    $ decentral compare sparse dense --figure both.png
    """
    from decentral.manifest import differing
    from decentral.observe.compare import common_kind, draw, names_of, read_run
    from decentral.observe.metrics import can_draw, no_figure

    if not 2 <= len(directories) <= _MOST_RUNS:
        raise click.UsageError(f"you named {len(directories)}; name 2 to {_MOST_RUNS} run directories")
    runs = [read_run(directory) for directory in directories]
    kind, names = common_kind(runs), names_of(runs)
    drawn = can_draw()
    if drawn:
        draw(figure, {name: run.curves[kind] for name, run in zip(names, runs, strict=True)}, kind=kind)
    terms = {k: v for k, v in differing([run.manifest for run in runs]).items() if k not in _OF_EVERY_RUN}
    if as_json:
        told = [{"run": name, **_numbers(run, kind)} for name, run in zip(names, runs, strict=True)]
        click.echo(
            json.dumps({"compared": kind, "runs": told, "terms": terms, "figure": str(figure) if drawn else None})
        )
        return
    rows = {"": names, **_rows(runs, kind)}
    rows |= {key: ["unset" if value is None else str(value) for value in values] for key, values in terms.items()}
    click.echo(_align(rows))
    click.echo(f"\n{kind} over steps and cost: {figure}" if drawn else f"\n{no_figure()}")


def _numbers(run: SeenRun, kind: str) -> dict[str, object]:
    """Return what is told of one run; what is not known is null."""
    values, status = [point.value for point in run.curves[kind]], run.status
    sent = max((point.nbytes for point in run.curves[kind] if point.nbytes is not None), default=None)
    return {
        "method": run.manifest.outer.method,
        "round": None if status is None else status.round,
        "rounds": run.manifest.run.rounds,
        "inner_steps": run.steps,
        "seconds": run.seconds,
        "last": values[-1],
        "best": min(values),
        "bytes_sent": (None if status is None else status.bytes_sent) if sent is None else sent,
        "contributed": status.rounds_contributed / status.rounds_seen if status and status.rounds_seen else None,
    }


def _rows(runs: Sequence[SeenRun], kind: str) -> dict[str, list[str]]:
    """Return the table, row by row."""
    from decentral.observe.health import in_time, in_units

    found = [_numbers(run, kind) for run in runs]

    def row(key: str, shown: str = "{}") -> list[str]:
        return ["?" if one[key] is None else shown.format(one[key]) for one in found]

    sent = ["?" if one["bytes_sent"] is None else in_units(float(str(one["bytes_sent"]))) for one in found]
    return {
        "method": row("method"),
        "round": [f"{made} of {whole}" for made, whole in zip(row("round"), row("rounds"), strict=True)],
        "inner steps": row("inner_steps"),
        f"{kind}, last": row("last", "{:.4f}"),
        f"{kind}, best": row("best", "{:.4f}"),
        "sent by this peer": sent,
        "time": [in_time(run.seconds) for run in runs],
        "rounds contributed to": row("contributed", "{:.0%}"),
    }


def _align(rows: dict[str, list[str]]) -> str:
    """Return the rows with columns as wide as their widest word."""
    first = max(map(len, rows))
    widths = [max(map(len, column)) for column in zip(*rows.values(), strict=True)]
    lines = []
    for name, words in rows.items():
        cells = (word.rjust(width) for word, width in zip(words, widths, strict=True))
        lines.append("  ".join([name.ljust(first), *cells]).rstrip())
    return "\n".join(lines)


# ---- doctor: what this machine can ----
#
# And whether others reach it.


@click.command("doctor")
@click.argument("invite", nargs=-1, type=INVITE, envvar="DECENTRAL_INVITE")
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Where a run would be kept; its disk is checked.",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="ADDR",
    callback=cards_by_name,
    help="Multiaddr, or network card, that the peer will listen on; all interfaces by default.",
)
@click.option("--relay", "relays", multiple=True, metavar="ADDR", help="A relay to ask, as decentral relay prints it.")
@as_json
@click.pass_context
def doctor_command(
    context: click.Context,
    invite: tuple[str, ...],
    directory: Path,
    listen: tuple[str, ...],
    relays: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check what a peer needs here, and whether others can dial it. Versions, device, disk and transport are looked at,
    too.

    The words of decentral invite --words do instead of an invite: they are used up then, and it prints the invite.
    -, @FILE and DECENTRAL_INVITE do, too, as with join.

    \b
    $ decentral doctor INVITE
    """
    from decentral.cli.checks import examine
    from decentral.cli.invite import invite_of
    from decentral.peer.network_setup import check_relays
    from decentral.swarm.invite import Invite

    check_relays(relays)
    line: str | None = None
    if invite:
        line, relays = invite_of(invite, relays)
        Invite.parse(line)  # before minutes are spent on what is none
        if len(invite) > 1 or line != invite[0]:
            click.echo(f"the words are used up; {_what_they_gave(line)}", err=True)
    findings = examine(remember(context, directory), line, listen=listen, relays=relays)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:<5} {finding.what:<10} {finding.detail}")
    if any(finding.verdict == "fail" for finding in findings):
        context.exit(1)


def _what_they_gave(invite: str) -> str:
    from decentral.observe.screen import invite_for

    if invite_for(sys.stderr, invite) == invite:
        return f"join with: decentral join {invite}"
    return "their invite has a token, which is not written where others may read it: join with new words"


# ---- support: one file for who helps ----


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
    """Write one zip for whoever helps. It has versions, doctor, terms, status, the last events and numbers.

    No key, no token, no invite, no model, no data; addresses and your home folder are replaced by words. Look into it
    before you send it.

    \b
    $ decentral support --out decentral-run
    """
    from decentral.cli.support import write_support

    names = write_support(remember(context, directory), target, examined=doctor)
    click.echo(f"{target}: {', '.join(names)}; look into it before you send it")
