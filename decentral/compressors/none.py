"""Send everything as it is.

Parts: the values, float32 (N,). 32 bits per value, exact.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.tensors.memory import fresh_like
from decentral.tensors.ops import is_finite

__all__ = ["Uncompressed"]


@dataclass(frozen=True, slots=True)
class Uncompressed(Method):
    """The identity: what DiLoCo's paper sends (Douillard et al., 2023, arXiv:2311.08105)."""

    name: ClassVar[str] = "none"
    about: ClassVar[About] = About(
        layout="values float32 (N)",
        biased=False,
        source='Douillard et al., "DiLoCo", 2023, arXiv:2311.08105',
        bound="error = 0",
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """One float32 part of N values."""
        return (PartSpec("values", torch.float32, (math.prod(shape),), Floats()),)

    def compress(self, tensor: Tensor) -> Payload:
        """A copy, so that a payload never changes under its reader."""
        values_N = check_input(tensor).flatten()
        return Payload(tuple(tensor.shape), (fresh_like(values_N).copy_(values_N),))

    def decompress(self, payload: Payload) -> Tensor:
        """The same bits in the same shape."""
        values = self._values(payload)
        return fresh_like(values).copy_(values)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """Straight from the payload."""
        values = self._values(payload)
        total += values if weight == 1 else values * weight

    def _values(self, payload: Payload) -> Tensor:
        check_parts(self, payload, self.layout(payload.shape))
        require(is_finite(payload.parts[0]), self, "every value must be finite")
        return payload.parts[0].reshape(payload.shape)
