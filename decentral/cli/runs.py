"""``start``, ``join``, ``demo``: be the first peer of a run, be another one, see it all on one machine."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from traceback import TracebackException
from typing import TYPE_CHECKING, Any

import click

from decentral.cli.options import (
    HEADINGS,
    INVITE,
    GroupedOptions,
    JobOptions,
    as_json,
    options_of_a_peer,
    presets_that_begin,
    remember,
    with_admit,
)
from decentral.cli.ports import page_beside
from decentral.cli.quantities import Size
from decentral.errors import ConfigError, DecentralError, UsageError
from decentral.quantities import time_left
from decentral.signals import ENDING, drop_closed_terminal

if TYPE_CHECKING:
    from decentral.manifest import Manifest
    from decentral.observe.screen import Display
    from decentral.preferences.preferences import Preferences
    from decentral.tasks.evaluate import Survey


_background = click.option(
    "--background",
    is_flag=True,
    help="Go on without this terminal: as a service where systemd is, else as a process with a log in --out.",
)


@click.command("start", cls=GroupedOptions, headings=HEADINGS)
@click.argument("file", metavar="RUN.toml", type=click.Path(path_type=Path, dir_okay=False))
@options_of_a_peer
@with_admit(
    "Let in only peers that have this token: it is in the invites of all peers. Without it whoever can dial a peer may "
    "join, and many who join and never vote hold up the rounds."
)
@click.option(
    "--from",
    "begins_from",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Model folder whose weights the run begins from, as export writes it; its sizes are the manifest's.",
)
@_background
@click.option("--alone", is_flag=True, help="Train at once; the first peer waits for a second one else.")
@click.option("--solo", is_flag=True, help="Train alone for as many inner steps as the run has: the baseline.")
@click.option(
    "--pace",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="With --solo: keep in step with the peer that runs in DIR, and end where it ends.",
)
@click.pass_context
def start_command(context: click.Context, /, file: Path, directory: Path, background: bool, **given: Any) -> None:
    """Be the first peer of a run, and print the line to join by.

    \b
    $ decentral start run.toml --out decentral-run
    decentral join INVITE
    """
    from decentral.cli.preflight import check_first_weights, check_trained_here
    from decentral.manifest import load_manifest
    from decentral.swarm.admission import check_token

    options = JobOptions.of(directory, given)
    if given["admit"] is not None:
        check_token(given["admit"])
    if options.pace is not None and not options.solo:
        raise UsageError("--pace is for a baseline; add --solo")
    if options.solo and given["require_peers"]:
        raise UsageError("--solo meets nobody and --require-peers waits for others; give one of them")
    if given["alone"] and given["require_peers"] > 1:
        raise UsageError("--alone waits for nobody and --require-peers for others; give one of them")
    if not file.exists():
        raise ConfigError(f"{file}: no such manifest; write one with: decentral init {shlex.quote(str(file))}")
    manifest = load_manifest(file)
    check_trained_here(manifest)
    text = _look_over(options)
    check_first_weights(options.begins_from, options.out, manifest)
    if background:
        _leave_to_background(context, options)
        return
    _train(context, manifest, text, options)


@click.command("join", cls=GroupedOptions, headings=HEADINGS)
@click.argument("invite", type=INVITE, envvar="DECENTRAL_INVITE", required=False)
@click.argument("arguments", metavar="[-- ARGS...]", nargs=-1, type=click.UNPROCESSED)
@options_of_a_peer
@with_admit("The token that the run wants, where the invite has none.")
@_background
@click.option(
    "--script",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="TRAIN.py",
    help="Run this training script: its decentral.join() takes the invite and these options; ARGS are its own.",
)
@click.option("--alone", is_flag=True, help="With --script: train at once, without waiting to be let in by another.")
@click.option(
    "--max-text",
    type=Size(),
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="Fetch no larger text than this, where --data names none and the run's travels with it.",
)
@click.pass_context
def join_command(
    context: click.Context,
    /,
    invite: str | None,
    directory: Path,
    background: bool,
    script: Path | None,
    arguments: tuple[str, ...],
    **given: Any,
) -> None:
    """Be another peer of a run. All that is needed is its invite, or the words of decentral invite --words; and nothing
    at all where --out holds the run already.

    INVITE may be - (it is asked for, or a line of stdin), @FILE, or left out where DECENTRAL_INVITE has it: an invite
    with a token is for nobody else's eyes, and a command line is for all users of the machine.

    \b
    $ decentral join INVITE --out decentral-run
    $ decentral join "acid cargo mural tulip 4711"
    """
    from decentral.cli.invite import as_one_text, invite_of
    from decentral.cli.preflight import check_trained_here
    from decentral.node.folder import read_terms
    from decentral.observe.screen import HINT_SECONDS, hint_after
    from decentral.swarm.admission import check_token
    from decentral.swarm.invite import Invite, whole_invite

    admit = given.pop("admit")
    if admit is not None:
        check_token(admit)
    if invite is None or invite.startswith("-"):  # that is the script's, from behind a --
        arguments = arguments if invite is None else (invite, *arguments)
        invite = _find_invite(directory)
    invite, arguments = as_one_text(invite, arguments)
    if background:  # words are exchanged there: they are good for once
        _leave_to_background(context, JobOptions.of(directory, given, invite))
        return
    left = time_left(given["give_up_at"])
    invite, given["relays"] = invite_of([invite], given["relays"], lan=given["lan"], seconds=left)
    invite = whole_invite(invite, directory, admit)
    parsed = Invite.parse(invite)  # before anything is made or started
    options = JobOptions.of(directory, given, invite)
    if script is not None:
        run_script(context, script, arguments, options)
        return
    if arguments:
        raise UsageError(f"{arguments[0]!r}: arguments after the invite are a script's; name it with --script")
    from decentral.peer.joining import NOBODY, ask_terms

    remember(context, directory)
    text = _look_over(options)
    if read_terms(directory, parsed.run, "those of the invite") is None:
        click.echo("looking for the run's peers ...", err=True)
    with hint_after(HINT_SECONDS, NOBODY.format("--join-timeout S")):
        manifest, over = ask_terms(
            parsed,
            directory,
            given["listen"],
            time_left(options.give_up_at),
            given["transport"],
            lan=given["lan"],
        )
    check_trained_here(manifest)
    _train(context, manifest, text, options, late=over)


def _find_invite(directory: Path) -> str:
    """Return the way back to the run that the folder holds. UsageError where it holds none."""
    from decentral.node.folder import way_back

    if (invite := way_back(directory)) is None:
        raise UsageError(
            f"missing argument 'INVITE', and {directory} holds no run to come back to; ask a peer of the run for what "
            "its decentral invite prints, or name the folder of an earlier join with --out"
        )
    return str(invite)


def _leave_to_background(context: click.Context, options: JobOptions) -> None:
    """Have the command go on elsewhere, once what was typed is looked over."""
    from decentral.cli.background import go_to_background

    remember(context, options.out)
    _look_over(options)
    go_to_background(context, options)


def _look_over(options: JobOptions) -> Survey | None:
    from decentral.cli.preflight import look_over

    join = options.join
    return look_over(options.out, join.get("listen"), join.get("relays", ()), join.get("offload"), options.data)


def _train(
    context: click.Context, manifest: Manifest, text: Survey | None, options: JobOptions, *, late: bool = False
) -> None:
    """``late``: the run is over, as who was asked says, so that nothing is said of a beginning."""
    from decentral.cli.preflight import Before, is_main, undo_on_error
    from decentral.cli.text import check_text, text_of_run
    from decentral.node.folder import begun, read_terms

    directory = remember(context, options.out)
    read_terms(directory, manifest.digest)
    if _tell_of_the_end(options):
        return
    check_text(manifest, text, options)
    with ExitStack() as stack:
        if is_main():
            before = Before.of(directory)
            stack.enter_context(begun(directory))
            stack.enter_context(undo_on_error(directory, before))
        options, this_text = text_of_run(manifest, text, options)
        code = _run_job(manifest, this_text, options, late=late)
    if code is not None:
        kept = f"everything is kept in {directory}: the same command goes on from there"
        click.echo(f"ended; {'a baseline keeps no model: it begins again' if options.solo else kept}", err=True)
        context.exit(code)


def _tell_of_the_end(options: JobOptions) -> bool:
    """Say of a run that ended in this folder that it is over, and whether it is: nothing is trained, nobody asked."""
    from decentral.node.folder import is_over
    from decentral.observe.health import over_sentence
    from decentral.observe.report import read_summary

    summary = read_summary(options.out)
    if options.solo or options.join.get("keep_serving") or summary is None or not is_over(options.out):
        return False
    click.echo(over_sentence(options.out, again=options.invite is None), err=True)
    if options.as_json:
        click.echo(json.dumps(summary))
    return True


def _run_job(manifest: Manifest, text: str, options: JobOptions, *, late: bool) -> int | None:
    """Train on the text of these words to the end; the exit code of the signal that came before it, if one did."""
    from decentral.cli.group import stop_signals
    from decentral.cli.invite import text_wanted
    from decentral.cli.train import train_alone, train_with_swarm
    from decentral.manifest import summary as describe
    from decentral.observe.screen import LateDisplay, log_shown_by, open_display

    shows = partial(open_display, sys.stderr, stop=f"Ctrl-C, or decentral leave --out {shlex.quote(str(options.out))}")
    if not late:
        terms = [describe(manifest)] if options.verbose else []
        click.echo("\n".join([*terms, *first_screen(manifest, text, options)]), err=True)
    display = LateDisplay(sys.stderr, shows) if late else shows()
    show_invite = partial(_show_invite, display, options, text_wanted(manifest.data))
    with stop_signals() as stop, log_shown_by(display.say):
        try:
            if options.solo:
                summary = train_alone(manifest, options, display, stop)
            else:
                summary = train_with_swarm(manifest, options, display, stop, show_invite)
        finally:
            display.close()
    if options.as_json:
        click.echo(json.dumps(summary))
    return stop.code


# ---- the first screen ----
#
# Plain words for who gives a machine: with how to stop, which a display says, six lines before the sentence of health.

_WIDTH = 80  # columns of a usual terminal: a longer line would break


def first_screen(manifest: Manifest, text: str, options: JobOptions) -> list[str]:
    """Return what is learnt, whose run it is, how long it lasts, what it takes of this machine, and on which text."""
    from decentral.tasks.sizing import LanguageModelConfig, parameters_of

    run, numel = manifest.run, parameters_of(LanguageModelConfig.of(manifest.model))
    limit = f", {run.minutes:g} minutes at most" if run.minutes is not None else ""
    rows = {
        "learns": f"a language model of {numel:,} parameters",
        "run": f"{run.name} ({manifest.run_id}), {_whose(options)}",
        "lasts": f"{run.rounds} rounds of {manifest.inner.steps} training steps{limit}",
        "takes": _takes(options.preferences),
        "text": text.removeprefix("this peer's text is "),
    }
    return [_cut(f"{name:<8}{words}") for name, words in rows.items()]


def _whose(options: JobOptions) -> str:
    from decentral.observe.health import short_name
    from decentral.swarm.invite import Invite

    if options.invite is None:
        return "of which you are the first peer"
    names = [address.rpartition("/")[2] for address in Invite.parse(options.invite).addresses]
    return f"to which {short_name(names[0]) if names else 'somebody near'} invites you"  # none: met on this network


def _takes(wanted: Preferences) -> str:
    """Say what it takes of this machine, as far as that is known before it trains."""
    import torch

    from decentral.observe.health import in_units

    cores = wanted.threads or torch.get_num_threads()
    share = "" if wanted.max_compute is None else f" at {wanted.max_compute:.0%}"
    when = "all day" if str(wanted.schedule) == "always" else str(wanted.schedule)
    memory = "memory as needed" if wanted.max_memory is None else f"{in_units(wanted.max_memory)} of memory"
    upload = "upload as fast as the line" if wanted.max_upload is None else f"{in_units(wanted.max_upload)}/s up"
    processor = "the GPU" if torch.cuda.is_available() else f"{cores} core{'s' if cores > 1 else ''}"
    return f"{processor}{share}, {when}; {memory}; {upload}"


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 4] + " ..."


# ---- the invite ----

_OPEN = (
    "an open run: whoever can dial a peer may join, and many that join and never vote hold up the rounds; "
    "--admit - at the first start asks for a token"
)


def _show_invite(display: Display, options: JobOptions, brings: str, invite: str) -> None:
    from decentral.observe.screen import invite_for
    from decentral.swarm.invite import Invite, reach, whole_invite

    show, stream = (display.say, sys.stderr) if options.as_json else (display.result, sys.stdout)
    whole = whole_invite(invite, options.out)
    shown = invite_for(stream, whole)
    show(f"decentral join {shown}{brings}")
    display.say(f"reaches: {reach(Invite.parse(whole).addresses)}")
    if options.invite is None and Invite.parse(whole).token is None:
        display.say(_OPEN)
    elif shown != whole:
        whole_line = f"decentral invite --out {shlex.quote(str(options.out))}"
        display.say(f"without its token, as this may be a log; the whole line: {whole_line}")


@click.command("demo")
@click.option("--peers", type=click.IntRange(min=1, max=64), default=4, show_default=True, help="Peers at the start.")
@click.option(
    "--algorithm",
    default="diloco",
    show_default=True,
    shell_complete=presets_that_begin,
    help="How they agree: decentral optimizers lists them.",
)
@click.option("--minutes", type=click.FloatRange(min=0.2), default=3.0, show_default=True, help="How long to train.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of model and data order.")
@click.option("--churn/--no-churn", default=True, show_default=True, help="Kill a peer, add a newcomer.")
@click.option(
    "--out",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo-run"),
    show_default=True,
    help="Where everything is kept; an earlier demo there is replaced.",
)
@as_json
@click.pass_context
def demo_command(context: click.Context, /, directory: Path, as_json: bool, **options: Any) -> None:
    """Train with four peers on this machine, and kill one of them. Another joins late; a peer that trains alone is
    compared.

    \b
    $ decentral demo --peers 3 --minutes 1
    """
    from decentral.cli.demo import DemoOptions, run_demo

    remember(context, directory)
    context.exit(run_demo(DemoOptions(out=directory, **options), as_json=as_json))


# ---- join INVITE --script train.py ----
#
# A person's own training script, run in this process, the invite handed over.
#
# The script is ``__main__``, as if it had been started with ``python train.py ARGS``; its ``decentral.join`` takes
# what the command line says of this peer, whatever it was written to take.

SCRIPT_FAILED = 1  # as python itself says


def run_script(context: click.Context, script: Path, arguments: Sequence[str], options: JobOptions) -> None:
    """Run it to its end. Its own errors are shown as Python shows them, ours in one line."""
    from decentral.peer.settings import handed_over

    if not script.exists():
        raise UsageError(f"--script {script}: no such file; it is the script that the run's first peer started from")
    if options.data is not None or options.as_json:
        raise UsageError(
            "--data and --json are for the model of the manifest; give a script its own arguments after --"
        )
    remember(context, options.out)
    page = page_beside(options.out, partial(click.echo, err=True), wanted=options.dashboard)
    with (
        handed_over(_arguments_of_join(context, options)),
        _as_started(script, arguments),
        page,
        _terminable() as ended,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except KeyboardInterrupt:
            if ended:  # all is kept, as after Ctrl-C
                context.exit(128 + ended[0])
            raise
        except (DecentralError, SystemExit):
            raise
        except Exception as error:  # noqa: BLE001  whatever a script does is shown, and ends it
            click.echo("".join(_as_python_shows_it(error, script)), err=True, nl=False)
            context.exit(SCRIPT_FAILED)


def _arguments_of_join(context: click.Context, options: JobOptions) -> dict[str, Any]:
    """Return what the command line says, and no default of it: there the script decides."""
    given = {name: value for name, value in options.join.items() if _was_given(context, name)}
    if options.give_up_at is not None:
        given["join_timeout"] = time_left(options.give_up_at)
    return {"run": options.invite, "out": options.out.absolute(), **given}


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """A first SIGTERM, as a service or a container sends it, leaves as Ctrl-C does: with a checkpoint and a goodbye.

    So does a terminal that closes, unless that is ignored; it says so more than once.
    """
    ended, here = list[int](), os.getpid()

    def interrupt(number: int, frame: object) -> None:
        if os.getpid() != here:  # a worker that was forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        drop_closed_terminal()
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        ended.append(number)
        raise KeyboardInterrupt

    numbers = [n for n in ENDING if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _as_started(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Let a script see how it was started: ``sys.argv``, and its own folder to import from."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _as_python_shows_it(error: BaseException, script: Path) -> Iterator[str]:
    """Its traceback from the script's first line on: the frames that led there are ours."""
    shown = TracebackException.from_exception(error)
    own = next((n for n, frame in enumerate(shown.stack) if frame.filename == str(script)), 0)
    del shown.stack[:own]
    return shown.format()
