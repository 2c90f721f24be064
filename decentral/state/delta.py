"""The exact difference of two versions of named tensors: where stored bits changed, and to what.

Layout: magic "DCDL", form u8 (0 delta, 1 full), id of the base, id of the result (32 bytes each); then groups of
tensors of one element size, in order of size and name, each of at most 2**26 elements or a single tensor. A delta's
group: how many elements changed u32 per tensor; one stream of their places (gaps); one stream per byte of their
changes, lowest byte first. A change is new bits less old bits, folded so that small ones of either sign are small
numbers: most of a trained bfloat16's changes are one step, and take one or two bits. A full group: all bits. Streams
are those of `decentral.coding`. Names, dtypes and shapes are not sent: both sides hold the base.

Bits are compared as integers, so NaN payloads and minus zero arrive as they are. A delta that would be larger than all
bits is sent as all bits, which need no base but its schema. A receiver that holds another base gets BaseMismatch, and
asks for the full version; the result's id is checked before it is returned. What the bytes say is bounded by the base:
nothing larger than a few times its own size is ever allocated.

Of a Gaussian bfloat16 tensor, 1 % of single steps cost 1/170 of its bits, 1 % of new values 1/80; new values break even
with all bits at 0.9 of the elements, single steps never.

Source: SparseRL-Sync's exact (index, value) updates, with versions and checksums; coding and folding are ours.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral import coding
from decentral.errors import BaseMismatch, ConfigError, PayloadError
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.tensor_file import DTYPES, tensor_bytes, write_tensor_file

__all__ = ["LATEST", "AnchorFolder", "DeltaHeader", "apply_delta", "make_delta", "read_header", "version_id"]

# Shape suffixes: N = elements of a tensor, K = elements changed.

ID_NBYTES = 32
_HEADER = struct.Struct(f"<4sB{ID_NBYTES}s{ID_NBYTES}s")
_MAGIC = b"DCDL"
_DELTA, _FULL = 0, 1
_GROUP = 1 << 26  # elements of tensors that share streams, and so tables
_LARGEST = 2**31  # what a place can be

Bits = NDArray[Any]  # unsigned integers as wide as the elements
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class DeltaHeader:
    """The header of a message: what it is between; ``full`` ones apply to any base of the same schema."""

    base: bytes
    result: bytes
    full: bool


def version_id(tensors: Tensors) -> bytes:
    """32 bytes that name these tensors' names, dtypes, shapes and bits, in whatever order they are held."""
    name = blake2b(digest_size=ID_NBYTES)
    name.update(json.dumps([_schema(key, tensors[key]) for key in sorted(tensors)]).encode())
    for key in sorted(tensors):
        name.update(tensor_bytes(tensors[key]))
    return name.digest()


def make_delta(base: Tensors, target: Tensors) -> bytes:
    """The message that turns ``base`` into ``target``. ConfigError when they differ in more than bits."""
    _check_alike(base, target)
    head = version_id(base), version_id(target)
    delta = b"".join(piece for group in _groups(base) for piece in _delta_group(base, target, group))
    raw_nbytes = sum(tensor.numel() * tensor.element_size() for tensor in target.values())
    if 2 * len(delta) < raw_nbytes:  # entropy coding halves all bits at best
        return _HEADER.pack(_MAGIC, _DELTA, *head) + delta
    full = b"".join(piece for group in _groups(base) for piece in _full_group(target, group))
    if len(full) <= len(delta):
        return _HEADER.pack(_MAGIC, _FULL, *head) + full
    return _HEADER.pack(_MAGIC, _DELTA, *head) + delta


def read_header(data: bytes | memoryview) -> DeltaHeader:
    """The versions that a message is between. PayloadError when it is no such message."""
    if len(data) < _HEADER.size:
        raise _refusal(f"{len(data)} bytes, its header has {_HEADER.size}")
    magic, form, base, result = _HEADER.unpack(bytes(data[: _HEADER.size]))
    if magic != _MAGIC or form not in (_DELTA, _FULL):
        raise _refusal("it does not begin as one")
    return DeltaHeader(base, result, form == _FULL)


def apply_delta(base: Tensors, data: bytes | memoryview) -> dict[str, Tensor]:
    """New tensors on the CPU, with the bits that the sender had; ``base`` is untouched.

    Raises:
        BaseMismatch: the message belongs to another base; ask for the full version.
        PayloadError: the bytes are damaged, or do not give what they promise.

    """
    header = read_header(data)
    if not header.full and version_id(base) != header.base:
        raise BaseMismatch(
            f"delta from version {header.base.hex()[:16]}, held is {version_id(base).hex()[:16]}; "
            "ask for the full version"
        )
    rest = np.frombuffer(data, dtype=np.uint8)[_HEADER.size :]
    found: dict[str, Tensor] = {}
    for group in _groups(base):
        read = _read_full_group if header.full else _read_delta_group
        bits, taken = read(base, group, rest)
        rest = rest[taken:]
        found |= {name: _tensor(array, base[name]) for name, array in zip(group, bits, strict=True)}
    if rest.size:
        raise _refusal(f"{rest.size} bytes are left over")
    if version_id(found) != header.result:
        raise _refusal("what it gives is not the version that it names")
    return {name: found[name] for name in base}


