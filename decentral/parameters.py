"""A model as named, ordered, flat fragments: what peers must agree on, and the way in and out of a model.

A fragment is the slice of the parameters that one round synchronises. Its flat form is a float32 vector on the
CPU, parameters one after another in the order of ``named_parameters``; every digest is taken over that form.
Fragments are strided over the transformer blocks (block b -> fragment b mod P-1, the rest in the last one), as in
Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.errors import ConfigError, ManifestMismatch, PayloadError

__all__ = [
    "Fragment",
    "ParameterSpec",
    "Schema",
    "combined_digest",
    "digest",
    "first_non_finite",
    "gather",
    "scatter",
    "schema_of",
    "split",
]

# Bounds on a schema that came from a peer: far above any model, far below what could hurt this process.
MAX_JSON_CHARS = 16 * 2**20
MAX_FRAGMENTS = 1024
MAX_PARAMETERS = 100_000
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 16
MAX_NUMEL = 2**44

NamedParameters = torch.nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter's name (as in ``named_parameters``) and shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The parameters that one round synchronises, in order; ``index`` is its place in the schema."""

    index: int
    parameters: tuple[ParameterSpec, ...]

    @property
    def numel(self) -> int:
        """Length of the flat vector."""
        return sum(spec.numel for spec in self.parameters)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The parameters' shapes, in order."""
        return tuple(spec.shape for spec in self.parameters)


@dataclass(frozen=True, slots=True)
class Schema:
    """All fragments of a model: every size that is ever expected from a peer follows from it."""

    fragments: tuple[Fragment, ...]

    @property
    def digest(self) -> bytes:
        """32 bytes that name the schema: blake2b-256 of ``to_json()``."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=32).digest()

    @property
    def numel(self) -> int:
        """Number of elements in all fragments."""
        return sum(fragment.numel for fragment in self.fragments)

    def to_json(self) -> str:
        """The canonical spelling: a list of fragments, each a list of [name, [dimensions]]."""
        rows = [[[spec.name, list(spec.shape)] for spec in fragment.parameters] for fragment in self.fragments]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read what ``to_json`` wrote; PayloadError on anything else, however hostile."""
        if len(text) > MAX_JSON_CHARS:
            raise _rubbish(f"{len(text)} characters, at most {MAX_JSON_CHARS} are read")
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _rubbish(f"not JSON ({type(error).__name__})") from None
        fragments = _rows(rows, "fragments", MAX_FRAGMENTS)
        schema = cls(tuple(_fragment_from(index, row) for index, row in enumerate(fragments)))
        _check_bounds(schema)
        return schema

    def describe_difference(self, other: "Schema") -> list[str]:
        """One line per difference, ``self`` being "here" and ``other`` "in the run"; empty when equal."""
        here, there = _places(self), _places(other)
        lines = []
        for key in dict.fromkeys([*here, *there]):
            mine, theirs = here.get(key), there.get(key)
            name = key if key.isprintable() else ascii(key)  # a stranger's, and shown on a terminal
            if mine is None or theirs is None:
                lines.append(
                    f"{name}: {mine[0] if mine else 'absent'} here, {theirs[0] if theirs else 'absent'} in the run"
                )
            elif mine != theirs:
                what = 0 if mine[0] != theirs[0] else 1  # the shape, else the place
                lines.append(f"{name}: {mine[what]} here, {theirs[what]} in the run")
        return lines


def schema_of(model_or_named_parameters: NamedParameters, num_fragments: int = 1) -> Schema:
    """The schema of all parameters that require gradients, in ``named_parameters`` order.

    With P > 1 fragments, the block numbered b (first integer component of the dotted name) goes to fragment
    b mod (P-1) and everything else (embeddings, head, norms) to the last one; with nothing else, b mod P.
    """
    specs = [ParameterSpec(name, tuple(p.shape)) for name, p in _trained(model_or_named_parameters)]
    if not specs:
        raise ConfigError("schema_of: no parameter requires gradients, so there is nothing to train; unfreeze some")
    if not 1 <= num_fragments <= MAX_FRAGMENTS:
        raise ConfigError(f"schema_of(num_fragments={num_fragments}): want 1 to {MAX_FRAGMENTS}")
    members = _strided(specs, num_fragments)
    if not all(members):
        raise ConfigError(
            f"schema_of(num_fragments={num_fragments}): fragment {members.index([])} would be empty, the model has "
            f"{len({_block(s.name) for s in specs} - {None})} blocks; use fewer fragments"
        )
    return Schema(tuple(Fragment(index, tuple(group)) for index, group in enumerate(members)))


def gather(parameters: Mapping[str, Tensor], fragment: Fragment) -> Tensor:
    """Copy a fragment out of a model: flat float32 on the CPU, shape (fragment.numel,)."""
    flat_N = torch.empty(fragment.numel, dtype=torch.float32)
    for spec, piece in zip(fragment.parameters, split(flat_N, fragment), strict=True):
        piece.copy_(_find(parameters, spec).detach())
    return flat_N


