"""The group of commands: it loads a family when it is named, ends every failure in one line and code, heeds signals."""

import errno
import io
import os
import signal
import sys
import threading
import traceback as tracebacks
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from decentral.errors import DecentralError, DiskError, is_out_of_memory
from decentral.signals import drop_closed_terminal

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(slots=True)
class Invocation:
    """The facts that the error handler needs about the command that failed."""

    traceback: bool = False
    directory: Path | None = None  # the run directory, once the command knows it


class CommandGroup(click.Group):
    """Commands by the module that holds them, where a command's function is found under its own name.

    Extras, and other packages, add theirs by entry points of a group; a name of ours stays ours.
    """

    def __init__(
        self,
        *args: Any,  # click's own arguments
        commands_in: Mapping[str, str],
        added_by: str,  # the group of entry points
        headings: Mapping[str, Sequence[str]],  # names, most used first; those in none stand last, under "Others"
        **extra: Any,
    ) -> None:
        super().__init__(*args, **extra)
        self._modules, self._group, self._headings = commands_in, added_by, headings

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which help shows them."""
        return [name for names in self._sections().values() for name in names]

    def _sections(self) -> dict[str, list[str]]:
        """Return the commands that there are, by their headings."""
        known = [*self._modules, *(name for name in self._plugins if name not in self._modules)]
        sections = {heading: [name for name in names if name in known] for heading, names in self._headings.items()}
        shown = {name for names in sections.values() for name in names}
        return sections | {"Others": [name for name in known if name not in shown]}

    @cached_property
    def _plugins(self) -> "Mapping[str, EntryPoint]":
        from decentral.plugins import added  # 0.03 s, for help and for commands that are not the core's

        return added(self._group)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands under the headings of their groups, their words in one column."""
        widest = max(map(len, self.list_commands(ctx)))
        room = formatter.width - 6 - widest
        for heading, names in self._sections().items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(f"{name:{widest}}", command.get_short_help_str(room)) for name, command in commands if command]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module now; None for an unknown name, and for a package that does not load."""
        try:
            return self._load(cmd_name)
        except click.UsageError:
            return None

    def _load(self, name: str) -> click.Command | None:
        if name in self._modules:
            command = getattr(import_module(self._modules[name]), f"{name}_command")
        elif point := self._plugins.get(name):
            try:
                command = point.load()
            except (ImportError, AttributeError) as error:
                raise click.UsageError(f"{name}: its package does not load ({error}); reinstall it") from error
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest name for an unknown one."""
        name = args[0]
        if not name.startswith("-") and self._load(name) is None:
            near = get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "decentral --help lists them"
            raise click.UsageError(f"no such command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]  # click overloads on standalone_mode, which has no meaning here
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run a command and end the process with the exit code that errors.py promises."""
        mend_streams()
        # Before there are threads: a filter that one sets for its own block is undone by the block of another.
        warnings.filterwarnings("ignore", r".torch\.jit\.script")  # how hivemind is written is no news to anybody
        invocation = Invocation()
        extra |= {"standalone_mode": False, "obj": invocation}
        try:
            code: object = super().main(args, prog_name or "decentral", **extra)
        except BaseException as error:  # noqa: BLE001  the one place where every error ends
            code = report_failure(error, directory=invocation.directory, traceback=invocation.traceback)
        flush_for_good()
        raise SystemExit(code if isinstance(code, int) else 0)


# ---- streams that take any text ----
#
# A closed one, a pipe whose reader has gone, one in ASCII or in a code page of Windows: none of them ends a command.


def mend_streams() -> None:
    r"""Have all three standard streams, and ``\xe4`` written for what the encoding of one has not."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: no file that is opened later may take its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_for_good() -> None:
    """Let the interpreter find nothing to write where nobody reads stdout any more (``| head -1``)."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError:
        return  # of a full disk the interpreter tells, by its exit code


# ---- from an exception to one line ----
#
# On stderr, with an exit code. A traceback goes to a file in the run directory, or to the screen when it is asked for.

INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM
HUNG_UP = 129  # 128 + SIGHUP
OUT_OF_MEMORY = 40
UNEXPECTED = 1
TRACEBACK_FILE = "error.txt"

_DISK = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.EACCES: "no permission; choose a place you may write to, or ask its owner",
    errno.EPERM: "no permission; choose a place you may write to, or ask its owner",
}


def report_failure(error: BaseException, *, directory: Path | None, traceback: bool) -> int:
    """Say what happened in one line and return the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        click.echo(str(error.code), err=True)  # a script's last words: sys.exit("no data here")
        return UNEXPECTED
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if traceback and not isinstance(error, click.ClickException | click.Abort):
        click.echo(_trace(error), err=True, nl=False)
    line, code = describe_failure(error)
    if code == UNEXPECTED and not isinstance(error, DecentralError):
        line += f"; {_where_the_trace_is(error, directory, shown=traceback)}"
    with suppress(OSError):  # stderr may go to the disk that is full: the code says it, too
        is_error = not isinstance(error, click.Abort | KeyboardInterrupt)  # a wish else
        click.echo(f"error: {line}" if is_error else line, err=True)
    return code


def describe_failure(error: BaseException) -> tuple[str, int]:
    """Return an exception's line and its exit code."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return describe_failure(error.exceptions[0])  # a task group adds nothing that a reader needs
    if isinstance(error, click.UsageError):
        return _usage_line(error), error.exit_code
    if isinstance(error, click.ClickException):
        return one_line(error.format_message()), error.exit_code
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, DecentralError):
        return one_line(str(error)), error.exit_code
    if is_out_of_memory(error):
        return "out of memory; use a smaller batch or context, or another device", OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"{error.filename or 'writing'}: {_DISK[error.errno]}", DiskError.exit_code
    return f"unexpected {type(error).__name__}: {one_line(str(error))}", UNEXPECTED


def one_line(text: str) -> str:
    """Fold a message onto one line."""
    return " ".join(text.split())


def _usage_line(error: click.UsageError) -> str:
    message = one_line(error.format_message()).rstrip(".")
    command = error.ctx.command_path if error.ctx else "decentral"
    return f"{message[:1].lower()}{message[1:]}; see {command} --help"


def _where_the_trace_is(error: BaseException, directory: Path | None, *, shown: bool) -> str:
    if shown:
        return "its origin is above"
    if directory is not None:
        try:
            path = directory / TRACEBACK_FILE
            path.write_text(_trace(error), encoding="utf-8")
            return f"its origin is in {path}"
        except OSError as failed:
            sys.stderr.write(f"warning: {TRACEBACK_FILE} could not be written ({failed.strerror})\n")
    return "run decentral --traceback ... to see where it came from, and please report it"


def _trace(error: BaseException) -> str:
    return "".join(tracebacks.format_exception(error))


# ---- signals ----
#
# One Ctrl-C leaves gracefully, a second one at once; SIGTERM alike, and a terminal that closes, which says so more than
# once. Exit codes as shells count: 128 + signal.

_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
if hasattr(signal, "SIGHUP"):  # not on Windows
    _CODES[signal.SIGHUP] = HUNG_UP


class Stop:
    """The wish of a signal: ``code`` is None until one came, then the exit code it means."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._on_first: Callable[[], None] | None = None

    def gently(self, on_first: Callable[[], None] | None) -> None:
        """From now on the first signal calls ``on_first``; with None a signal ends the process at once."""
        self._on_first = on_first

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        drop_closed_terminal()
        code = _CODES[signal.Signals(number)]
        if self.code is not None and code == HUNG_UP:
            return
        again, self.code = self.code is not None, code
        if again or self._on_first is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.code)
        self._on_first()


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the block; handlers are as before afterwards.

    What is ignored stays so, as ``nohup`` has SIGHUP. Not so SIGINT, as shells have it for what they run behind ``&``.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers; a caller on another one has its own
        return
    heard = [n for n in _CODES if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
