"""From a proposal to the commit, and from the commit to everybody."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decentral.consensus.round_state import RESEND_AFTER
from decentral.simulate.by_rounds.air import Air, Seconds


@dataclass(frozen=True, slots=True)
class Proposed:
    """One proposal: when it is made, by which peer, and which vote. Peers by their places."""

    proposed: float
    leader: int
    voters: list[int]
    held: Seconds  # when each peer has all that it names


def committed(ballot: Proposed, air: Air) -> float:
    """When a majority's votes are back."""
    voters = np.array(ballot.voters)
    asked = ballot.proposed + air.messages(len(voters))
    back = np.maximum(asked, ballot.held[voters]) + air.messages(len(voters))
    back[voters == ballot.leader] = max(ballot.proposed, ballot.held[ballot.leader])
    return max(float(np.sort(back)[len(voters) // 2]), float(ballot.held[ballot.leader]))


def applied(ballot: Proposed, air: Air, at: float, offered: Seconds, seats: int) -> Seconds:
    """When each peer goes on: with the commit, and all that it names.

    ``offered``: when it told its own offer, which it repeats until it hears of a commit.
    """
    n = len(offered)
    told = at + air.delays(n) * (1 if n <= seats else 2)
    lost = air.losses(n)
    repeats = offered + RESEND_AFTER * np.ceil(np.maximum(1.0, (at - offered) / RESEND_AFTER)) + 2 * air.delays(n)
    told[lost] = np.maximum(repeats, told)[lost]
    told[ballot.leader] = at
    return np.maximum(told, ballot.held)
