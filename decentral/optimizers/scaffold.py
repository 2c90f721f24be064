"""SCAFFOLD: each inner step is turned from where this peer's data pull to where all data pull.

inner step: g <- g + (c - c_i) ;  at a round: c_i <- mean of the raw g over this peer's inner steps
x <- x - lr*mean(anchor - local) ;  c <- c + K/N (mean(c_i) - c)        K: contributors, N: members of the swarm

Peers with data of their own each drift to their own optimum between two rounds, and the mean of those is not the
optimum of all. c_i is what this peer's data pull by, c what all data do, so the difference takes the drift out.

What differs from the paper. There the new c_i is c_i - c + (x - local)/(H*rate), which for SGD at a constant rate is
the mean of the raw gradients; here it is that mean for every inner optimizer and schedule. Gradients are those that the
loop clipped. The paper's c gains 1/N of each contributor's change of c_i: it is the mean of all c_i only while nobody
joins, leaves or compresses: what is wrong once then turns every step for ever. Here each sends c_i whole, and K/N of c
is replaced: the same where all members contribute, and otherwise a moving mean that forgets. c counts by all N and x by
the K who came, as there; N are the members of the epoch that the record names, so who left counts until its lease ends.
The paper turns by the newest c; here by the c of the round that booked c_i. Both shrink as training goes on, and their
difference need not: of three peers on a quadratic one came back after three rounds, and the loss of that round was .032
and with the newest c .043. So a newcomer is not turned before its first round is over; the paper turns it by all of c.
Gradients before a commit that passed this peer by are of another anchor than the others', and leave the mean.

Each fragment's gradients are copied in every inner step. One process a peer: the turn is where its swarm side is.

Source: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020, arXiv:1910.06378.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import CHANGE, Channel, Live, OuterMethod, Preset, RoundInfo, State, rate
from decentral.optimizers.steps import sgd

__all__ = ["Scaffold"]

# ``own``: "turn" c - c_i (N,) ; "sum" of raw gradients since the last booking (N,) ; "steps" behind it (1,)


@dataclass(frozen=True, slots=True)
class Scaffold(OuterMethod):
    """Plain averaging at lr = 1 of steps that control variates turn; state {"control": (N,)}, the paper's c."""

    name: ClassVar[str] = "scaffold"
    by_gradients: ClassVar[bool] = True
    equation: ClassVar[str] = (
        "inner: g <- g + c - c_i ; x <- x - lr*mean(anchor - local) ; c <- c + K/N (mean(c_i) - c)"
    )
    source: ClassVar[str] = 'Karimireddy et al., "SCAFFOLD", 2020, arXiv:1910.06378'
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="bf16", exchange="reduce")
    lr: float = rate(1.0)

    def channels(self) -> tuple[Channel, ...]:
        """The change, and c_i."""
        return CHANGE, Channel("control")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No pull is known yet."""
        return {"control": torch.zeros_like(anchor)}

    def before_inner_step(self, live: Live, fragment: int) -> None:
        """Note the raw gradient, then turn it."""
        gradient_N, own = live.read_gradient(fragment), live.own(fragment)
        if gradient_N is None:
            return
        own["sum"] = own["sum"] + gradient_N if "sum" in own else gradient_N
        own["steps"] = own.get("steps", gradient_N.new_zeros(1)) + 1
        if "turn" in own:
            live.add_to_gradient(fragment, own["turn"])

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """c_i."""
        pull_N = _mean_pull(live.own(fragment))
        return {} if pull_N is None else {"control": pull_N}

    def after_commit(self, live: Live, fragment: int, state: State, sent: State | None, peers: Sequence[bytes]) -> None:
        """From now on turn by what was sent and what came of it; gradients of steps since then are the next round's."""
        own, pull_N = live.own(fragment), _mean_pull(sent or {})
        if sent is None:
            self.progress_lost(live, fragment)
        elif pull_N is not None:
            own["turn"] = state["control"] - pull_N
            own["sum"], own["steps"] = own["sum"] - sent["sum"], own["steps"] - sent["steps"]

    def progress_lost(self, live: Live, fragment: int) -> None:
        """The gradients were of steps that count for nothing."""
        live.own(fragment).pop("sum", None)
        live.own(fragment).pop("steps", None)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x by those who came, c by all members."""
        came = len(info.contributors)
        share = came / max(came, info.members, 1)
        with torch.no_grad():
            control_N = state["control"] + (received["control"] - state["control"]) * share
            return sgd(anchor, received["change"], self.lr), {"control": control_N}


def _mean_pull(own: State) -> Tensor | None:
    """The mean raw gradient; None while there is none."""
    return own["sum"] / own["steps"] if "sum" in own and bool(own["steps"] > 0) else None
