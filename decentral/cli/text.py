"""The text of a run for who joins without it: from its folder, from the URL of the terms, or from the run's peers.

Nothing is fetched that the terms do not allow, that is larger than this peer takes, or that has another digest than the
terms name. What came before a kill is kept: of a URL the beginning, of peers each chunk.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from threading import Event
from typing import IO, TYPE_CHECKING, Any

import click

from decentral.cli.group import stop_signals
from decentral.cli.options import JobOptions
from decentral.cli.preflight import make_directory
from decentral.cli.progress import Countdown
from decentral.errors import DataError, TransportError
from decentral.node.folder import PARTIAL_TEXT, TEXT_FILE, URL_TEXT, way_back
from decentral.observe.health import in_units, short_name
from decentral.peer.settings import JoinOptions
from decentral.quantities import rate_of, time_left
from decentral.state.durable import DISK, disk_errors
from decentral.swarm.invite import Invite, whole_invite
from decentral.tasks.evaluate import Survey, check_agreed, survey
from decentral.wire.keys import PeerId, peer_name

if TYPE_CHECKING:
    from decentral.manifest import Manifest
    from decentral.manifest.terms import Data, SharedText

_wait = Event().wait  # for so many seconds: nobody sets it
_LOOK_SECONDS = 0.25  # between looks of a peer's other processes, for what the first of them fetches


def check_text(manifest: Manifest, own: Survey | None, options: JobOptions) -> None:
    """Refuse, before anything is made, what `text_of_run` would refuse without asking anybody. Raises DataError."""
    data, shared = manifest.data, manifest.data.shared
    if own is not None or shared is None:
        check_agreed(data, own)
        return
    if (options.out / TEXT_FILE).exists():
        return
    if options.max_text is not None and shared.nbytes > options.max_text:
        raise DataError(
            f"the run's text, {data.corpus}, has {in_units(shared.nbytes)}, and this peer takes "
            f"{in_units(options.max_text)} at most; nothing was fetched: allow more with --max-text, or name your copy "
            "with --data PATH"
        )
    if shared.url is None and _invite_of(manifest, options) is None:
        raise DataError(
            f"the run trains on {data.corpus}, and there is nobody to fetch it from; name it with --data PATH"
        )


def text_of_run(manifest: Manifest, own: Survey | None, options: JobOptions) -> tuple[JobOptions, str]:
    """Return the options with the text that is trained on, and what is to be said of it.

    ``own``: what ``--data`` names. Raises DataError where there is none that the terms mean, NoPeersError where nobody
    gives it, DiskError.
    """
    check_text(manifest, own, options)
    data, shared = manifest.data, manifest.data.shared
    if own is not None or shared is None:
        said = check_agreed(data, own)
        return options, said if shared is None else _travels(data.corpus, shared)
    path = options.out / TEXT_FILE
    if not path.exists():
        began = time.monotonic()
        _bring(manifest, shared, options)
        if options.give_up_at is not None:  # those who gave it had answered meanwhile
            options = replace(options, give_up_at=options.give_up_at + time.monotonic() - began)
    elif not _is_whole(path, data):
        raise DataError(
            f"{path} is other text than the run's {data.corpus}, or damaged; remove it, and the same command fetches "
            "it again"
        )
    return replace(options, data=path), _travels(data.corpus, shared)


def _travels(label: str, shared: SharedText) -> str:
    whence = "travels with the run; who joins needs no copy" if shared.chunks is not None else f"from {shared.url}"
    return f"{label}, {in_units(shared.nbytes)}: {whence}"


def _bring(manifest: Manifest, shared: SharedText, options: JobOptions) -> None:
    """Have it in the folder, whoever of this peer's processes fetches it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        while not (options.out / TEXT_FILE).exists():
            _wait(_LOOK_SECONDS)
        return
    make_directory(options.out)  # on a second machine of a peer nobody has
    click.echo(f"fetching the run's text: {manifest.data.corpus}, {in_units(shared.nbytes)}", err=True)
    with stop_signals(), Countdown(sys.stderr) as progress:
        _fetch(manifest.data, options, _invite_of(manifest, options), TextProgress(progress, shared.nbytes))
    click.echo(f"the run's text is in {options.out / TEXT_FILE}", err=True)


def _invite_of(manifest: Manifest, options: JobOptions) -> Invite | None:
    """Return the way to the run's peers, where they may give the text."""
    shared = manifest.data.shared
    if shared is None or shared.chunks is None:
        return None
    found = way_back(options.out) if options.invite is None else Invite.parse(options.invite)
    return None if found is None else Invite.parse(whole_invite(str(found), options.out))


