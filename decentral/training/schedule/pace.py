"""How many inner steps this peer makes before it contributes: H, or fewer where it is slower than the others.

equal    H steps of every peer; who is slow is waited for until the deadline, or is late
speed    min(H, T / s): T, the seconds that the typical peer takes for H steps; s, those of one inner step here
clock    min(H, T / s): T, ``inner.seconds``: rounds begin at even times, with what each has learnt by then

T of ``speed`` is the lower median over all members, this one included, of what their offers have shown
(`decentral/consensus/paces.py`): half of the peers make all of their steps, and one that lies hurries nobody who has
two honest ones beside it. It is never below a sixteenth of H, as weights are never below a sixteenth of the typical.

Sources: steps by speed, as DyLU of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
arXiv:2401.09135, which takes the fastest worker for T; peers that arrive together, Li et al., "FedCompass", 2023,
arXiv:2309.14675, where a server assigns the steps; fixed times, Fraboni et al., "A General Theory for Federated
Optimization with Asynchronous and Heterogeneous Clients Updates" (FedFix), 2022, arXiv:2206.10189.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from decentral.manifest.training_terms import Inner

TOLERANCE = 0.1  # share by which a peer may be slower and still makes all steps: as much do equal machines vary
SLOWEST = 16  # times slower than typical, beyond which a peer makes no fewer steps yet
KNOWN = 3  # inner steps of which one in the middle is this peer's speed; before them it makes all steps
USUAL = 31  # inner steps whose median is this peer's speed: an evaluation between two of them does not move it


def lengthening(interval: int, paced: int, steps: float) -> float:
    """What the change of a slow peer that is in time is multiplied by: all inner steps count alike in a mean by tokens
    then, H sum(change_i) / sum(steps_i). FedNova's normalisation, see `absence`.

    ``interval``: steps of a full contribution; ``paced``: those after which this peer makes one, 0: all; ``steps``:
    behind it, per fragment. By the pace, and not by H over its steps alone: of P fragments the first cycle has H / P
    steps and more at every peer, however fast.
    """
    if not 0 < paced < interval:
        return 1.0
    return max(1.0, min(float(SLOWEST), interval / paced, interval / max(steps, 1 / interval)))


class Pace:
    """One peer's."""

    def __init__(self, inner: Inner, full: int, least: int) -> None:
        """``full``: inner steps of a full contribution, ``least``: of any."""
        self._kind, self._clock = inner.pace or "equal", inner.seconds
        self._full, self._least = full, min(full, max(least, math.ceil(full / SLOWEST)))
        self._seconds: deque[float] = deque(maxlen=USUAL)

    def stepped(self, seconds: float) -> None:
        """An inner step took so long."""
        self._seconds.append(seconds)

    def steps(self, others: Sequence[float]) -> int:
        """Inner steps after which to contribute; ``others``: seconds of a full contribution of the other members."""
        if len(self._seconds) < KNOWN:
            return self._full
        step = statistics.median(self._seconds)
        target = self._target(others, step * self._full)
        if target is None or target >= step * self._full * (1 - TOLERANCE):
            return self._full
        return max(self._least, math.floor(target / step))

    def _target(self, others: Sequence[float], own: float) -> float | None:
        """T; None: nothing is known that would call for fewer steps."""
        if self._kind == "clock":
            return self._clock
        if self._kind == "equal" or not others:
            return None
        return statistics.median_low([*others, own])
