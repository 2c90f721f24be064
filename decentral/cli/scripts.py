"""``join INVITE --script train.py``: a person's own training script, run in this process, the invite handed over.

The script is ``__main__``, as if it had been started with ``python train.py ARGS``; its ``decentral.join`` takes what
the command line says of this peer, whatever it was written to take.
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import TracebackException
from typing import Any

import click

from decentral.cli.options import JobOptions, remember
from decentral.cli.ports import page_beside
from decentral.errors import DecentralError, UsageError
from decentral.swarm.patience import time_left

SCRIPT_FAILED = 1  # as python itself says

_ALIKE = (  # options that are named as join's arguments
    *("listen", "transport", "relays", "lan", "require_peers", "keep_serving", "on_nan"),
    *("max_upload", "max_download", "daily_upload", "offload"),
)


def run_script(context: click.Context, script: Path, arguments: Sequence[str], options: JobOptions) -> None:
    """Run it to its end. Its own errors are shown as Python shows them, ours in one line."""
    from decentral.peer.handed_over import handed_over

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
        _started_as(script, arguments),
        page,
        _terminable() as ended,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except KeyboardInterrupt:
            if ended:  # all is kept, as after Ctrl-C
                context.exit(128 + signal.SIGTERM)
            raise
        except (DecentralError, SystemExit):
            raise
        except Exception as error:  # noqa: BLE001  whatever a script does is shown, and ends it
            click.echo("".join(_as_python_shows_it(error, script)), err=True, nl=False)
            context.exit(SCRIPT_FAILED)


def _arguments_of_join(context: click.Context, options: JobOptions) -> dict[str, Any]:
    """What the command line says, and no default of it: there the script decides."""
    given = {name: getattr(options, name) for name in _ALIKE if _was_given(context, name)}
    if options.give_up_at is not None:
        given["join_timeout"] = time_left(options.give_up_at)
    return {"run": options.invite, "out": options.out.absolute(), **given}


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def _terminable() -> Iterator[list[int]]:
    """A first SIGTERM, as a service or a container sends it, leaves as Ctrl-C does: with a checkpoint and a goodbye."""
    ended, here = list[int](), os.getpid()

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != here:  # a worker that was forked
            os.kill(os.getpid(), signal.SIGTERM)
            return
        ended.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _started_as(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What a script sees of how it was started: ``sys.argv``, and its own folder to import from."""
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
