"""Checkpoints: written whole or not at all, the newest valid one loaded, damaged ones passed over and named.

One checkpoint is one folder, ``00000012-NAME``, with ``tensors.safetensors`` and ``meta.json``. It is written under a
temporary name in the same directory, every file and the folder fsynced, renamed, and the directory fsynced: after a
crash at any point the directory holds the earlier checkpoints, and the new one either completely or not at all. One
process writes a directory at a time.

Beside them: torch's nested state as tensors and JSON, the parameters that are not trained, and adapters of peft.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import random
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import ConfigError, DiskError
from decentral.parameters import FrozenSpec, frozen_digest
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.tensor_file import (
    DTYPES,
    DamagedFile,
    OnBytes,
    Whole,
    as_it_is,
    read_tensor_file,
    untold,
    write_tensor_file,
)

# ---- checkpoints ----

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
    seal = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
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


# ---- nested state as tensors and JSON ----
#
# State of torch's optimizers, schedulers and generators becomes tensors plus JSON, and comes back bit for bit.
#
# ``state_dict()`` mixes tensors with dicts that have integer keys, tuples and floats like inf, which JSON alone would
# change silently. Every value is tagged instead; an unknown type is an error now and not a surprise at resume.

Tree = Any  # nested dict, list, tuple, str, int, float, bool, None, Tensor: torch has no closer type

MAX_DEPTH = 32  # far above any state_dict; a cycle is found instead of overflowing the stack


def flatten(tree: Tree, prefix: str) -> tuple[dict[str, Tensor], Json]:
    """Split a state into tensors (CPU copies, named ``prefix/0``, ``prefix/1``...) and a JSON document.

    The copies are the snapshot: training may go on while another thread writes them.

    Raises:
        ConfigError: a value that is none of the types above, named by its place.

    """
    tensors: dict[str, Tensor] = {}
    return tensors, _encode(tree, prefix, tensors, place=prefix, depth=0)


def unflatten(document: Json, tensors: Mapping[str, Tensor]) -> Tree:
    """Inverse of ``flatten``; ``tensors`` may hold others too. Raises ConfigError on another document."""
    try:
        return _decode(document, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"stored state does not decode ({type(error).__name__}: {error}); another version wrote it"
        ) from error


# What the script makes anew at each start is in many a state: a function among a group's settings (Barlow Twins' LARS),
# a dtype (torchdistx's AnyPrecisionAdamW), a schedule inside another one (gradual warm-up).

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_MADE = (*_FUNCTIONS, type, Enum, torch.dtype, torch.device)
_PLAIN = (Tensor, float, int, str)  # asked for first: 20,000 parameters have 100,000 values
_INSIDE = "state of what the script has here"


def storable(state: Tree, depth: int = 0) -> Tree:
    """A ``state_dict`` without what the script makes; of what has a state itself, that. See ``filled``."""
    if isinstance(state, _PLAIN):
        return state
    if isinstance(state, _MADE):
        return None
    if depth > MAX_DEPTH:  # `flatten` says so
        return state
    if _has_state(state):
        return {_INSIDE: storable(state.state_dict(), depth + 1)}
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: storable(value, depth + 1) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(storable(value, depth + 1) for value in state)
    return state


def fill_in(stored: Tree, now: Tree) -> Tree:
    """Take what ``storable`` gave, and where that left something out what ``now`` has, the same thing's state here."""
    if isinstance(now, _PLAIN):
        return stored
    if isinstance(now, _MADE):
        return now
    if _has_state(now):
        if isinstance(stored, dict) and _INSIDE in stored:
            now.load_state_dict(fill_in(stored[_INSIDE], now.state_dict()))
        return now
    if isinstance(stored, dict) and isinstance(now, dict) and not isinstance(stored, Counter):
        return {key: fill_in(value, now.get(key)) for key, value in stored.items()}
    if type(stored) in (list, tuple) and type(now) is type(stored) and len(stored) == len(now):
        return type(stored)(fill_in(one, other) for one, other in zip(stored, now, strict=True))
    return stored


