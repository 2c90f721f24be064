"""fp16 and bf16: 16-bit floats.

Parts: the values, float16 or bfloat16 (N,). 16 bits per value.
float16 has 11 significant bits in +-65504; bfloat16 has 8 in float32's whole range. Values beyond the range are
sent as its end, never as Inf. Rounding is to nearest, so the error is at most half a unit in the last place: of a
denormal that is 2**-25 for float16, 2**-134 for bfloat16, and may be the value itself.

Source: OpenDiLoCo found no loss from an fp16 all-reduce (Jaghouar et al., "OpenDiLoCo", 2024, arXiv:2407.07852).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.tensors.device import in_slabs, one_kernel
from decentral.tensors.ops import is_finite

__all__ = ["BFloat16", "Float16"]

_HALF_SOURCE = 'Jaghouar et al., "OpenDiLoCo", 2024, arXiv:2407.07852'


@dataclass(frozen=True, slots=True)
class _Half(Method):
    dtype: ClassVar[torch.dtype]

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return one 16-bit part of N values."""
        return (PartSpec("values", self.dtype, (math.prod(shape),), Floats()),)

    def compress_one(self, tensor: Tensor) -> Payload:
        """Round to nearest, within the range."""
        end, value_N = torch.finfo(self.dtype).max, check_input(tensor).flatten()
        half_N = in_slabs(value_N, self.dtype, lambda start, stop: _to_half(value_N[start:stop], end, self.dtype))
        return Payload(tuple(tensor.shape), (half_N,))

    def decompress_one(self, payload: Payload) -> Tensor:
        """Widen to float32, exactly."""
        check_parts(self, payload, self.layout(payload.shape))
        require(is_finite(payload.parts[0]), self, "every value must be finite")
        return payload.parts[0].float().reshape(payload.shape)


@one_kernel
def _to_half(value_N: Tensor, end: float, dtype: torch.dtype) -> Tensor:
    return value_N.clamp(-end, end).to(dtype)


@dataclass(frozen=True, slots=True)
class Float16(_Half):
    """IEEE half precision; values beyond +-65504 are sent as +-65504."""

    name: ClassVar[str] = "fp16"
    dtype: ClassVar[torch.dtype] = torch.float16
    about: ClassVar[About] = About(
        layout="values float16 (N)",
        biased=False,
        source=_HALF_SOURCE,
        bound="|error| <= |value| / 2048 + 2**-25 per value up to 65504",
    )


@dataclass(frozen=True, slots=True)
class BFloat16(_Half):
    """float32 with 8 significant bits: the whole range, three decimal digits fewer."""

    name: ClassVar[str] = "bf16"
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    about: ClassVar[About] = About(
        layout="values bfloat16 (N)",
        biased=False,
        source=_HALF_SOURCE,
        bound="|error| <= |value| / 256 + 2**-134 per value",
    )
