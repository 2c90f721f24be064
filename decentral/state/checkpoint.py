"""Checkpoints: written whole or not at all, the newest valid one loaded, damaged ones passed over and named.

One checkpoint is one folder, ``00000012-NAME``, with ``tensors.safetensors`` and ``meta.json``. It is
written under a temporary name in the same directory, every file and the folder fsynced, renamed, and the
directory fsynced: after a crash at any point the directory holds the earlier checkpoints, and the new one
either completely or not at all. One process writes a directory at a time.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from torch import Tensor

from decentral.errors import ConfigError, DiskError
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.tensor_file import DamagedFile, OnBytes, read_tensor_file, untold, write_tensor_file

FORMAT = 1
KEEP = 3  # two spares: one may be damaged while the next is being written
TENSORS, META = "tensors.safetensors", "meta.json"

Json = Any  # what json.dumps takes: the caller's own document, checked by its hash and not by its type


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and verified, and the newer ones that could not be, with reasons."""

    tensors: dict[str, Tensor]
    meta: Json
    path: Path
    passed_over: tuple[tuple[str, str], ...] = ()


def save(
    directory: Path, name: str, tensors: Mapping[str, Tensor], meta: Json, disk: Disk = DISK, *, keep: int = KEEP
) -> Path:
    """Store a checkpoint durably and drop all but the last ``keep``. Returns its folder.

    Args:
        directory: made if missing; all checkpoints of one peer.
        name: for people, e.g. "round-41"; order comes from a number in front of it.
        tensors: any devices and dtypes that safetensors knows; must not change until this returns.
        meta: anything JSON can hold exactly (no NaN, no integer keys).
        disk: what carries the writing out.

    Raises:
        DiskError: full, read-only...; every earlier checkpoint is as before.
        ConfigError: a name, a document or a dtype that cannot be stored.

    """
    if not name or name.startswith(".") or set("/\\\0") & set(name):
        raise ConfigError(f"checkpoint name {name!r}: must be a plain file name without a leading dot")
    _document(meta, {})  # refuse before anything is written
    with disk_errors(f"writing checkpoint {name} to {directory}"):
        disk.make_folders(directory)
        _sweep(directory, disk)
        kept = _folders(directory)
        sequence = int(kept[-1].name[:8]) + 1 if kept else 0
        final = directory / f"{sequence:08d}-{name}"
        _write(directory / f"{TEMPORARY}{final.name}", final, tensors, meta, disk)
    _prune([*kept, final], keep, disk)
    return final


def load_newest(directory: Path, on_bytes: OnBytes = untold) -> Checkpoint | None:
    """The newest valid checkpoint, or None when there is none at all. Read-only; ``on_bytes`` is told of tensors read.

    Raises:
        DiskError: the directory cannot be read, or it has checkpoints and every one is damaged.

    """
    if not directory.exists():
        return None
    passed_over: list[tuple[str, str]] = []
    with disk_errors(f"reading checkpoints in {directory}"):
        folders = _folders(directory)
    while (found := _newest_of(folders, passed_over, on_bytes)) is None:
        with disk_errors(f"reading checkpoints in {directory}"):
            before, folders = folders, _folders(directory)
        if folders == before:
            break
        passed_over.clear()  # those were removed while they were read: a peer writes others here
    if found is not None:
        return found
    if passed_over:
        raise DiskError(
            f"all {len(passed_over)} checkpoints in {directory} are damaged ({': '.join(passed_over[0])}); "
            "restore one from a copy, or move them away to start from the swarm's state"
        )
    return None


def _newest_of(folders: Sequence[Path], passed_over: list[tuple[str, str]], on_bytes: OnBytes) -> Checkpoint | None:
    for folder in reversed(folders):
        try:
            tensors, meta = read_checkpoint(folder, on_bytes)
        except DamagedFile as damage:
            passed_over.append((folder.name, str(damage)))
        else:
            return Checkpoint(tensors, meta, folder, tuple(passed_over))
    return None


def newest_nbytes(directory: Path) -> int:
    """Bytes of the newest checkpoint's tensors, valid or not; 0 where there is none."""
    folders = _folders(directory) if directory.exists() else []
    with contextlib.suppress(OSError):
        return (folders[-1] / TENSORS).stat().st_size if folders else 0
    return 0


def load_metas(directory: Path) -> list[Json]:
    """The documents of all checkpoints whose document is whole, oldest first; their tensors may not be."""
    metas = []
    for folder in _folders(directory) if directory.exists() else []:
        with contextlib.suppress(DamagedFile):
            metas.append(_read_document(folder)["meta"])
    return metas


def read_checkpoint(folder: Path, on_bytes: OnBytes = untold) -> tuple[dict[str, Tensor], Json]:
    """Read and verify one checkpoint folder. Raises DamagedFile with the reason."""
    whole = _read_document(folder)
    return read_tensor_file(folder / TENSORS, whole["hashes"], on_bytes), whole["meta"]


def _read_document(folder: Path) -> Json:
    try:
        text = (folder / META).read_bytes()
    except OSError as error:
        raise DamagedFile(f"{META}: {error.strerror or error}") from error
    try:
        stored = json.loads(text)
        whole = stored["document"]
        if whole["format"] != FORMAT:
            raise DamagedFile(f"{META}: format {whole['format']!r}, this version reads {FORMAT}")
        if text != _document(whole["meta"], whole["hashes"]):  # one spelling: any flipped byte shows
            raise DamagedFile(f"{META}: its hash does not match")
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise DamagedFile(f"{META}: not a document of ours ({type(error).__name__})") from error
    return whole


def _write(temporary: Path, final: Path, tensors: Mapping[str, Tensor], meta: Json, disk: Disk) -> None:
    try:
        disk.make_folder(temporary)
        hashes = write_tensor_file(temporary / TENSORS, tensors, {"format": "pt"}, disk)
        disk.write(temporary / META, [_document(meta, hashes)])
        disk.sync_folder(temporary)
        disk.rename(temporary, final)
        disk.sync_folder(final.parent)
    except BaseException:  # also a Ctrl-C: nothing half-written or half-promised stays
        for path in (temporary, final):
            with contextlib.suppress(OSError):
                disk.remove(path)
        raise


def _document(meta: Json, hashes: Mapping[str, str]) -> bytes:
    """Canonical bytes of ``meta.json``, sealed by their own hash."""
    document = {"format": FORMAT, "meta": meta, "hashes": dict(hashes)}
    try:
        text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoint meta is no JSON document ({error}); flatten it first") from error
    seal = blake2b(text.encode(), digest_size=32).hexdigest()
    return f'{{"document":{text},"blake2b":"{seal}"}}\n'.encode()


def _folders(directory: Path) -> list[Path]:
    """Complete checkpoint folders, oldest first."""
    found = [path for path in directory.iterdir() if path.name[:8].isdecimal() and path.name[8:9] == "-"]
    return sorted(found, key=lambda path: int(path.name[:8]))


def _sweep(directory: Path, disk: Disk) -> None:
    """Remove what an earlier crash left half-written or half-deleted."""
    for path in directory.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            disk.remove(path)


def _prune(folders: list[Path], keep: int, disk: Disk) -> None:
    """Drop all but the newest; a failure is no reason to fail: the new checkpoint is already safe."""
    for folder in folders[:-keep]:
        doomed = folder.with_name(f"{TEMPORARY}{folder.name}")  # first: half-deleted would look damaged
        with contextlib.suppress(OSError):
            disk.rename(folder, doomed)
            disk.remove(doomed)
