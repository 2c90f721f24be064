"""When the frames of a round are where they must be: lines are shared by all copies that leave a peer at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decentral.simulate.by_rounds.air import Air, Seconds
from decentral.simulate.by_rounds.machine import MachineModel
from decentral.transport.memory import WINDOW
from decentral.wire.frames import HEADER_NBYTES


@dataclass(frozen=True, slots=True)
class MemberLines:
    """Of the members of a round, by their places."""

    up: Seconds  # bytes/s
    down: Seconds
    latency: float

    @classmethod
    def of(cls, machines: Sequence[MachineModel], latency: float) -> MemberLines:
        """Theirs."""
        return cls(np.array([one.up for one in machines]), np.array([one.down for one in machines]), latency)

    def rates(self, streams: int) -> Seconds:
        """Bytes/s that a peer sends on so many streams at once: each has a window."""
        return np.minimum(self.up, max(1, streams) * WINDOW / (2 * self.latency) if self.latency else math.inf)


def gathered(
    lines: MemberLines, air: Air, places: np.ndarray, offered: Seconds, nbytes: float, gone: Seconds
) -> Seconds:
    """When each peer (rows) has the frame of each contributor (columns); never, where its owner goes before.

    ``places``: of the contributors; ``gone``: when each of them is away.
    """
    n, c = len(lines.up), len(places)
    copies = (n - 1) * (HEADER_NBYTES + nbytes)
    sent = offered + copies / lines.rates(n - 1)[places]
    there = sent + air.delays(n, c)
    there = _through(lines.down, there, float(offered.min()), nbytes)
    lost = air.losses(n, c)
    asked = offered + air.delays(n, c) + air.fetches(n, c) + nbytes / lines.up[places]
    there = np.where(lost, np.maximum(asked, there), there)
    there[places, np.arange(c)] = offered
    there[:, sent > gone] = math.inf  # at its owner, too: a commit that names it could not be applied
    return there


def _through(down: Seconds, there: Seconds, began: float, nbytes: float) -> Seconds:
    """Through the receivers' lines: in turn, and not sooner than the line has carried all that came before."""
    order = np.argsort(there, axis=1)
    carried = began + np.arange(1, there.shape[1] + 1) * nbytes / down[:, None]
    found = np.empty_like(there)
    np.put_along_axis(found, order, np.maximum(np.take_along_axis(there, order, axis=1), carried), axis=1)
    return found