def _delta_group(base: Tensors, target: Tensors, group: list[str]) -> list[bytes | memoryview]:
    places, changes = [], []
    for name in group:
        old_N, new_N = _bits(base[name]), _bits(target[name])
        place_K = np.flatnonzero(old_N != new_N)
        places.append(place_K.astype(np.int32)[None])
        changes.append(_fold(new_N[place_K] - old_N[place_K]))
    pieces: list[bytes | memoryview] = [np.array([place.size for place in places], dtype="<u4").tobytes()]
    kinds = [coding.Rising(max(1, base[name].numel())) for name in group]
    pieces += coding.encode(kinds, places)
    for plane in _planes(np.concatenate(changes)):
        pieces += coding.encode([coding.Symbols(8)], [plane])
    return pieces


def _read_delta_group(base: Tensors, group: list[str], data: NDArray[np.uint8]) -> tuple[list[Bits], int]:
    at = 4 * len(group)
    if data.size < at:
        raise _refusal("it ends before a group's counts")
    counts = np.frombuffer(data[:at].tobytes(), dtype="<u4").astype(np.int64)
    if any(count > base[name].numel() for count, name in zip(counts, group, strict=True)):
        raise _refusal("more elements change than there are")
    forms = [
        coding.Form(coding.Rising(max(1, base[name].numel())), (1, int(count)), np.dtype(np.int32))
        for count, name in zip(counts, group, strict=True)
    ]
    places, taken = coding.decode(forms, data[at:])
    at += taken
    planes = []
    for _ in range(base[group[0]].element_size()):
        form = coding.Form(coding.Symbols(8), (int(counts.sum()),), np.dtype(np.uint8))
        (plane,), taken = coding.decode([form], data[at:])
        planes.append(plane)
        at += taken
    folded = _join(planes)
    if not folded.all():
        raise _refusal("an element changes to what it was")
    return _apply_changes(base, group, places, np.split(_unfold(folded), np.cumsum(counts)[:-1])), at


def _apply_changes(
    base: Tensors, group: list[str], places: list[NDArray[np.generic]], changes: list[Bits]
) -> list[Bits]:
    found = []
    for name, place_1K, change_K in zip(group, places, changes, strict=True):
        bits_N = _bits(base[name]).copy()
        bits_N[place_1K[0]] += change_K
        found.append(bits_N)
    return found


def _full_group(target: Tensors, group: list[str]) -> list[bytes | memoryview]:
    arrays = [_bits(target[name]) for name in group]
    return list(coding.encode([_full_kind(array.itemsize) for array in arrays], arrays))


def _read_full_group(base: Tensors, group: list[str], data: NDArray[np.uint8]) -> tuple[list[Bits], int]:
    forms = []
    for name in group:
        itemsize = base[name].element_size()
        forms.append(coding.Form(_full_kind(itemsize), (base[name].numel(),), np.dtype(f"u{itemsize}")))
    arrays, taken = coding.decode(forms, data)
    return arrays, taken


def _full_kind(itemsize: int) -> coding.ElementKind:
    return coding.Floats() if itemsize > 1 else coding.Symbols(8)


def _groups(tensors: Tensors) -> Iterator[list[str]]:
    """Names of tensors that share streams."""
    for size in sorted({tensor.element_size() for tensor in tensors.values()}):
        group: list[str] = []
        held = 0
        for name in sorted(name for name in tensors if tensors[name].element_size() == size):
            if group and held + tensors[name].numel() > _GROUP:
                yield group
                group, held = [], 0
            group.append(name)
            held += tensors[name].numel()
        yield group


def _bits(tensor: Tensor) -> Bits:
    """The stored bits (N,) as unsigned integers."""
    return np.frombuffer(tensor_bytes(tensor), dtype=f"u{tensor.element_size()}")


def _tensor(bits_N: Bits, like: Tensor) -> Tensor:
    return torch.from_numpy(bits_N.view(np.uint8)).view(like.dtype).reshape(like.shape)


def _fold(change_K: Bits) -> Bits:
    """0, -1, 1, -2, ... to 0, 1, 2, 3, ...: bits of negative numbers turned over."""
    top = 8 * change_K.itemsize - 1
    return (change_K << 1) ^ (0 - (change_K >> top))


def _unfold(folded_K: Bits) -> Bits:
    return (folded_K >> 1) ^ (0 - (folded_K & 1))


