"""All of a model that its peers must agree on: trained parameters by fragments, buffers, and what is frozen.

Its canonical JSON crosses the wire in the greeting and is hashed into the run's first record. A model without buffers
and frozen parameters keeps the form that knew neither: a list of fragments.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from decentral.errors import ConfigError, PayloadError

# Bounds on a schema that came from a peer: far above any model, far below what could hurt this process.
MAX_JSON_CHARS = 16 * 2**20
MAX_FRAGMENTS = 1024
MAX_PARAMETERS = 100_000
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 16
MAX_NUMEL = 2**44

FROZEN_DIGEST_NBYTES = 16
Shapes = tuple[tuple[int, ...], ...]
Number = Literal["float", "integer"]
_HEX = frozenset("0123456789abcdef")

# Whole numbers that only ever rise, so that a mean of them is one: BatchNorm's, torch's AveragedModel's, that of the
# EMA in diffusion repositories. Of any other a mean may be nothing at all, as that of two pointers into a queue.
COUNTERS = frozenset({"num_batches_tracked", "n_averaged", "num_updates"})


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The name of a parameter (as in ``named_parameters``) and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class BufferSpec(ParameterSpec):
    """A buffer that the model's ``state_dict`` holds; whole numbers and truth values are "integer"."""

    kind: Number

    @property
    def has_mean(self) -> bool:
        """True where a mean of peers' values is a value: of floats, and of counters that are known."""
        return self.kind == "float" or self.name.rpartition(".")[2] in COUNTERS


@dataclass(frozen=True, slots=True)
class FrozenSpec(ParameterSpec):
    """A parameter that is not trained: its dtype as torch names it, and the blake2b-128 of its bytes, in hex."""

    dtype: str
    digest: str


@dataclass(frozen=True)
class Fragment:
    """The parameters that one round synchronises, in order; ``index`` is its place in the schema."""

    index: int
    parameters: tuple[ParameterSpec, ...]

    @cached_property
    def numel(self) -> int:
        """Length of the flat vector."""
        return sum(spec.numel for spec in self.parameters)

    @cached_property
    def shapes(self) -> Shapes:
        """The parameters' shapes, in order."""
        return tuple(spec.shape for spec in self.parameters)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in order."""
        return tuple(spec.name for spec in self.parameters)

    @cached_property
    def pieces(self) -> Shapes:
        """Shapes of what compressors take for one tensor, in order: see `pieces_of`."""
        return pieces_of(self.shapes)

    @property
    def layout(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes by their names, in order."""
        return {spec.name: spec.shape for spec in self.parameters}


@dataclass(frozen=True)
class Schema:
    """All fragments of a model, its buffers and what is frozen: every size expected from a peer follows from it."""

    fragments: tuple[Fragment, ...]
    buffers: tuple[BufferSpec, ...] = ()
    frozen: tuple[FrozenSpec, ...] = ()

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the schema: blake2b-256 of ``to_json()``."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=32).digest()

    @property
    def sizes(self) -> list[int]:
        """Number of elements in each fragment."""
        return [fragment.numel for fragment in self.fragments]

    @property
    def numel(self) -> int:
        """Number of elements in all fragments."""
        return sum(fragment.numel for fragment in self.fragments)

    @property
    def buffer_numel(self) -> int:
        """Number of elements in all buffers."""
        return sum(spec.numel for spec in self.buffers)

    def to_json(self) -> str:
        """The canonical spelling: a list of fragments, each a list of [name, [dimensions]].

        With buffers or frozen parameters a table of three lists; a buffer has its kind at the end, what is frozen its
        dtype and digest.
        """
        rows: object = [[[spec.name, list(spec.shape)] for spec in fragment.parameters] for fragment in self.fragments]
        if self.buffers or self.frozen:
            buffers = [[spec.name, list(spec.shape), spec.kind] for spec in self.buffers]
            frozen = [[spec.name, list(spec.shape), spec.dtype, spec.digest] for spec in self.frozen]
            rows = {"fragments": rows, "buffers": buffers, "frozen": frozen}
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Schema:
        """Read what ``to_json`` wrote; PayloadError on anything else, however hostile."""
        if len(text) > MAX_JSON_CHARS:
            raise _rubbish(f"{len(text)} characters, at most {MAX_JSON_CHARS} are read")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _rubbish(f"not JSON ({type(error).__name__})") from None
        rows = found if isinstance(found, dict) else {"fragments": found, "buffers": [], "frozen": []}
        fragments = _rows(rows.get("fragments"), "fragments", MAX_FRAGMENTS)
        buffers = _rows(rows.get("buffers"), "buffers", MAX_PARAMETERS, least=0)
        frozen = _rows(rows.get("frozen"), "frozen", MAX_PARAMETERS, least=0)
        if len(rows) > 3 or (rows is found and not (buffers or frozen)):  # one spelling for each model
            raise _rubbish("a list of fragments is wanted, or a table of fragments, buffers and frozen")
        schema = cls(
            tuple(_fragment_from(index, row) for index, row in enumerate(fragments)),
            tuple(map(_buffer_from, buffers)),
            tuple(map(_read_frozen, frozen)),
        )
        _check_bounds(schema)
        return schema

    def describe_difference(self, other: Schema) -> list[str]:
        """Return a line per difference, ``self`` being "here" and ``other`` "in the run"; empty when equal.

        Names that only lie elsewhere come last: one more or less before them moves them all.
        """
        here, there = _places(self), _places(other)
        lines = []
        for key in dict.fromkeys([*here, *there]):
            name = key if key.isprintable() else ascii(key)  # a stranger's, and shown on a terminal
            if (difference := _difference(here.get(key), there.get(key))) is not None:
                lines.append(f"{name}: {difference}")
        return sorted(lines, key=lambda line: ": place " in line)


