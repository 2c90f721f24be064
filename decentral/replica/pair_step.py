"""The arithmetic of one gossip step: what a peer sends, and what it makes of what came. Pure: the caller books.

A half of a swap is the method's channels in one body. One method sends its change, and slow weights beside it; another
sends one vector, where it would go alone, and its change stays at home, exact. A change that is sent is a flow: what
compression loses of it is owed, booked when both have committed, and sent with the next one. Over a pair, what both
apply and what both owe afterwards is what both changed and owed before. Parameters are a state: what is lost of them is
no progress, and feeding it back would move them; but the pull towards the pair's mean sees nothing else, so replicas
come no closer than the codec's error. `check_methods` refuses the coarse ones: relative to the weights, eight replicas
that began 0.2 apart were 0.005 apart after 120 steps with fp16, 0.01 with int8, 0.02 with fp8, 0.05 to 0.1 with int4
and nf4, and further apart than at the beginning with sign, with topk and with every other sparsifier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.optimizers import Channel, RoundInfo
from decentral.parameters import digest
from decentral.replica.contribution import Contribution
from decentral.replica.replica import Replica
from decentral.replica.weights import Unusable, make_step
from decentral.wire.keys import PeerId

# Shape suffixes: N = elements of one fragment, C = channels, K = peers of the pair that came; flat float32.


@dataclass(frozen=True, slots=True)
class GossipStep:
    """The outcome of a gossip step on one fragment; the last fields are known once it is booked."""

    fragment: int
    step: int
    before_N: Tensor
    after_N: Tensor
    state: dict[str, Tensor]
    feedback: dict[str, Tensor]
    digest: bytes  # of after_N
    disagreement: float | None = None  # of the replicas, rms of (ours - theirs) over rms of ours; None: taken alone
    unmoved: str = ""  # why nothing moved, and what was learnt for it is given up; "": it did
    partner: PeerId | None = None  # None: taken alone
    matched: bool = True  # whether this peer was to meet one; False: nobody meets, or their number is odd
    buffers_B: Tensor | None = None  # what the live buffers become; None: they stay


def encode_half(replica: Replica, mine: Contribution) -> Tensor:
    """Encode what a peer sends of its contribution; return it as the partner decodes it, (C, N).

    Raises NonFiniteError when the change holds NaN or Inf.
    """
    encode(replica, mine)
    return decode_half(replica, mine)


def encode(replica: Replica, mine: Contribution) -> None:
    """Encode what a peer sends of its contribution. Raises NonFiniteError when the change holds NaN or Inf."""
    first_N = _first(replica, mine.fragment, mine.gradient_N)
    books, shapes = replica.feedback[mine.fragment], replica.shapes(mine.fragment)
    mine.encoded = replica.codec.encode(first_N, books, shapes, mine.states)


def decode_half(replica: Replica, mine: Contribution) -> Tensor:
    """Return what was encoded as the partner decodes it, (C, N)."""
    assert mine.encoded is not None
    channels = 1 + len(mine.states)
    return replica.codec.decompress(mine.encoded.payloads, channels).view(channels, -1)


def step_together(replica: Replica, step: int, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor) -> GossipStep:
    """Make the step of a pair; addition of two commutes bit for bit, so both sides get the same mean.

    ``mine_CN``: of `encode_half`, whose feedback is booked if, and only if, the pair is made.
    """
    assert mine.encoded is not None
    due = replica.due(step)
    pairs = list(zip(due, mine_CN, theirs_CN.view(len(due), -1), strict=True))
    received = {one.name: _combine_pair(one, torch.stack([mine_N, theirs_N])) for one, mine_N, theirs_N in pairs}
    if due[0].is_replica:
        received["change"] = mine.gradient_N
    apart = [_disagreement(mine_N, theirs_N) for one, mine_N, theirs_N in pairs if one.is_replica]
    return _step(replica, mine.fragment, step, received, mine.encoded.feedback, apart[0] if apart else None)


def step_alone(replica: Replica, step: int, mine: Contribution) -> GossipStep:
    """Make the step of a peer whose pair was not made: nothing needs compressing, so it takes all it owes, too."""
    due, fragment = replica.due(step), mine.fragment
    whole_N, feedback = replica.codec.all_of(mine.gradient_N, replica.feedback[fragment], replica.shapes(fragment))
    rows = zip(due, (_first(replica, fragment, whole_N), *mine.states), strict=True)
    received = {channel.name: _combine_pair(channel, sent_N[None]) for channel, sent_N in rows}
    if due[0].is_replica:
        received["change"] = whole_N
    return _step(replica, fragment, step, received, feedback, None)


def install(replica: Replica, taken: GossipStep) -> None:
    """Make a gossip step this replica's state."""
    fragment = taken.fragment
    replica.anchors[fragment], replica.states[fragment] = taken.after_N, taken.state
    replica.feedback[fragment], replica.digests[fragment] = taken.feedback, taken.digest


def stay(replica: Replica, fragment: int, step: int, why: str, disagreement: float | None = None) -> GossipStep:
    """Make the step of a peer whose replica stays as it is."""
    slow_N, books, state = replica.anchors[fragment], replica.feedback[fragment], replica.states[fragment]
    return GossipStep(fragment, step, slow_N, slow_N, state, books, replica.digests[fragment], disagreement, why)


def _first(replica: Replica, fragment: int, change_N: Tensor) -> Tensor:
    """Return what the first channel holds."""
    method = replica.method
    if not method.channels()[0].is_replica:
        return change_N
    return method.proposal(replica.anchors[fragment], change_N, replica.states[fragment])


def _disagreement(mine_N: Tensor, theirs_N: Tensor) -> float:
    size = mine_N.norm()
    return float((mine_N - theirs_N).norm() / size) if size > 0 else 0.0


def _combine_pair(channel: Channel, sent_KN: Tensor) -> Tensor:
    if channel.combine == "each":
        return sent_KN
    return sent_KN[0] if len(sent_KN) == 1 else (sent_KN[0] + sent_KN[1]) * 0.5


def _step(
    replica: Replica,
    fragment: int,
    step: int,
    received: dict[str, Tensor],
    feedback: dict[str, Tensor],
    disagreement: float | None,
) -> GossipStep:
    before_N = replica.anchors[fragment]
    of_model = replica.schema.fragments[fragment]
    info = RoundInfo(step // len(replica.anchors), shapes=of_model.shapes, names=of_model.names)
    old = replica.states[fragment]
    try:
        after_N, state = make_step(lambda: replica.method.outer_step(before_N, received, old, info), before_N, old)
    except Unusable as error:  # what came cannot be used, and neither can what would be owed after it
        return stay(replica, fragment, step, str(error), disagreement)
    return GossipStep(fragment, step, before_N, after_N, state, feedback, digest(after_N), disagreement)