def scatter(flat: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
    """Copy a flat fragment into a model in place, to each parameter's own device and dtype; no gradient."""
    targets = [_find(parameters, spec) for spec in fragment.parameters]  # all found before one is changed
    with torch.no_grad():
        for target, piece in zip(targets, split(flat, fragment), strict=True):
            target.copy_(piece)


def split(flat: Tensor, fragment_or_shapes: Fragment | Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a flat tensor, shaped like the parameters; writing to them writes to ``flat``."""
    shapes = fragment_or_shapes.shapes if isinstance(fragment_or_shapes, Fragment) else fragment_or_shapes
    sizes = [math.prod(shape) for shape in shapes]
    if flat.shape != (sum(sizes),):
        raise ConfigError(f"split: a flat tensor of shape ({sum(sizes)},) is wanted, got {tuple(flat.shape)}")
    return [piece.view(shape) for piece, shape in zip(torch.split_with_sizes(flat, sizes), shapes, strict=True)]


def first_non_finite(flat: Tensor, fragment: Fragment) -> str | None:
    """The name of the first parameter of the fragment with NaN or Inf in ``flat``; None when all are finite."""
    if not flat.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(flat))).all()):  # one pass; both keep NaN
        return None
    parts = zip(fragment.parameters, split(flat, fragment), strict=True)
    return next(spec.name for spec, part in parts if not bool(torch.isfinite(part).all()))


def digest(flat: Tensor) -> bytes:
    """32 bytes that name a tensor's exact bits: blake2b-256 over its little-endian float32 bytes."""
    array = flat.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return hashlib.blake2b(array.data, digest_size=32).digest()


def combined_digest(digests: Sequence[bytes]) -> bytes:
    """The anchor's digest, 32 bytes, from its fragments' digests in order."""
    if any(len(item) != 32 for item in digests):
        raise ConfigError(f"combined_digest: digests of 32 bytes are wanted, got {[len(item) for item in digests]}")
    return hashlib.blake2b(b"".join(digests), digest_size=32).digest()


def _trained(source: NamedParameters) -> list[tuple[str, Tensor]]:
    if isinstance(source, torch.nn.Module):
        source = source.named_parameters()
    pairs = source.items() if isinstance(source, Mapping) else source
    return [(name, parameter) for name, parameter in pairs if parameter.requires_grad]


def _block(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isascii() and word.isdigit()), None)


def _strided(specs: list[ParameterSpec], num_fragments: int) -> list[list[ParameterSpec]]:
    if num_fragments == 1:
        return [specs]
    stride = num_fragments if all(_block(spec.name) is not None for spec in specs) else num_fragments - 1
    members: list[list[ParameterSpec]] = [[] for _ in range(num_fragments)]
    for spec in specs:
        block = _block(spec.name)
        members[-1 if block is None else block % stride].append(spec)
    return members


def _find(parameters: Mapping[str, Tensor], spec: ParameterSpec) -> Tensor:
    found = parameters.get(spec.name)
    if found is None:
        raise ManifestMismatch(f"the model has no parameter {spec.name}; the run's schema wants {spec.shape}")
    if tuple(found.shape) != spec.shape:
        raise ManifestMismatch(f"{spec.name}: {tuple(found.shape)} here, {spec.shape} in the run; use the run's model")
    return found


def _places(schema: Schema) -> dict[str, tuple[tuple[int, ...], str]]:
    """Each parameter's shape, and where it lies: order matters, for it decides the flat form."""
    return {
        spec.name: (spec.shape, f"place {place} of fragment {fragment.index}")
        for fragment in schema.fragments
        for place, spec in enumerate(fragment.parameters)
    }


def _fragment_from(index: int, row: object) -> Fragment:
    parameters = _rows(row, "parameters of a fragment", MAX_PARAMETERS)
    return Fragment(index, tuple(_spec_from(item) for item in parameters))


def _spec_from(item: object) -> ParameterSpec:
    if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)):
        raise _rubbish("a parameter is [name, [dimensions]]")
    name, shape = item[0], item[1]
    if not (isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS and 1 <= len(name) <= MAX_NAME_CHARS):
        raise _rubbish(f"a shape has at most {MAX_DIMENSIONS} dimensions, a name 1 to {MAX_NAME_CHARS} characters")
    if not all(type(size) is int and 0 <= size <= MAX_NUMEL for size in shape):
        raise _rubbish(f"a dimension is a whole number from 0 to {MAX_NUMEL}")
    return ParameterSpec(name, tuple(shape))


def _rows(value: object, what: str, most: int) -> list[object]:
    if not (isinstance(value, list) and 1 <= len(value) <= most):
        raise _rubbish(f"{what}: a list of 1 to {most} is wanted")
    return value


def _check_bounds(schema: Schema) -> None:
    names = [spec.name for fragment in schema.fragments for spec in fragment.parameters]
    if len(names) > MAX_PARAMETERS or schema.numel > MAX_NUMEL:
        raise _rubbish(f"at most {MAX_PARAMETERS} parameters and {MAX_NUMEL} elements are read")
    if len(set(names)) != len(names):
        raise _rubbish("a parameter is named twice")


def _rubbish(why: str) -> PayloadError:
    return PayloadError(f"this is no schema of a model: {why}; ask another peer for it")
