"""Where each process's part of a sharded tensor lies in the whole, as FSDP2 (``fully_shard``) leaves parameters.

A process holds one box of each parameter, along dimension 0 by default: rank r of n has rows [r*c, (r+1)*c) with
c = ceil(rows / n), so the last one may hold fewer or none. Where a mesh has replicas, too, several hold one box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decentral.errors import ConfigError


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
    """Whether it is a DTensor, of which this process holds a part."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of it, to be written to; a plain tensor is itself."""
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
    """One process for each box, the lowest rank that has it; those that hold nothing are left out."""
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