@dataclass(frozen=True, slots=True)
class _Place:
    """The facts of a name, in the order in which a difference is told, and the digest of frozen values."""

    role: str
    facts: tuple[str, ...]
    values: str = ""


def _difference(mine: _Place | None, theirs: _Place | None) -> str | None:
    if mine is None or theirs is None:
        return f"{_shown(mine)} here, {_shown(theirs)} in the run"
    if mine.role != theirs.role:
        moved = "; its peers name it, or its module, in join(moved=...)" if theirs.role == "a buffer" else ""
        return f"{mine.role} here, {theirs.role} in the run{moved}"
    for fact, other in zip(mine.facts, theirs.facts, strict=True):
        if fact != other:
            return f"{fact} here, {other} in the run"
    return None if mine.values == theirs.values else "frozen, other values here than in the run: the base model differs"


def _shown(place: _Place | None) -> str:
    return "absent" if place is None else place.facts[0]


def _places(schema: Schema) -> dict[str, _Place]:
    """Each name's place too: order matters, for it decides the flat form."""
    found = {
        spec.name: _Place("trained", (str(spec.shape), f"place {place} of fragment {fragment.index}"))
        for fragment in schema.fragments
        for place, spec in enumerate(fragment.parameters)
    }
    for place, buffer in enumerate(schema.buffers):
        facts = (f"buffer {buffer.shape}", f"buffer of {buffer.kind}s", f"place {place} of the buffers")
        found[buffer.name] = _Place("a buffer", facts)
    for place, spec in enumerate(schema.frozen):
        facts = (f"frozen {spec.shape}", f"frozen, {spec.dtype}", f"place {place} of what is frozen")
        found[spec.name] = _Place("frozen", facts, spec.digest)
    return found


def _fragment_from(index: int, row: object) -> Fragment:
    parameters = _rows(row, "parameters of a fragment", MAX_PARAMETERS)
    return Fragment(index, tuple(_spec_from(item) for item in parameters))


def _spec_from(item: object) -> ParameterSpec:
    return ParameterSpec(*_name_and_shape(item, 2, "a parameter is [name, [dimensions]]"))


def _buffer_from(item: object) -> BufferSpec:
    rule = 'a buffer is [name, [dimensions], "float" or "integer"]'
    name, shape = _name_and_shape(item, 3, rule)
    kind = item[2] if isinstance(item, list) else None
    if kind not in ("float", "integer"):
        raise _rubbish(rule)
    return BufferSpec(name, shape, "float" if kind == "float" else "integer")


def _read_frozen(item: object) -> FrozenSpec:
    rule = "a frozen parameter is [name, [dimensions], dtype, 32 hex digits]"
    name, shape = _name_and_shape(item, 4, rule)
    dtype, digest = item[2:] if isinstance(item, list) else (None, None)
    if not (isinstance(dtype, str) and 1 <= len(dtype) <= 32 and dtype.isascii() and dtype.isidentifier()):
        raise _rubbish(rule)
    if not (isinstance(digest, str) and len(digest) == 2 * FROZEN_DIGEST_NBYTES and set(digest) <= _HEX):
        raise _rubbish(rule)
    return FrozenSpec(name, shape, dtype, digest)


def _name_and_shape(item: object, length: int, rule: str) -> tuple[str, tuple[int, ...]]:
    if not (isinstance(item, list) and len(item) == length and isinstance(item[0], str)):
        raise _rubbish(rule)
    name, shape = item[0], item[1]
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and 1 <= len(name) <= MAX_NAME_CHARS):
        raise _rubbish(f"a shape has at most {MAX_DIMENSIONS} dimensions, a name 1 to {MAX_NAME_CHARS} characters")
    if not all(type(size) is int and 0 <= size <= MAX_NUMEL for size in shape):
        raise _rubbish(f"a dimension is a whole number from 0 to {MAX_NUMEL}")
    return name, tuple(shape)


