"""No feedback: what a compressor drops is gone for good."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.compressors.base import About, Compressor, Method
from decentral.compressors.feedback.base import Receiving, Sending, Shapes, State, compress_flat

__all__ = ["NoFeedback"]


@dataclass(frozen=True, slots=True)
class NoFeedback(Method):
    """``send C(g)``; for compressors without bias, or with so little that it does not matter."""

    name: ClassVar[str] = "none"
    about: ClassVar[About] = About(layout="no state", biased=True, source="-")
    sender: ClassVar[tuple[str, ...]] = ()
    receiver: ClassVar[tuple[str, ...]] = ()

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """The gradient, compressed."""
        return Sending(compress_flat(compressor, gradient_N.detach(), shapes), {})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """What arrived."""
        return Receiving(arrived_N, {})
