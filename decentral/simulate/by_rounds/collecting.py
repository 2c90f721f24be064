"""When the leader of a round waits no longer, and whose contributions it has then: the rules of ``Readiness``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decentral.consensus.machine import TICK
from decentral.consensus.timing import Deadline
from decentral.simulate.by_rounds.air import Seconds


@dataclass(frozen=True, slots=True)
class LeaderView:
    """What the leader sees of a round: per offer, in any order."""

    opened: float
    heard: Seconds  # when each offer is here
    usable: Seconds  # when what it offers is here, too
    allowed: Seconds  # how long that may be on its way
    awaited: np.ndarray  # whether anybody waits for it: newcomers are not waited for
    missing: float  # until when it waits for members that do not offer at all
    num_present: int  # members that are there, as far as it knows


def collected(seen: LeaderView, deadline: Deadline) -> float:
    """The moment from which a proposal is made; it names what is usable then."""
    first = float(seen.heard.min())
    everybody = max(float(seen.usable[seen.awaited].max(initial=0.0)), float(seen.usable.min()), seen.missing)
    enough = float(np.sort(seen.usable)[max(0, math.ceil(seen.num_present / 2) - 1) :].min(initial=math.inf))
    late = max(deadline.at(seen.opened, first) + TICK / 2, enough)
    last = max(first + deadline.ceiling + TICK / 2, float(seen.usable.min()))
    return _with_what_is_coming(seen, min(everybody, late, last))


def _with_what_is_coming(seen: LeaderView, now: float) -> float:
    """The deadline is for offers: what was offered may still come."""
    until = np.minimum(seen.usable, seen.heard + 2 * seen.allowed)
    while True:
        coming = seen.awaited & (seen.heard <= now) & (seen.usable > now) & (until > now)
        if not coming.any():
            return now
        now = float(until[coming].min())