def _fetch(data: Data, options: JobOptions, invite: Invite | None, progress: TextProgress) -> None:
    from decentral.observe.screen import HINT_SECONDS, hint_after
    from decentral.peer.joining import NOBODY, fetch_text

    shared = data.shared
    assert shared is not None, "it travels"

    whole, partial, begun = (options.out / name for name in (TEXT_FILE, PARTIAL_TEXT, URL_TEXT))
    if shared.url is not None:
        try:
            download(shared.url, begun, shared.nbytes, progress, rate=_most_a_second(options))
            if _is_whole(begun, data):
                _keep(begun, whole, partial)
                return
            begun.unlink()
            raise TransportError(f"{shared.url}: what is there is other text than the run's {data.corpus}")
        except TransportError as error:
            if invite is None:
                raise DataError(f"{error}; try again, or name your copy with --data PATH") from error
            click.echo(f"{error}; asking the run's peers", err=True)
            if begun.exists() and not partial.exists():
                with disk_errors(f"writing {partial}"):
                    os.replace(begun, partial)  # what came of it is right, as far as its chunks are
    assert invite is not None, "nothing else was left to ask"
    asked: JoinOptions = {**options.join, "join_timeout": time_left(options.give_up_at)}
    with ExitStack() as hint:
        hint.enter_context(hint_after(HINT_SECONDS, NOBODY.format("--join-timeout S")))

        def told(here: int, peers: int) -> None:
            hint.close()
            progress(here, peers)

        fetch_text(invite, shared, partial, asked, told=told, dropped=_say_dropped)
    if not _is_whole(partial, data):
        partial.unlink()
        raise DataError(
            f"the terms contradict themselves: their chunks make other text than their digest of {data.corpus} names; "
            "name your copy with --data PATH"
        )
    _keep(partial, whole, begun)


def _is_whole(path: Path, data: Data) -> bool:
    """Tell whether a file is the run's text."""
    with suppress(DataError):
        return survey(path).digest == data.digest
    return False


def _keep(fetched: Path, whole: Path, other: Path) -> None:
    """Give what was fetched its name, durably; what came of it in the other way is needed no more. Raises DiskError."""
    with disk_errors(f"writing {whole}"):
        with fetched.open("r+b") as file:
            os.fsync(file.fileno())
        DISK.rename(fetched, whole)
        DISK.remove(other)
        DISK.sync_folder(whole.parent)


def _most_a_second(options: JobOptions) -> float | None:
    return rate_of(options.join.get("max_download"), "max_download")


class TextProgress:
    """How far the text is, in one line: ``fetching the run's text: 12 of 80 MB from 3 peers``."""

    def __init__(self, show: Countdown, nbytes: int) -> None:
        self._show, self._nbytes = show, nbytes

    def __call__(self, here: int, peers: int | None = None) -> None:
        """Show what is here; ``peers``: that gave some of it, None: it comes from a URL."""
        whence = "" if peers is None else f" from {peers} peer{'s' if peers != 1 else ''}"
        number, unit = in_units(self._nbytes).split()
        scale = {"GB": 1e9, "MB": 1e6, "kB": 1e3}[unit]
        self._show(here / self._nbytes, f"fetching the run's text: {here / scale:.1f} of {number} {unit}{whence}")


def _say_dropped(peer: PeerId, why: str) -> None:
    click.echo(f"{short_name(peer_name(peer))} gave what is not the run's text and is asked no more ({why})", err=True)


# ---- from a URL ----
#
# The terms name it, so the person who began the run: https alone, no more bytes than the terms say, and what came is
# the run's text by its digest or nothing. It is asked from where an earlier download ended.

_PATIENCE = 30.0  # s for an answer, and between two pieces of it
_LEAST_RATE = 4096  # bytes a second after that, as of a peer: what creeps would hold up the others who have the text
_PIECE_NBYTES = 1 << 16

Open = Callable[[urllib.request.Request], Any]  # Any: an answer of urllib


class _HttpsAlone(urllib.request.HTTPRedirectHandler):
    """Follows to no other scheme."""

    def redirect_request(self, *args: Any, **more: Any) -> urllib.request.Request | None:
        """Return the request that follows. Raises URLError for one without https."""
        found = super().redirect_request(*args, **more)
        if found is not None and found.type != "https":
            raise urllib.error.URLError(f"it leads to {found.type}, which is no https")
        return found


def _open_https(request: urllib.request.Request) -> Any:
    return urllib.request.build_opener(_HttpsAlone).open(request, timeout=_PATIENCE)


def download(
    url: str,
    path: Path,
    nbytes: int,
    told: Callable[[int], None],
    *,
    rate: float | None = None,
    open_: Open = _open_https,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = _wait,
) -> None:
    """Have ``path`` hold the ``nbytes`` at ``url``, beside what it holds of them. ``rate``: bytes a second at most.

    Raises TransportError, and what came is kept, unless it is longer; DiskError.
    """
    here = path.stat().st_size if path.exists() else 0
    if here == nbytes:
        return
    here = here if here < nbytes else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={here}-", "User-Agent": "decentral"})
    try:
        with (
            open_(request) as answer,
            _open_at(path, here if answer.status == HTTPStatus.PARTIAL_CONTENT else 0) as file,
        ):
            began, before = clock(), file.tell()
            while piece := answer.read1(min(_PIECE_NBYTES, nbytes - file.tell())):
                with disk_errors(f"writing {path}"):
                    file.write(piece)
                told(file.tell())
                came, took = file.tell() - before, clock() - began
                if took > _PATIENCE + came / (_LEAST_RATE if rate is None else min(_LEAST_RATE, rate / 2)):
                    raise TransportError(f"{url}: it creeps, {came} bytes in {took:.0f} s")
                if rate is not None:
                    wait(max(0.0, came / rate - took))
            here = file.tell()
    except (OSError, HTTPException, ValueError) as error:
        raise TransportError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    if here < nbytes:
        raise TransportError(f"{url}: it ended after {here} of {nbytes} bytes")


def _open_at(path: Path, here: int) -> IO[bytes]:
    """Open the file to write on from ``here``. Raises DiskError."""
    with disk_errors(f"writing {path}"):
        file = path.open("r+b" if here else "wb", buffering=0)
        file.seek(here)
        return file
