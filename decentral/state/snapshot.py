"""A snapshot of the anchor: an immutable copy, cut into content-addressed chunks that any donor can serve.

The tensors, in the layout's order, form one row of little-endian float32 bytes; chunk ``i`` is its i-th 256 KiB. The
index lists the chunks' hashes and carries a small JSON document (round, record hash, digests). A joiner computes the
layout from its own model: the number of chunks and every size come from there, never from the wire.

Index on the wire, little-endian: magic "DCSN", version u16, zero u16, layout digest 32, number of chunks u32, length of
the JSON u32, JSON (canonical), then the hashes, 32 bytes each. Nothing follows.
"""

import contextlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decentral.coding import zstd
from decentral.errors import ConfigError, PayloadError
from decentral.parameters import Schema
from decentral.state.durable import disk_errors, make_private_folders
from decentral.state.tensor_file import tensor_bytes
from decentral.tensors.memory import fresh, fresh_zeros

CHUNK_NBYTES = 256 * 2**10
HASH_NBYTES = 32
# Of the document at most. A head of 1,024 members, all of them newcomers, takes 137 kB, and where receivers remember, a
# bit for each in each of 1,024 fragments 265 kB.
MAX_META_NBYTES = 512 * 2**10
_HEAD = struct.Struct("<4sHH32sII")
_MAGIC, _VERSION = b"DCSN", 1

BUFFERS = "buffers"  # name of the buffers that peers share, in snapshots and checkpoints


def live_buffer_name(name: str) -> str:
    """Name of one buffer of the live model in a checkpoint, where it has its own dtype."""
    return f"live_buffer/{name}"


def anchor_name(fragment: int) -> str:
    """Name of a fragment's anchor in snapshots and checkpoints."""
    return f"anchor/{fragment}"


def outer_name(fragment: int, name: str) -> str:
    """Name of one tensor of a fragment's outer optimizer state."""
    return f"outer/{fragment}/{name}"


@dataclass(frozen=True)
class Layout:
    """Names and element counts of a snapshot's tensors, in order: each side computes its own."""

    entries: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """Layout of these tensors, by sorted name."""
        return cls(tuple((name, tensors[name].numel()) for name in sorted(tensors)))

    @classmethod
    def from_schema(cls, schema: Schema, outer_names: tuple[str, ...] = ()) -> "Layout":
        """``anchor/F`` for each fragment F, ``outer/F/NAME`` as long for each outer state tensor, ``buffers``."""
        sizes = {anchor_name(f.index): f.numel for f in schema.fragments}
        sizes |= {outer_name(f.index, name): f.numel for f in schema.fragments for name in outer_names}
        sizes |= {BUFFERS: schema.buffer_numel} if schema.buffers else {}
        return cls(tuple(sorted(sizes.items())))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors as float32."""
        return 4 * sum(numel for _, numel in self.entries)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of at most 256 KiB."""
        return math.ceil(self.nbytes / CHUNK_NBYTES)

    @cached_property
    def digest(self) -> bytes:
        """Blake2b-256 of the canonical spelling."""
        return blake2b(json.dumps(self.entries).encode(), digest_size=HASH_NBYTES).digest()

    def chunk_nbytes(self, number: int) -> int:
        """Exact size of chunk ``number``; only the last one is short."""
        return min(CHUNK_NBYTES, self.nbytes - number * CHUNK_NBYTES)