def _rows(value: object, what: str, most: int, least: int = 1) -> list[object]:
    if not (isinstance(value, list) and least <= len(value) <= most):
        raise _rubbish(f"{what}: a list of {least} to {most} is wanted")
    return value


def _check_bounds(schema: Schema) -> None:
    trained = [spec for fragment in schema.fragments for spec in fragment.parameters]
    specs: list[ParameterSpec] = [*trained, *schema.buffers, *schema.frozen]
    if len(specs) > MAX_PARAMETERS or sum(spec.numel for spec in specs) > MAX_NUMEL:
        raise _rubbish(f"at most {MAX_PARAMETERS} parameters and {MAX_NUMEL} elements are read")
    if len({spec.name for spec in specs}) != len(specs):
        raise _rubbish("a parameter is named twice")


def _rubbish(why: str) -> PayloadError:
    return PayloadError(f"this is no schema of a model: {why}; ask another peer for it")


# ---- many small parameters ----
#
# Neighbours that compressors take for one flat tensor: LoRA on every expert of a mixture has tens of thousands.
#
# Whatever its size, a tensor costs a compressor, a message's streams and a mean about a millisecond a round, and a
# scale or a kept entry of its own. A model as most are keeps the shape of each parameter, which tiles and products of
# matrices need.

MANY = 128  # small parameters of one fragment: GPT-2 has 98, ResNet-50 106
SMALL = 1 << 16  # values of one: below 256 by 256
_ENOUGH = 1 << 17  # values of a piece: a job for a thread, of which little is the millisecond


def pieces_of(shapes: Shapes) -> Shapes:
    """The shapes of parameters, runs of small ones as one flat piece each where more than ``MANY`` are small."""
    sizes = [math.prod(shape) for shape in shapes]
    if sum(size < SMALL for size in sizes) <= MANY:
        return shapes
    pieces: list[tuple[int, ...]] = []
    run = 0  # values of the small ones since the last piece
    for shape, size in zip(shapes, sizes, strict=True):
        run += size if size < SMALL else 0
        if run and (size >= SMALL or run >= _ENOUGH):
            pieces.append((run,))
            run = 0
        if size >= SMALL:
            pieces.append(shape)
    return (*pieces, (run,)) if run else tuple(pieces)


# ---- parts of a sharded tensor ----
#
# A box says where each process's part lies in the whole, as FSDP2 (``fully_shard``) leaves parameters.
#
# A process holds one box of each parameter, along dimension 0 by default: rank r of n has rows [r*c, (r+1)*c) with c =
# ceil(rows / n), so the last one may hold fewer or none. Where a mesh has replicas, too, several hold one box.


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: the first index of each dimension, and how many from there."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it; 1 for a scalar."""
        found = 1
        for size in self.shape:
            found *= size
        return found

    def of(self, whole: Tensor) -> Tensor:
        """That part of ``whole``, a view."""
        return whole[tuple(slice(b, b + size) for b, size in zip(self.begin, self.shape, strict=True))]


def is_sharded(tensor: Tensor) -> bool:
    """Tell whether it is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part that this process holds, to be written to; a plain tensor is itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def whole_of(tensor: Tensor) -> Tensor:
    """All of it, on every process of the mesh, which all have to ask; a plain tensor is itself."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def boxes_of(tensor: Any) -> dict[int, Box]:  # Any: a DTensor
    """The box of each process of the tensor's mesh, by rank. ConfigError for placements that are no boxes."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    ranks, kinds = mesh.mesh, tensor.placements
    _check_kinds(kinds)
    found = {}
    for rank in ranks.flatten().tolist():
        (coordinate,) = (ranks == rank).nonzero().tolist()
        found[rank] = _box(shape, ranks.shape, coordinate, kinds)
    return found


def holders(boxes: Mapping[int, Box]) -> dict[int, Box]:
    """Choose a process for each box, the lowest rank that has it; processes that hold nothing are left out."""
    found: dict[Box, int] = {}
    for rank in sorted(boxes):
        if boxes[rank].numel:
            found.setdefault(boxes[rank], rank)
    return {rank: box for box, rank in found.items()}


def _check_kinds(kinds: Sequence[Any]) -> None:
    strange = [kind for kind in kinds if type(kind).__name__ not in ("Shard", "Replicate")]
    if strange:
        raise ConfigError(
            f"a parameter is placed as {strange[0]}, and only what FSDP2 shards or replicates is read; shard the model "
            "with fully_shard alone, without tensor parallelism over the same processes"
        )


def _box(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], kinds: Sequence[Any]) -> Box:
    begin, sizes = [0] * len(shape), list(shape)
    for number, place, kind in zip(mesh, coordinate, kinds, strict=True):
        if type(kind).__name__ == "Shard":
            each = -(-sizes[kind.dim] // number)
            first = min(place * each, sizes[kind.dim])
            begin[kind.dim] += first
            sizes[kind.dim] = min(each, sizes[kind.dim] - first)
    return Box(tuple(begin), tuple(sizes))
