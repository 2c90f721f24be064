"""EControl: EF21 that also repays its error, a little each round.

d = C(eta * debt + (g - sent)) ; sent = sent + d ; debt = debt + (g - sent) ; receiver, of each sender: sent = sent + d.

EF21 follows the gradient but never sends what it missed on the way; EF sends all of it at once, which amplifies
noise. ``eta`` sets how much of the debt is asked for; 0 is EF21. It must stay below the compressor's contraction:
behind topk of 64 in 4096, on a constant with half as much noise, the estimate's error is 0.65 of the constant at
0.001, 0.95 at 0.01, 1.4 at 0.03, and at 0.1 it diverges; with 256 in 4096 it is 0.50, 0.56, 0.63 and 0.80. No bound
on how the peers' gradients differ is needed.

Source: Gao, Islamov, Stich, "EControl: Fast Distributed Optimization with Compression and Error Control", 2023,
arXiv:2311.05645.
"""
# Shape suffixes: N = values of the fragment.

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.compressors.base import About, Compressor, Method
from decentral.compressors.feedback.base import Receiving, Sending, Shapes, State, add_sent, compress_flat, slot
from decentral.compressors.feedback.ef21 import add_up
from decentral.errors import ConfigError

__all__ = ["EControl"]


@dataclass(frozen=True, slots=True)
class EControl(Method):
    """``eta`` of the debt is asked for in every round."""

    name: ClassVar[str] = "econtrol"
    about: ClassVar[About] = About(
        layout="sender: debt, sent; receivers: sent",
        biased=False,
        source='Gao et al., "EControl", 2023, arXiv:2311.05645',
    )
    sender: ClassVar[tuple[str, ...]] = ("debt", "sent")
    receiver: ClassVar[tuple[str, ...]] = ("sent",)
    eta: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ConfigError(f"{self}: the share of the debt must be in [0, 1]; 0.001 is usual")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """The change since what was sent and a share of the debt, compressed."""
        debt_N, sent_N = slot(state, "debt", gradient_N), slot(state, "sent", gradient_N)
        change_N = gradient_N.detach() - sent_N
        payloads = compress_flat(compressor, change_N + debt_N * self.eta, shapes)
        sent_N = sent_N.clone()
        add_sent(compressor, sent_N, payloads)
        return Sending(payloads, {"debt": debt_N + (gradient_N.detach() - sent_N), "sent": sent_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """The sum of all that this sender sent so far."""
        return add_up(arrived_N, state)
