"""From an exception to one line on stderr and an exit code.

A traceback goes to a file in the run directory, or to the screen when it is asked for.
"""

import errno
import sys
import traceback as tracebacks
from contextlib import suppress
from pathlib import Path

import click

from decentral.errors import DecentralError, DiskError, is_out_of_memory

INTERRUPTED = 130  # 128 + SIGINT, as shells count
TERMINATED = 143  # 128 + SIGTERM
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


def end(error: BaseException, *, directory: Path | None, traceback: bool) -> int:
    """Say what happened in one line and return the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else UNEXPECTED
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return error.exit_code
    if traceback and not isinstance(error, click.ClickException | click.Abort):
        click.echo(_trace(error), err=True, nl=False)
    line, code = describe(error)
    if code == UNEXPECTED and not isinstance(error, DecentralError):
        line += f"; {_where_the_trace_is(error, directory, shown=traceback)}"
    with suppress(OSError):  # stderr may go to the disk that is full: the code says it, too
        click.echo(f"error: {line}", err=True)
    return code


def describe(error: BaseException) -> tuple[str, int]:
    """One line and the exit code of an exception."""
    if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        return describe(error.exceptions[0])  # a task group adds nothing that a reader needs
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
