"""EF21: send the compressed change of the gradient, and let both sides add the changes up.

c = C(g - sent) ; sent = sent + c ; receiver, of each sender: sent = sent + c ; estimate = sent.

``sent`` is what receivers hold of this peer's gradient, the same bits on both sides. What is compressed shrinks as the
gradient settles, so a biased compressor converges to the optimum with a constant step, where C(g) alone stalls or
diverges, however far the peers' gradients lie apart. There is no decay and no constant to choose. The state begins at
zero on both sides.

Source: Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
Feedback", 2021, arXiv:2106.05203.
"""
# Shape suffixes: N = values of the fragment.

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.compressors.base import About, Compressor, Method
from decentral.compressors.feedback.base import Receiving, Sending, Shapes, State, add_sent, compress_flat, slot

__all__ = ["EF21", "add_up"]


@dataclass(frozen=True, slots=True)
class EF21(Method):
    """Both sides remember what was sent so far."""

    name: ClassVar[str] = "ef21"
    about: ClassVar[About] = About(
        layout="sender: sent; receivers: sent",
        biased=False,
        source='Richtarik et al., "EF21", 2021, arXiv:2106.05203',
    )
    sender: ClassVar[tuple[str, ...]] = ("sent",)
    receiver: ClassVar[tuple[str, ...]] = ("sent",)

    def send(self, compressor: Compressor, gradient_N: Tensor, state: State, shapes: Shapes) -> Sending:
        """The change since what was sent, compressed."""
        sent_N = slot(state, "sent", gradient_N)
        payloads = compress_flat(compressor, gradient_N.detach() - sent_N, shapes)
        sent_N = sent_N.clone()
        add_sent(compressor, sent_N, payloads)
        return Sending(payloads, {"sent": sent_N})

    def receive(self, arrived_N: Tensor, state: State) -> Receiving:
        """The sum of all that this sender sent so far."""
        return add_up(arrived_N, state)


def add_up(arrived_N: Tensor, state: State) -> Receiving:
    """The receiver's side of mechanisms that send changes; estimate and state do not share memory."""
    sent_N = slot(state, "sent", arrived_N) + arrived_N
    return Receiving(sent_N, {"sent": sent_N.clone()})