def _has_state(value: object) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def random_state() -> Tree:
    """States of torch's (CPU and CUDA), Python's and numpy's global generators, for ``flatten``."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
    }


def set_random_state(tree: Tree) -> None:
    """Put the generators back. CUDA states are used for as many devices as are here now."""
    torch.set_rng_state(tree["torch"])
    if torch.cuda.is_available():
        for device, state in enumerate(tree["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
    random.setstate(tree["python"])
    numpy.random.set_state(tree["numpy"])


def _encode(tree: Tree, prefix: str, tensors: dict[str, Tensor], *, place: str, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise ConfigError(f"{place}: nested deeper than {MAX_DEPTH} levels; a state must be a tree")
    if tree is None or isinstance(tree, bool | str) or type(tree) is int:
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {"float": repr(tree)}
    if isinstance(tree, Tensor | numpy.ndarray):
        return _store(tree, prefix, tensors)
    if isinstance(tree, numpy.generic):
        return _encode(tree.item(), prefix, tensors, place=place, depth=depth + 1)

    def inside(value: Tree, key: object) -> Json:
        return _encode(value, prefix, tensors, place=f"{place}[{key!r}]", depth=depth + 1)

    if isinstance(tree, Mapping):  # MultiStepLR counts its milestones in a Counter
        return {
            "counter" if isinstance(tree, Counter) else "dict": [
                [inside(key, key), inside(value, key)] for key, value in tree.items()
            ]
        }
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [inside(value, number) for number, value in enumerate(tree)]}
    raise ConfigError(
        f"{place} is a {type(tree).__name__}: only numbers, strings, tensors, lists, tuples and dicts can be "
        "stored without pickle; give the optimizer or scheduler plain values"
    )


def _store(value: Tensor | numpy.ndarray[Any, Any], prefix: str, tensors: dict[str, Tensor]) -> Json:
    name = f"{prefix}/{len(tensors)}"
    if isinstance(value, Tensor):
        held = value.detach()
        on_processor = held.device.type == "cpu" and held.dtype == torch.float32
        tensors[name] = _like(held).copy_(held) if on_processor else held.to("cpu", copy=True).contiguous()
        return {"tensor": name}
    tensors[name] = torch.from_numpy(value.copy())
    return {"array": name}


def _like(tensor: Tensor) -> Tensor:
    """Memory of numpy's, which asks for huge pages: a quarter of the time that torch's takes to be written first."""
    return torch.from_numpy(numpy.empty(tuple(tensor.shape), dtype=numpy.float32))


def _decode(document: Json, tensors: Mapping[str, Tensor]) -> Tree:
    if not isinstance(document, dict):
        return document
    ((kind, inner),) = document.items()
    match kind:
        case "float":
            return float(inner)
        case "tensor":
            return tensors[inner].clone()  # the optimizer will write into it
        case "array":
            return tensors[inner].numpy().copy()
        case "dict":
            return {_decode(key, tensors): _decode(value, tensors) for key, value in inner}
        case "counter":
            return Counter({_decode(key, tensors): _decode(value, tensors) for key, value in inner})
        case "list":
            return [_decode(value, tensors) for value in inner]
        case "tuple":
            return tuple(_decode(value, tensors) for value in inner)
    raise ValueError(f"unknown tag {kind!r}")


# ---- parameters that are not trained ----
#
# They are in one file per run directory: written once, never sent, needed to export the model.
#
# The run's schema has a digest of each tensor, so the file is checked by what all peers agreed on.

FROZEN = "frozen.safetensors"


def keep_frozen(
    folder: Path,
    specs: Sequence[FrozenSpec],
    tensors: Callable[[], Mapping[str, Tensor]],
    disk: Disk = DISK,
    whole: Whole = as_it_is,
) -> None:
    """Write ``FROZEN`` into ``folder``, durably, unless these very tensors are in it. DiskError: the disk refused.

    ``whole``: makes one tensor of what stands for it, when its turn comes.
    """
    path, digest = folder / FROZEN, _digest_of_specs(specs)
    if _digest_in_file(path) == digest:
        return
    temporary = path.with_name(f"{TEMPORARY}{FROZEN}")
    with disk_errors(f"writing {path}"):
        disk.remove(temporary)
        stored = {name: _storable(one) for name, one in tensors().items()}
        write_tensor_file(temporary, stored, {"format": "pt", "digest": digest}, disk, whole)
        disk.rename(temporary, path)
        disk.sync_folder(folder)


def _storable(tensor: Tensor) -> Tensor:
    """Its bytes, where the file has no word for its dtype; the schema says what they are."""
    return tensor if tensor.dtype in DTYPES else tensor.reshape(tensor.shape or (1,)).view(torch.uint8)


def read_frozen(folder: Path, specs: Sequence[FrozenSpec]) -> dict[str, Tensor]:
    """The tensors that ``specs`` name, each checked. DiskError: the file is missing, of another model or damaged."""
    path = folder / FROZEN
    named = f"{len(specs)} frozen tensors of the model ({specs[0].name} ...)"
    way_out = "copy it from another peer of the run, or start this one again without it: it writes it"
    try:
        found = {name: tensor.clone() for name, tensor in load_file(path).items()}  # clones: see read_tensor_file
    except FileNotFoundError as error:
        raise DiskError(f"{path} is missing, and with it the {named}; {way_out}") from error
    except (OSError, SafetensorError) as error:
        raise DiskError(f"{path} cannot be read ({error}), and in it are the {named}; {way_out}") from error
    for spec in specs:
        if spec.name not in found or frozen_digest(found[spec.name]) != spec.digest:
            raise DiskError(f"{path}: {spec.name} is not the one that the run's peers agreed on; {way_out}")
    return {spec.name: found[spec.name] for spec in specs}


def _digest_of_specs(specs: Sequence[FrozenSpec]) -> str:
    text = json.dumps([[spec.name, spec.shape, spec.dtype, spec.digest] for spec in specs])
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _digest_in_file(path: Path) -> str | None:
    """Read what a file says of itself; its last rename came after its bytes were durable."""
    try:
        with safe_open(path, framework="pt") as file:
            return (file.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None


# ---- adapters of peft ----
#
# A checkpoint says of them how peft opens their files; the base is frozen and stays where it came from, so the export
# of such a run is what was trained.
#
# In a model a parameter carries the name of its adapter (``...q_proj.lora_A.default.weight``), in peft's files it does
# not (``...q_proj.lora_A.weight``).

ADAPTER_TASK = "adapter"  # of the model, in a checkpoint's meta
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def name_in_adapter_file(name: str, adapter: str) -> str | None:
    """A parameter's name in peft's file; None for one of no adapter whose files have such names."""
    copied = f".modules_to_save.{adapter}."  # a module of the base that is trained whole
    if copied in name:
        return name.replace(copied, ".")
    before, found, after = name.partition(f".{adapter}")
    is_whole = found and (not after or after.startswith("."))
    return before + after if is_whole and ".lora_" in before else None


def adapter_description(
    config: Mapping[str, Any], adapter: str, trained: Iterable[str]
) -> dict[str, Any] | None:  # Any: JSON
    """For a checkpoint's meta; None where something is trained that such an adapter's files have no place for."""
    if any(name_in_adapter_file(name, adapter) is None for name in trained):
        return None
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return {"task": ADAPTER_TASK, "adapter": adapter, "config": {**plain, "inference_mode": True}}
