"""A run directory belongs to one run and to one process at a time; its files say which run, its lock which process.

The run is written in its ``run.toml`` and in its checkpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from decentral.consensus.chain import Head
from decentral.errors import ConfigError, DiskError, FolderInUse, ManifestMismatch
from decentral.manifest import Manifest, load_manifest
from decentral.observe.health import health_sentence
from decentral.observe.requests import drop_requests
from decentral.observe.status import STATUS_FILE, ProcessInfo, Status, check_free, read_status, write_status
from decentral.state.checkpoint import load_metas, load_newest
from decentral.state.durable import DISK, disk_errors, make_private_folders
from decentral.swarm.invite import MAX_ADDRESSES, TOKEN_FILE, Invite
from decentral.wire.messages import MAX_ADDRESS

# ---- the run of a folder ----

MANIFEST_FILE = "run.toml"
TEXT_FILE = "text"  # the run's, where it was fetched
PARTIAL_TEXT, URL_TEXT = "text.partial", "text.begun"  # as far as it came: in chunks from peers, from a URL


def read_terms(out: Path, run: bytes, whose: str = "these terms") -> Manifest | None:
    """The terms of run ``run`` that ``out`` keeps; None where there are none yet.

    ManifestMismatch when the folder is another run's: its peer could never come back.
    """
    for head in (Head.from_dict(meta["head"]) for meta in load_metas(out / "checkpoints") if "head" in meta):
        _check_run(out / "checkpoints", head.run, run, whose)
    path = out / MANIFEST_FILE
    if not path.exists():
        return None
    manifest = load_manifest(path)
    _check_run(path, manifest.digest, run, whose)
    return manifest


def terms_here(out: Path, manifest: Manifest) -> Manifest:
    """The terms that ``out`` keeps, where ``manifest`` differs by a salt that was drawn anew alone; else ``manifest``.

    So a script that makes its terms itself goes on with its run when it is started again.
    """
    with suppress(ConfigError):  # a file that is damaged is told of by whoever has to read it
        kept = load_manifest(out / MANIFEST_FILE) if (out / MANIFEST_FILE).exists() else None
        if kept is not None and manifest.goes_on(kept):
            return kept
    return manifest


def is_over(out: Path) -> bool:
    """Tell whether the newest checkpoint of ``out`` is of its run's last commit, whole: nothing is left to be asked."""
    newest = load_metas(out / "checkpoints")[-1:]
    if not newest or not newest[0].get("over") or not Head.from_dict(newest[0]["head"]).final:
        return False
    with suppress(DiskError):  # a damaged one comes from the others again
        found = load_newest(out / "checkpoints")
        return found is not None and found.meta == newest[0]
    return False


def keep_terms(out: Path, manifest: Manifest) -> None:
    """Write them to ``out`` unless they are there, perhaps in the words of whoever wrote them. Raises DiskError."""
    path = out / MANIFEST_FILE
    if not path.exists():
        with disk_errors(f"writing {path}"):
            DISK.replace_file(path, [manifest.to_toml().encode()])


def keep_token(out: Path, token: str) -> None:
    """Write it to ``out``, for the restarts of this peer; others of this machine may not read it. Raises DiskError.

    Logs that earlier versions wrote hold it in their invites: from now on their owner alone reads those, too.
    """
    path = out / TOKEN_FILE
    with disk_errors(f"writing {path}"):
        if not path.exists():
            DISK.replace_file(path, [token.encode()])
        for log in (*out.glob(STATUS_FILE), *out.glob("events*.jsonl*")):
            log.chmod(log.stat().st_mode & 0o700)


def _check_run(path: Path, kept: bytes, run: bytes, whose: str) -> None:
    if kept != run:
        raise ManifestMismatch(
            f"{path} holds another run ({kept.hex()[:12]}), {whose} are of {run.hex()[:12]}; choose another --out, "
            "in a script join(..., out=FOLDER)"
        )


# ---- where it was, and where others were ----
#
# A peer that comes back listens where it did and looks for those that it knew, so that two that were restarted together
# find each other. At a new port, or with what a checkpoint of long ago knew, neither would be where the other looks.

ADDRESSES_FILE = "addresses.json"
_MOST_ADDRESSES = 64  # of each kind