@dataclass(frozen=True)
class SnapshotIndex:
    """The document and the hash of every chunk; as long as layout and document say, to the byte."""

    layout: Layout
    meta: dict[str, Any]  # JSON; the reader checks what it uses
    hashes: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Canonical bytes; equal snapshots have equal ones."""
        meta = _canonical(self.meta)
        head = _HEAD.pack(_MAGIC, _VERSION, 0, self.layout.digest, len(self.hashes), len(meta))
        return head + meta + b"".join(self.hashes)

    @cached_property
    def digest(self) -> bytes:
        """Blake2b-256 of the bytes: names the snapshot."""
        return blake2b(self.to_bytes(), digest_size=HASH_NBYTES).digest()

    @classmethod
    def max_nbytes(cls, layout: Layout) -> int:
        """The longest index a donor may send for this layout: the bound to read with."""
        return _HEAD.size + MAX_META_NBYTES + HASH_NBYTES * layout.num_chunks

    @classmethod
    def document(cls, data: bytes) -> dict[str, Any]:
        """The document alone, for who needs it to know the layout. Raises PayloadError."""
        _, _, meta_nbytes = cls._fields(data)
        _check(len(data) >= _HEAD.size + meta_nbytes, f"it is {len(data)} bytes long")
        return _parse_meta(data[_HEAD.size : _HEAD.size + meta_nbytes])

    @classmethod
    def _fields(cls, data: bytes) -> tuple[bytes, int, int]:
        """Digest of the layout, number of chunks, bytes of the document."""
        if len(data) < _HEAD.size:
            raise PayloadError(f"snapshot index of {len(data)} bytes: the head alone has {_HEAD.size}")
        magic, version, zero, digest, num_chunks, meta_nbytes = _HEAD.unpack_from(data)
        _check(magic == _MAGIC and version == _VERSION and zero == 0, "not an index of this version")
        _check(meta_nbytes <= MAX_META_NBYTES, f"a document of {meta_nbytes} bytes is too long")
        return digest, num_chunks, meta_nbytes

    @classmethod
    def from_bytes(cls, data: bytes, layout: Layout) -> "SnapshotIndex":
        """Parse a donor's bytes against the local layout. Raises PayloadError naming what is wrong."""
        digest, num_chunks, meta_nbytes = cls._fields(data)
        _check(digest == layout.digest, "it is of another model or outer optimizer than the local one")
        _check(num_chunks == layout.num_chunks, f"{num_chunks} chunks, the model needs {layout.num_chunks}")
        hashes_at = _HEAD.size + meta_nbytes
        _check(len(data) == hashes_at + HASH_NBYTES * num_chunks, f"it is {len(data)} bytes long")
        hashes = tuple(data[at : at + HASH_NBYTES] for at in range(hashes_at, len(data), HASH_NBYTES))
        return cls(layout, _parse_meta(data[_HEAD.size : hashes_at]), hashes)