def _planes(folded_K: Bits) -> list[NDArray[np.uint8]]:
    """The bytes of all numbers, lowest first."""
    return [((folded_K >> (8 * i)) & 255).astype(np.uint8) for i in range(folded_K.itemsize)]


def _join(planes: list[NDArray[np.generic]]) -> Bits:
    return np.stack(planes, axis=1).reshape(-1).view(f"<u{len(planes)}").astype(f"u{len(planes)}")


def _schema(name: str, tensor: Tensor) -> list[object]:
    if tensor.dtype not in DTYPES:
        raise ConfigError(f"tensor {name}: versions cannot hold {tensor.dtype}; convert it first")
    return [name, DTYPES[tensor.dtype], list(tensor.shape)]


def _check_alike(base: Tensors, target: Tensors) -> None:
    if set(base) != set(target):
        raise ConfigError(f"delta: versions name other tensors ({min(set(base) ^ set(target))}); send a checkpoint")
    for name in base:
        if _schema(name, base[name]) != _schema(name, target[name]):
            raise ConfigError(f"delta: tensor {name} changed its dtype or shape; send a checkpoint")
        if base[name].numel() > _LARGEST:
            raise ConfigError(f"delta: tensor {name} has more than {_LARGEST} elements; send a checkpoint")


def _refusal(what: str) -> PayloadError:
    return PayloadError(f"delta refused: {what}; drop it and its sender")


# ---- anchors of a run as files ----
#
# They are for whoever evaluates the run, serves it or samples from it.
#
# ``round-000012.safetensors`` holds one anchor under the names of the model's ``state_dict``; ``latest.json`` says
# which is the newest, its digest and when it was written. Both appear whole or not at all, the tensors first: the file
# that ``latest.json`` names is there, until as many newer ones are as are kept. ``round-000012.delta`` beside it is the
# exact difference from the anchor that was written before (see `make_delta`), for readers that hold that one.

LATEST = "latest.json"
LATEST_VERSION = 1
_WRITTEN = re.compile(r"round-(\d{6,})\.(safetensors|delta)")


class AnchorFolder:
    """Writes anchors into ``folder`` and keeps the newest ``keep`` of them. ``wall`` tells seconds since 1970."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        deltas: bool = False,
        disk: Disk = DISK,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.keep = folder, keep
        self._deltas, self._disk, self._wall = deltas, disk, wall
        self._before: tuple[int, Mapping[str, Tensor]] | None = None  # what the next delta begins from

    def latest(self) -> dict[str, Any] | None:
        """Read what ``latest.json`` says, where its file is there too; None: nothing was written yet."""
        try:
            found = json.loads((self.folder / LATEST).read_text(encoding="utf-8"))
            there = isinstance(found, dict) and (self.folder / str(found["file"])).is_file()
        except (OSError, ValueError, KeyError, RecursionError):
            return None
        return found if there else None

    def write(self, round_: int, digest: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        """Make one anchor durable and the newest; ``about`` goes into ``latest.json``. Raises DiskError.

        Tensors must not be written to afterwards: the next delta begins from them.
        """
        path = self.folder / f"round-{round_:06d}.safetensors"
        with disk_errors(f"writing {path}"):
            self._disk.make_folders(self.folder)
            self._sweep()
            self._replace(path, tensors, {"format": "pt", "round": str(round_), "digest": digest})
            delta = self._write_delta(round_, tensors)
            entry = {"version": LATEST_VERSION, "round": round_, "digest": digest, "file": path.name, "delta": delta}
            text = json.dumps({**entry, "time": round(self._wall(), 3), **about}, indent=1)
            self._disk.replace_file(self.folder / LATEST, [f"{text}\n".encode()])
        self._prune(round_)
        self._before = (round_, dict(tensors)) if self._deltas else None
        return path

    def _replace(self, path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str]) -> None:
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        write_tensor_file(temporary, tensors, note, self._disk)
        self._disk.rename(temporary, path)
        self._disk.sync_folder(self.folder)

    def _write_delta(self, round_: int, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Write a delta and return what ``latest.json`` says of it; None where there is nothing to begin from."""
        if self._before is None or self._before[0] == round_:
            return None
        since, before = self._before
        path = self.folder / f"round-{round_:06d}.delta"
        self._disk.replace_file(path, [make_delta(before, tensors)])
        return {"file": path.name, "since": since}

    def _prune(self, newest: int) -> None:
        """Drop the oldest, and later rounds of a branch that was given up. A failure waits for the next time."""
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _WRITTEN.fullmatch(path.name))]
        rounds = sorted({number for number, _ in found if number <= newest})[-self.keep :]
        for number, path in found:
            if number not in rounds:
                with contextlib.suppress(OSError):
                    self._disk.remove(path)

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for path in self.folder.glob(f"{TEMPORARY}*"):
            self._disk.remove(path)
