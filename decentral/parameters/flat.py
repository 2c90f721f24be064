"""Fragments and buffers as flat float32 vectors: into a model, out of it, and their digests."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from decentral.errors import ConfigError, ManifestMismatch
from decentral.parameters.schema import BufferSpec, Fragment, ParameterSpec
from decentral.tensors.device import PROCESSOR, moved
from decentral.tensors.memory import fresh
from decentral.tensors.ops import is_finite

# Shape suffixes: N = elements of one fragment, B = elements of all buffers; flat float32, on the CPU unless it is said.

_MOST_WHOLE = 2.0**53  # whole numbers that a float64 holds one by one


def gather(parameters: Mapping[str, Tensor], fragment: Fragment, place: torch.device = PROCESSOR) -> Tensor:
    """Copy a fragment out of a model: flat float32 on ``place``, shape (fragment.numel,).

    Of a model on one CUDA device it is put together there, and crosses at once.
    """
    found = [_find(parameters, spec).detach() for spec in fragment.parameters]
    flat_N = _empty(fragment.numel, _device_of(found))
    for source, piece in zip(found, split(flat_N, fragment), strict=True):
        piece.copy_(source)
    return moved(flat_N, place)


def scatter(flat: Tensor, fragment: Fragment, parameters: Mapping[str, Tensor]) -> None:
    """Copy a flat fragment into a model in place, to each parameter's own device and dtype; no gradient."""
    targets = [_find(parameters, spec) for spec in fragment.parameters]  # all found before one is changed
    here = moved(flat, _device_of(targets))
    with torch.no_grad():
        for target, piece in zip(targets, split(here, fragment), strict=True):
            target.copy_(piece)


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    """The CUDA device that has all of them; the processor where there is none."""
    devices = {one.device for one in tensors}
    return devices.pop() if len(devices) == 1 and all(one.type == "cuda" for one in devices) else PROCESSOR


def _empty(numel: int, device: torch.device) -> Tensor:
    return fresh(numel) if device == PROCESSOR else torch.empty(numel, dtype=torch.float32, device=device)


def gather_buffers(buffers: Mapping[str, Tensor], specs: Sequence[BufferSpec]) -> Tensor:
    """Copy the buffers out of a model, in the schema's order. Whole numbers are exact below 2**24."""
    flat_B = torch.empty(sum(spec.numel for spec in specs), dtype=torch.float32)
    for spec, piece in zip(specs, split(flat_B, [spec.shape for spec in specs]), strict=True):
        piece.copy_(_find(buffers, spec).detach())
    return flat_B


def scatter_buffers(flat_B: Tensor, specs: Sequence[BufferSpec], buffers: Mapping[str, Tensor]) -> None:
    """Copy flat buffers into a model in place, each to its own device and dtype."""
    targets = [_find(buffers, spec) for spec in specs]
    with torch.no_grad():
        for target, piece in zip(targets, split(flat_B, [spec.shape for spec in specs]), strict=True):
            target.copy_(in_dtype_of(target.detach().cpu(), piece))


def in_dtype_of(like: Tensor, value: Tensor) -> Tensor:
    """``value``, float32, in the dtype of ``like``, of the same shape: rounded and bounded for whole numbers.

    Where float32 cannot tell it from ``like``, ``like`` stays: a table of large whole numbers or of float64 that no
    step changes survives.
    """
    found = value
    if not like.is_floating_point():
        least, most = (0.0, 1.0) if like.dtype == torch.bool else _bounds(like.dtype)
        found = value.to(torch.float64).round().clamp(least, most)
    return torch.where(like.to(torch.float32) == value, like, found.to(like.dtype))


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.iinfo(dtype)
    return max(float(info.min), -_MOST_WHOLE), min(float(info.max), _MOST_WHOLE)


def split(flat: Tensor, fragment_or_shapes: Fragment | Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of a flat tensor, shaped like the parameters; writing to them writes to ``flat``."""
    shapes = fragment_or_shapes.shapes if isinstance(fragment_or_shapes, Fragment) else fragment_or_shapes
    sizes = [math.prod(shape) for shape in shapes]
    if flat.shape != (sum(sizes),):
        raise ConfigError(f"split: a flat tensor of shape ({sum(sizes)},) is wanted, got {tuple(flat.shape)}")
    return [piece.view(shape) for piece, shape in zip(torch.split_with_sizes(flat, sizes), shapes, strict=True)]


def first_non_finite(flat: Tensor, specs: Fragment | Sequence[ParameterSpec]) -> str | None:
    """The name of the first of ``specs`` with NaN or Inf in ``flat``; None when all are finite."""
    if is_finite(flat):
        return None
    named = specs.parameters if isinstance(specs, Fragment) else specs
    parts = zip(named, split(flat, [spec.shape for spec in named]), strict=True)
    return next(spec.name for spec, part in parts if not bool(torch.isfinite(part).all()))


def digest(flat: Tensor) -> bytes:
    """32 bytes that name a tensor's exact bits: BLAKE3 over its little-endian float32 bytes.

    A tree over pieces of 1 KiB: they go through the lanes of vectors side by side, and through all threads that torch
    may use. 31.5 million values take 16 ms of one core, where blake2b takes 88.
    """
    array = flat.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return blake3(array.view(np.uint8).data, max_threads=torch.get_num_threads()).digest()


def combined_digest(digests: Sequence[bytes]) -> bytes:
    """The anchor's digest, 32 bytes, from its fragments' digests in order, and that of buffers where there are any."""
    if any(len(item) != 32 for item in digests):
        raise ConfigError(f"combined_digest: digests of 32 bytes are wanted, got {[len(item) for item in digests]}")
    return hashlib.blake2b(b"".join(digests), digest_size=32).digest()


def _find(tensors: Mapping[str, Tensor], spec: ParameterSpec) -> Tensor:
    found = tensors.get(spec.name)
    if found is None:
        raise ManifestMismatch(f"the model has no parameter {spec.name}; the run's schema wants {spec.shape}")
    if tuple(found.shape) != spec.shape:
        raise ManifestMismatch(f"{spec.name}: {tuple(found.shape)} here, {spec.shape} in the run; use the run's model")
    return found
