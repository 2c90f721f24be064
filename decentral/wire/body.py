"""A compressor's parts to the bytes of a body, and back: little-endian, part after part, tensor after tensor.

Crosses the wire: exactly ``nbytes(compressor, shapes)`` bytes, known from the shapes alone. No count, no dtype, no
shape is ever read from a body, so a peer's bytes cannot choose how much is allocated for them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.compressors import Compressor, PartSpec, Payload
from decentral.errors import PayloadError

# Shape suffixes: B = bytes of a part.

Shape = tuple[int, ...]


def nbytes(compressor: Compressor, shapes: Sequence[Shape]) -> int:
    """Exact size of the body of tensors of these shapes."""
    return sum(spec.nbytes for shape in shapes for spec in compressor.layout(shape))


def encode(compressor: Compressor, payloads: Sequence[Payload]) -> bytes:
    """The body of these payloads. Raises PayloadError when a part is not as the compressor's layout says."""
    body = bytearray()
    for payload in payloads:
        layout = compressor.layout(payload.shape)
        found = [(part.dtype, tuple(part.shape)) for part in payload.parts]
        if found != [(spec.dtype, spec.shape) for spec in layout]:
            raise PayloadError(f"encode: parts {found} of {compressor} are not its layout {layout}; nothing was sent")
        for part in payload.parts:
            body += _to_little_endian(part)
    return bytes(body)


def decode(compressor: Compressor, body: bytes | memoryview, shapes: Sequence[Shape]) -> list[Tensor]:
    """The float32 tensors of a body, one per shape, all finite.

    Raises PayloadError when the size is not exact, when the compressor refuses a part, or on NaN and Inf.
    """
    want = nbytes(compressor, shapes)
    if len(body) != want:
        raise PayloadError(f"body of {len(body)} bytes, {compressor} makes {want} of {len(shapes)} tensors; drop it")
    tensors, offset = [], 0
    for shape in shapes:
        parts = []
        for spec in compressor.layout(shape):
            parts.append(_from_little_endian(body[offset : offset + spec.nbytes], spec))
            offset += spec.nbytes
        tensors.append(_finite(compressor.decompress(Payload(shape, tuple(parts))), compressor))
    return tensors


def _finite(tensor: Tensor, compressor: Compressor) -> Tensor:
    """A second guard behind the compressor's own: one NaN in a mean would reach every peer."""
    if not bool(torch.isfinite(tensor).all()):
        raise PayloadError(f"body decodes to NaN or Inf through {compressor}; drop it and its sender")
    return tensor


def _to_little_endian(part: Tensor) -> bytes:
    bytes_B = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(_swapped(bytes_B, part.dtype.itemsize).numpy().data)


def _from_little_endian(data: bytes | memoryview, spec: PartSpec) -> Tensor:
    if not data:  # torch refuses an empty buffer
        return torch.empty(spec.shape, dtype=spec.dtype)
    bytes_B = torch.frombuffer(bytearray(data), dtype=torch.uint8)  # a copy: aligned, and writable as torch wants
    return _swapped(bytes_B, spec.dtype.itemsize).view(spec.dtype).reshape(spec.shape)


def _swapped(bytes_B: Tensor, itemsize: int) -> Tensor:
    """The same bytes on a little-endian machine, each element's reversed on a big-endian one."""
    if sys.byteorder == "little" or itemsize == 1:
        return bytes_B
    return bytes_B.reshape(-1, itemsize).flip(1).reshape(-1)
