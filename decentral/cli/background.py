"""``start`` and ``join --background``: the same command, and it goes on when its terminal has closed.

A user's systemd runs it where there is one; elsewhere it is a process without a terminal, which writes to a log.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from decentral.cli.options import GroupedOptions, JobOptions, secrets_of
from decentral.cli.service import install, place, plan_of, put_in_place, remove, systemd_answers
from decentral.errors import ConfigError, DecentralError, DiskError
from decentral.observe.status import is_running, read_status
from decentral.state.durable import make_private_folders
from decentral.swarm.invite import Invite
from decentral.swarm.words import looks_spoken

LOG = "background.log"
_LOOK_SECONDS = 0.2
_MOST_TOLD = 2000  # bytes of the log of a process that failed


def go_to_background(context: click.Context, options: JobOptions) -> None:
    """Have the command of ``context`` run on in its folder, without this terminal; say where to look, and end with 0.

    Where it fails before it has begun, its last words and its code are this command's. Raises DiskError.
    """
    words = [str(context.info_name), *GroupedOptions.words_typed(context)]
    words.remove("--background")
    out, invite = options.out, options.invite or ""
    is_spoken = looks_spoken(invite)
    if invite and not is_spoken:
        Invite.parse(invite)
    # Words are good for one start, and a service is started again; a script may write where no service of ours may.
    if not is_spoken and context.params.get("script") is None and systemd_answers():
        _serve(context, words, out)
    else:
        _detach(context, words, out)
    click.echo(f"decentral status --out {shlex.quote(str(out))}  shows how it is")
    click.echo(f"decentral leave --out {shlex.quote(str(out))}  stops it; the same command goes on from there")


# ---- as a service ----


def _serve(context: click.Context, words: Sequence[str], out: Path) -> None:
    name = service_name(out)
    if place(name).exists():  # of an earlier life in this folder, which has ended
        with suppress(DecentralError):  # the system never knew one that it did not start
            for _ in remove(name):
                pass
    for line in install(plan_of(context, name, tuple(words), Path.cwd())):
        click.echo(line)
    click.echo(f"decentral service remove --name {name}  keeps the system from starting it again")


def service_name(out: Path) -> str:
    """Call a service after its folder; two of one name in two places are two."""
    path = out.absolute()
    plain = re.sub("[^a-z0-9]+", "-", path.name.lower()).strip("-")[:30] or "run"
    return f"{plain}-{hashlib.blake2b(os.fsencode(path), digest_size=3).hexdigest()}"


# ---- as a process of its own ----


def _detach(context: click.Context, words: list[str], out: Path) -> None:
    log = out / LOG
    has_made = not out.exists()
    # A secret comes through a pipe: all users may read what a process was started with.
    fed = [given for given in secrets_of(context) if given.typed and (given.is_on_show or given.written == "-")]
    for given in fed:
        put_in_place(words, given, "-")
    try:
        make_private_folders(out)
        with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as written:
            child = subprocess.Popen(
                [sys.executable, "-m", "decentral", *words],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise DiskError(f"{log}: cannot be written ({error.strerror}); choose another --out") from error
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write("".join(f"{' '.join(given.text.split())}\n" for given in fed).encode())
    click.echo(f"process {child.pid}; what it says goes to {log}")
    click.echo("waiting until it has begun ...", err=True)
    try:
        while child.poll() is None and not _has_begun(out, child.pid):
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_SECONDS)
    except KeyboardInterrupt:
        child.terminate()
        raise
    if child.returncode is None:
        child.returncode = 0  # it is let go: Python would warn that nobody waits for it
    elif child.returncode:
        _tell_failure(context, child.returncode, log, has_made=has_made)


def _has_begun(out: Path, pid: int) -> bool:
    """Tell whether the peer of that process is up: what is refused at a start is refused before."""
    try:
        status = read_status(out)
    except ConfigError:
        return False
    return status.pid == pid and status.state != "starting" and is_running(status)


def _tell_failure(context: click.Context, code: int, log: Path, *, has_made: bool) -> None:
    said = log.read_bytes()[-_MOST_TOLD:].decode(errors="replace").splitlines()
    click.echo(said[-1] if said else f"it ended with code {code}", err=True)
    if has_made and os.listdir(log.parent) == [LOG]:
        log.unlink()
        log.parent.rmdir()
    context.exit(code if code > 0 else 128 - code)