@dataclass(frozen=True, slots=True)
class Addresses:
    """Multiaddrs: those that a peer listened on, and those at which it met others of its run."""

    listen: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def read_addresses(out: Path) -> Addresses:
    """Read the addresses of the last process in ``out``; none where the file is missing or damaged."""
    try:
        found = json.loads((out / ADDRESSES_FILE).read_text(encoding="utf-8"))
        return Addresses(_texts(found["listen"]), _texts(found["others"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Addresses()


def keep_addresses(out: Path, addresses: Addresses) -> None:
    """Write them to ``out``. Raises DiskError."""
    path = out / ADDRESSES_FILE
    with disk_errors(f"writing {path}"):
        DISK.replace_file(path, [json.dumps(asdict(addresses)).encode()])


def way_back(out: Path) -> Invite | None:
    """Make an invite of what ``out`` keeps of its run and of others who were in it; None where it keeps no run.

    Without its token, which `decentral.swarm.invite.whole_invite` adds.
    """
    if not (out / MANIFEST_FILE).exists():
        return None
    others = [address for address in read_addresses(out).others if _is_address(address)]
    return Invite(load_manifest(out / MANIFEST_FILE).digest, tuple(others[:MAX_ADDRESSES]))


def _is_address(text: str) -> bool:
    """Tell whether an invite can hold it; a damaged one is left out."""
    return text.startswith("/") and len(text) <= MAX_ADDRESS and all("!" <= sign <= "~" for sign in text)


def _texts(found: object) -> tuple[str, ...]:
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__} where a list of addresses belongs")
    return tuple(one for one in found[:_MOST_ADDRESSES] if isinstance(one, str))


# ---- one process at a time ----
#
# Two processes with one key might vote twice in a ballot, and a peer's journal has one writer.
#
# What `check_free` reads is written once a process has begun: until then, up to 20 s on a slow machine, a second start
# saw nobody, and both trained there. The kernel's lock is there from the beginning, and gone with its process.

LOCK_FILE = "lock"
_BEGUN = set[Path]()  # folders that a command of this process has, whose peer comes later
_DYING = 1.0  # s that the kernel may take to end what was killed just now

_STILL_TRUE = (  # of what the last life said; not its invite and members: nobody can be reached there yet
    *("peer", "run", "run_id", "algorithm", "round", "rounds", "epoch", "inner_steps", "loss", "held_out_loss"),
    *("own_loop", "num_parameters", "preferences", "kept_settings"),
)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # some network file systems

logger = logging.getLogger("decentral.peer")


@contextmanager
def occupy(folder: Path) -> Iterator[None]:
    """Hold the folder for one peer while the block lasts, also below ``begun``. Raises FolderInUse, DiskError."""
    check_free(folder, own=os.getpid())
    made = _make_folder(folder)
    lock = FileLock(folder.absolute() / LOCK_FILE, thread_local=False, is_singleton=True, fallback_to_soft=False)
    if lock.is_locked and folder.absolute() not in _BEGUN:
        raise FolderInUse(
            f"{folder}: another peer of this process lives here; leave its with block, or choose another out"
        )
    try:
        _take_lock(lock, folder)
        yield
    finally:
        _remove_made(folder, made, held=lock.is_locked)
        lock.release()


@contextmanager
def begun(folder: Path) -> Iterator[None]:
    """The same, and ``decentral status`` says so from now on, and requests are this process's: loading torch takes
    seconds, in which it told of the last life. What it said comes back when nothing comes of this one.
    """
    with occupy(folder), _note_as_begun(folder.absolute()):
        drop_requests(folder)
        path = folder / STATUS_FILE
        before = path.read_bytes() if path.exists() else None
        said = _say_it_begins(folder)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if path.read_bytes() == said:
                    path.unlink() if before is None else path.write_bytes(before)
            raise


def has_begun(folder: Path) -> bool:
    """Tell whether a command of this process has begun there, and hears what is asked."""
    return folder.absolute() in _BEGUN


@contextmanager
def _note_as_begun(folder: Path) -> Iterator[None]:
    _BEGUN.add(folder)
    try:
        yield
    finally:
        _BEGUN.discard(folder)


def _say_it_begins(folder: Path) -> bytes:
    """That a peer begins, with what the one before knew of the run."""
    status = Status()
    with suppress(ConfigError):  # none, or another version's
        last = read_status(folder)
        status = Status(**{name: getattr(last, name) for name in _STILL_TRUE})
    write_status(folder, replace(status, health=health_sentence(status)), ProcessInfo())
    return (folder / STATUS_FILE).read_bytes()


def _make_folder(folder: Path) -> list[Path]:
    """The folder, and those that it is in; which were not there, the innermost first."""
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    if folder.exists() and not folder.is_dir():
        raise DiskError(f"{folder} is a file, and a peer needs a folder of its own; choose another --out")
    with disk_errors(f"making the folder {folder}"):
        make_private_folders(folder)
    return made


def _remove_made(folder: Path, made: list[Path], *, held: bool) -> None:
    """Where nothing came of it: no more is in what was ``made`` than the lock, if that is ``held``."""
    with suppress(OSError):  # or something did
        if made and held and os.listdir(folder) == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
        for path in made:
            path.rmdir()


def _take_lock(lock: BaseFileLock, folder: Path) -> None:
    with disk_errors(f"locking {folder}"):
        try:
            lock.acquire(timeout=_DYING)
        except Timeout:
            raise FolderInUse(f"{folder}: a peer begins here just now; choose another --out") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; see that no second process uses the folder", folder)