class Snapshot:
    """An immutable copy, made at once: training may change the tensors while donors serve the chunks."""

    def __init__(self, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
        """Copy and hash (about 1 GB/s). ``tensors``: float32, any shape, else ConfigError."""
        wrong = [name for name, tensor in tensors.items() if tensor.dtype != torch.float32]
        if wrong:
            raise ConfigError(f"snapshot tensor {wrong[0]} is {tensors[wrong[0]].dtype}: only float32 is shared")
        layout = Layout.of(tensors)
        self._row = bytearray(layout.nbytes)
        at = 0
        for name, _ in layout.entries:
            data = tensor_bytes(tensors[name])
            self._row[at : at + data.nbytes] = data
            at += data.nbytes
        hashes = tuple(chunk_hash(self._view(number, layout)) for number in range(layout.num_chunks))
        self.index = SnapshotIndex(layout, _parse_meta(_canonical(meta)), hashes)

    def chunk(self, number: int) -> bytes:
        """Bytes of chunk ``number``. Raises PayloadError when there is none: a peer asked for it."""
        if not 0 <= number < len(self.index.hashes):
            raise PayloadError(f"chunk {number} asked for, the snapshot has {len(self.index.hashes)}")
        return bytes(self._view(number, self.index.layout))

    def _view(self, number: int, layout: Layout) -> memoryview:
        begin = number * CHUNK_NBYTES
        return memoryview(self._row)[begin : begin + layout.chunk_nbytes(number)]


def chunk_hash(data: bytes | memoryview) -> bytes:
    """The name of a chunk: blake2b-256 of its bytes."""
    return blake2b(data, digest_size=HASH_NBYTES).digest()


def _canonical(meta: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(meta, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"snapshot meta is no JSON document ({error})") from error
    if not isinstance(meta, dict) or len(text) > MAX_META_NBYTES:
        raise ConfigError(f"snapshot meta of {len(text)} bytes: must be a dict of at most {MAX_META_NBYTES}")
    return text


def _parse_meta(text: bytes) -> dict[str, Any]:
    """A peer wrote this. One spelling per document, so equal documents have equal hashes."""
    try:
        meta = json.loads(text)
        canonical = _canonical(meta)
    except (ValueError, RecursionError, ConfigError) as error:  # deep nesting exhausts the parser's stack
        raise PayloadError(f"snapshot document is no JSON object ({type(error).__name__}); drop the donor") from error
    _check(canonical == text, "its document is not in canonical form")
    return dict(meta)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise PayloadError(f"snapshot index refused: {what}; drop the donor")


# ---- a chunk on its way ----
#
# It travels as it is, or by planes through zstd where that is shorter.
#
# Crosses the wire: the form, one byte, then the chunk in it. A chunk's name stays the hash of its plain bytes. How many
# these are follows from the local layout, so nothing is expanded beyond it.

PLAIN, PLANES = 0, 1
BY_PLANES = 1 << 0  # in an asker's set of forms, one byte: this one may come, too. Bits without a meaning are ignored
FORM_NBYTES = 1  # ahead of a chunk


def to_form(chunk: bytes, forms: int) -> bytes:
    """The chunk in the shortest form that the asker takes."""
    if forms & BY_PLANES:
        packed = zstd.write_float_frame(chunk)
        if len(packed) < len(chunk):
            return bytes([PLANES]) + packed
    return bytes([PLAIN]) + chunk


def from_form(answer: bytes, nbytes: int) -> bytes:
    """The chunk, of ``nbytes``. Raises PayloadError; whether it is the right one, its hash says."""
    if not answer or answer[0] not in (PLAIN, PLANES):
        raise PayloadError(f"a chunk in form {answer[:1].hex() or 'none'}, which nobody asked for; drop the donor")
    body = answer[FORM_NBYTES:]
    packed = answer[0] == PLANES
    if packed and nbytes % 4:
        raise PayloadError(f"a chunk of {nbytes} bytes by planes of four; drop the donor")
    if len(body) >= nbytes if packed else len(body) != nbytes:
        raise PayloadError(f"a chunk of {nbytes} bytes came as {len(body)}; drop the donor")
    return zstd.read_float_frame(body, nbytes) if packed else body


# ---- snapshots from chunks ----
#
# Chunks come in any order, from any donors, over any number of restarts.
#
# A chunk is accepted only if its hash is the one the index names, so one lying donor costs one chunk's bytes. With a
# folder, chunks are also written to ``DIGEST.partial``; on restart its chunks are hashed again and only the missing
# ones are fetched. No fsync is needed there: what a crash lost fails its hash and is fetched again.


class Assembler:
    """Collects the chunks of one index. Memory: the snapshot once; its size comes from the local layout."""

    def __init__(self, index: SnapshotIndex, folder: Path | None = None) -> None:
        """Start, or resume from ``folder``; partial files of other snapshots there are removed."""
        self.index = index
        self._row_N = fresh_zeros(index.layout.nbytes // 4)  # in a file, where long vectors lie in files
        self._row = self._row_N.numpy().view(np.uint8)
        self._have: set[int] = set()
        self._file: Path | None = None
        if folder is not None:
            with disk_errors(f"preparing the download folder {folder}"):
                self._file = self._open(folder)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that are here, and of the whole."""
        layout = self.index.layout
        return min(layout.nbytes, CHUNK_NBYTES * len(self._have)), layout.nbytes

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole."""
        return self.index.layout.num_chunks

    def missing(self) -> list[int]:
        """Numbers of the chunks still to fetch, in order."""
        return [number for number in range(self.index.layout.num_chunks) if number not in self._have]

    def add(self, number: int, data: bytes) -> None:
        """Take a chunk a donor sent; one that is already there changes nothing.

        Raises:
            PayloadError: no such chunk, or not its bytes; nothing was kept.
            DiskError: the partial file could not be written; the chunk is kept in memory.

        """
        layout = self.index.layout
        if not 0 <= number < layout.num_chunks:
            raise PayloadError(f"chunk {number} of a snapshot with {layout.num_chunks}; drop the donor")
        if len(data) != layout.chunk_nbytes(number) or chunk_hash(data) != self.index.hashes[number]:
            raise PayloadError(f"chunk {number} is not what the index names; fetch it from another donor")
        if number in self._have:
            return
        self._put(number, data)
        self._have.add(number)
        if self._file is not None:
            with disk_errors(f"writing {self._file}"), self._file.open("r+b") as file:
                file.seek(number * CHUNK_NBYTES)
                file.write(data)

    def _put(self, number: int, data: bytes) -> None:
        begin = number * CHUNK_NBYTES
        self._row[begin : begin + len(data)] = np.frombuffer(data, dtype=np.uint8)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, float32 (numel,), by name; the partial file is removed.

        Raises:
            ConfigError: chunks are missing.

        """
        if len(self._have) < self.index.layout.num_chunks:
            raise ConfigError(f"{len(self.missing())} chunks are missing; add them first")
        result, at = dict[str, Tensor](), 0
        for name, numel in self.index.layout.entries:
            result[name] = fresh(numel).copy_(self._row_N[at : at + numel])
            at += numel
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        return result

    def _open(self, folder: Path) -> Path:
        make_private_folders(folder)
        mine = folder / f"{self.index.digest.hex()}.partial"
        for other in folder.glob("*.partial"):
            if other != mine:
                other.unlink()
        if mine.exists():
            self._resume(mine.read_bytes() if mine.stat().st_size <= len(self._row) else b"")
        with mine.open("ab") as file:
            os.ftruncate(file.fileno(), len(self._row))  # sparse: reserves the name, not the space
        return mine

    def _resume(self, stored: bytes) -> None:
        layout = self.index.layout
        for number in range(layout.num_chunks):
            begin = number * CHUNK_NBYTES
            data = stored[begin : begin + layout.chunk_nbytes(number)]
            if chunk_hash(data) == self.index.hashes[number]:
                self._put(number, data)
                self._have.add(number)
