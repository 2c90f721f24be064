"""EF21 and EControl: only compressed changes of the gradient are sent, and both sides add them up."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.compressors.base import About, Compressor, Payload, Shapes, Spelled, add_flat, compress_flat
from decentral.compressors.feedback import DEBT, SENT, Receiving, Sending, State, slot
from decentral.errors import ConfigError

__all__ = ["EF21", "EControl"]

# Shape suffix: N = values of the fragment.

# ---- ef21: changes of the gradient ----
#
# Only the compressed change is sent, and both sides add the changes up.
#
# c = C(g - sent) ; sent = sent + c ; receiver, of each sender: sent = sent + c ; estimate = sent.
#
# ``sent`` is what receivers hold of this peer's gradient, the same bits on both sides. What is compressed shrinks as
# the gradient settles, so a biased compressor converges to the optimum with a constant step, where C(g) alone stalls or
# diverges, however far the peers' gradients lie apart. There is no decay and no constant to choose. The state begins at
# zero on both sides.
#
# Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
# Feedback", 2021, arXiv:2106.05203.


@dataclass(frozen=True, slots=True)
class EF21(Spelled):
    """Both sides remember what was sent so far."""

    name: ClassVar[str] = "ef21"
    about: ClassVar[About] = About(
        layout="sender: sent; receivers: sent",
        biased=False,
        source='Richtarik et al., "EF21", 2021, arXiv:2106.05203',
    )
    sender: ClassVar[tuple[str, ...]] = (SENT,)
    receiver: ClassVar[tuple[str, ...]] = (SENT,)

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress the change since what was sent."""
        sent_N = slot(state, SENT, gradient_N)
        payloads, sent_N = _send_change(compressor, gradient_N.detach() - sent_N, sent_N, shapes)
        return Sending(payloads, {SENT: sent_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """Return the sum of all that this sender sent so far; estimate and state do not share memory."""
        sent_N = slot(state, SENT, arrived_N) + arrived_N
        return Receiving(sent_N, {SENT: sent_N.clone()})


def _send_change(
    compressor: Compressor, change_N: Tensor, sent_N: Tensor, shapes: Shapes
) -> tuple[tuple[Payload, ...], Tensor]:
    """Compress a change; return with it what receivers hold once it is added to ``sent_N``."""
    payloads, sent_N = compress_flat(compressor, change_N, shapes), sent_N.clone()
    add_flat(compressor, sent_N, payloads)
    return payloads, sent_N


# ---- econtrol: changes and a little debt ----
#
# EF21 that also repays its error, a little each round.
#
# d = C(eta * debt + (g - sent)) ; sent = sent + d ; debt = debt + (g - sent) ; receiver, of each sender: sent = sent +
# d.
#
# EF21 follows the gradient but never sends what it missed on the way; EF sends all of it at once, which amplifies
# noise. ``eta`` sets how much of the debt is asked for; 0 is EF21. It must stay below the compressor's contraction:
# behind topk of 64 in 4096, on a constant with half as much noise, the estimate's error is 0.65 of the constant at
# 0.001, 0.95 at 0.01, 1.4 at 0.03, and at 0.1 it diverges; with 256 in 4096 it is 0.50, 0.56, 0.63 and 0.80. No bound
# on how the peers' gradients differ is needed.
#
# Source: Gao, Islamov, Stich, "EControl: Fast Distributed Optimization with Compression and Error Control", 2023,
# arXiv:2311.05645.


@dataclass(frozen=True, slots=True)
class EControl(EF21):
    """``eta`` of the debt is asked for in every round."""

    name: ClassVar[str] = "econtrol"
    about: ClassVar[About] = About(
        layout="sender: debt, sent; receivers: sent",
        biased=False,
        source='Gao et al., "EControl", 2023, arXiv:2311.05645',
    )
    sender: ClassVar[tuple[str, ...]] = (DEBT, SENT)
    eta: float = 0.001

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ConfigError(f"{self}: the share of the debt must be in [0, 1]; 0.001 is usual")

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """Compress the change since what was sent and a share of the debt."""
        debt_N, sent_N = slot(state, DEBT, gradient_N), slot(state, SENT, gradient_N)
        change_N = gradient_N.detach() - sent_N
        payloads, sent_N = _send_change(compressor, change_N + debt_N * self.eta, sent_N, shapes)
        return Sending(payloads, {DEBT: debt_N + (gradient_N.detach() - sent_N), SENT: sent_N})
