"""Send nothing: for methods whose contributions are made of what peers say of them, see `OuterMethod.rebuilt`.

Parts: none. 0 bits per value. No spelling names it, as a run of any other method would stand still with it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts
from decentral.tensors.memory import fresh_zeros

__all__ = ["Nothing"]


@dataclass(frozen=True, slots=True)
class Nothing(Method):
    """Everything arrives as zero."""

    name: ClassVar[str] = "nothing"
    about: ClassVar[About] = About(layout="nothing", biased=True, source="none")

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """No part."""
        return ()

    def compress(self, tensor: Tensor) -> Payload:
        """What is not finite is refused, as by every compressor."""
        check_input(tensor)
        return Payload(tuple(tensor.shape), (), tensor.device)

    def decompress(self, payload: Payload) -> Tensor:
        """Zeros."""
        check_parts(self, payload, ())
        found = fresh_zeros(torch.Size(payload.shape).numel()).reshape(payload.shape)
        return found.to(payload.device)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """The total stays as it is."""
        check_parts(self, payload, ())
