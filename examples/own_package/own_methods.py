"""A compressor and an outer method of one's own: copy the one that you need. ``train.py`` beside it uses both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from decentral import ConfigError
from decentral.coding import Floats, Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, check_input, check_parts, require
from decentral.optimizers import OuterMethod, key, rate

# Shape suffix: N = elements of the tensor, or of the fragment.


@dataclass(frozen=True, slots=True)
class Coarse(Method):
    """The nearest of ``2 * levels + 1`` multiples of a power of two; the largest magnitude is about the last of them.

    A power of two, so that every product is exact, and what was not sent is known to the last bit.
    """

    name: ClassVar[str] = "coarse"
    about: ClassVar[About] = About(layout="codes uint8 (N), one exponent", biased=True, source="an example")
    levels: int = 7

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"{self}: levels must be from 1 to 127; 7 is usual")

    def layout(self, shape: tuple[int, ...]) -> tuple[PartSpec, ...]:
        """A number from 0 to 2 * levels for each value, and the exponent of the step."""
        bits = (2 * self.levels).bit_length()
        codes = PartSpec("codes", torch.uint8, (math.prod(shape),), Symbols(bits))
        return (codes, PartSpec("exponent", torch.float32, (1,), Floats()))

    def compress_one(self, tensor: Tensor) -> Payload:
        """Codes and the exponent; nothing leaves the tensor's device."""
        value_N = check_input(tensor).flatten()
        largest = value_N.abs().amax(dim=0, keepdim=True) if value_N.numel() else value_N.new_zeros(1)
        exponent = torch.log2(largest.double() / self.levels).ceil().clamp(-126, 120)  # of zeros: the least
        code_N = (value_N.double() * torch.exp2(-exponent)).round().clamp(-self.levels, self.levels) + self.levels
        return Payload(tuple(tensor.shape), (code_N.to(torch.uint8), exponent.float()))

    def decompress_one(self, payload: Payload) -> Tensor:
        """What the codes stand for. A stranger sent them: what they may be is checked first."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, exponent = payload.parts
        is_whole = (exponent.abs() <= 126) & (exponent % 1 == 0) & (exponent <= 120)
        require(is_whole.all() & (code_N <= 2 * self.levels).all(), self, "codes and exponent are in their ranges")
        return ((code_N.double() - self.levels) * torch.exp2(exponent.double())).float().reshape(payload.shape)


@dataclass(frozen=True, slots=True)
class OuterLion(OuterMethod):
    """Outer steps of one length: only the sign of what the peers agree on counts; state {"momentum": (N,)}.

    x <- x - lr*sign(blend*m + (1-blend)*g) ;  m <- mu*m + (1-mu)*g

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675 (Lion, as inner
    optimizer; between peers it is an example, and no recommendation).
    """

    name: ClassVar[str] = "outer_lion"
    equation: ClassVar[str] = "x <- x - lr*sign(blend*m + (1-blend)*g) ; m <- mu*m + (1-mu)*g"
    source: ClassVar[str] = 'Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, arXiv:2302.06675'
    lr: float = rate(0.01)
    momentum: float = key(0.95, "of the moving average", within="[0, 1)")
    blend: float = key(0.9, "weight of the moving average in a step", within="[0, 1)")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: dict[str, Any], state: dict[str, Tensor], info: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next anchor and state, new tensors: products and sums apart, as fusing them is the machine's choice."""
        change_N, momentum_N = received["change"], state["momentum"]
        with torch.no_grad():
            direction_N = (momentum_N * self.blend + change_N * (1 - self.blend)).sign()
            kept_N = momentum_N * self.momentum + change_N * (1 - self.momentum)
            return anchor - direction_N * self.lr, {"momentum": kept_N}
