"""What a peer that was away may bring back: as much as it would have sent in one round, or nothing.

Progress is measured from an anchor. While a peer is away (paused, out of upload, cut off, asleep, too slow) the others
move that anchor, in the same direction as a rule, so its own progress is applied a second time when it is carried on to
the new one. Three DiLoCo peers on a quadratic, one of them away (largest ratio of the anchor's loss to its loss had the
peer stayed away, over conditions and noise): after 1, 2, 3, 6, 10 missed rounds 3.0, 2.4, 1.3, 6.2, 89 when all is
carried; 1.2, 1.2, 1.2, 4.4, 1.2 when it counts as one contribution of H steps; 1.0 when it is dropped. Hence both
bounds: up to ``ROUNDS`` missed rounds it is scaled to H steps, beyond them it is dropped with its debt. So is what took
more than as many rounds of inner steps, by a peer that trained on while one slow round passed: scaled to H steps of a
thousand it would only dilute the others' mean (a ratio of 2.4 through real peers). Where no round passed a peer by, its
progress is of the present anchor, and is shortened to its usual norm.

Scaling by steps is the normalisation of Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization" (FedNova), 2020, arXiv:2007.07481, for peers that made more steps than the others.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["NORM", "ROUNDS", "Away", "Progress", "share_of"]

ROUNDS = 2  # outer steps of a fragment that may pass a peer by before its progress is dropped; evidence above
NORM = 4.0  # times its usual norm, beyond which a peer's progress after an absence is dropped, too
USUAL = 9  # contributions in time whose median is the usual norm: odd, and a few minutes of a run


@dataclass(slots=True)
class Progress:
    """What the live parameters of one fragment have learnt that no commit accounts for."""

    steps: int = 0  # inner steps since a commit named a contribution
    missed: int = 0  # outer steps of the fragment that passed by since then
    undrawn: int = 0  # inner steps before, behind parameters that contributions did not speak of: about, and at most
    overdue: int = 0  # outer steps that passed by then, one of all parameters among them
    rounding_N: Tensor | None = None  # live parameters as written, less what was to be written; None: no difference
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))  # of one round, when sent in time

    @property
    def behind(self) -> int:
        """Inner steps behind the oldest of it."""
        return self.steps + self.undrawn

    @property
    def usual_norm(self) -> float | None:
        """Median norm of a round's progress, of this peer's contributions in time; None while none moved anything."""
        return statistics.median_low(self.norms) if self.norms else None

    def given_up(self) -> None:
        """The live parameters are put to the anchor."""
        self.steps = self.missed = self.undrawn = self.overdue = 0

    def memory(self) -> dict[str, Any]:
        """What a restart has to know, as JSON; the rounding is a tensor of the checkpoint."""
        names = ("steps", "missed", "undrawn", "overdue")
        return {**{name: getattr(self, name) for name in names}, "norms": list(self.norms)}

    @classmethod
    def recalled(cls, memory: Mapping[str, Any], rounding_N: Tensor | None) -> Progress:
        """The progress that ``memory`` tells of."""
        norms = deque((float(norm) for norm in memory["norms"]), maxlen=USUAL)
        undrawn, overdue = (int(memory.get(name, 0)) for name in ("undrawn", "overdue"))  # an older one has none
        return cls(int(memory["steps"]), int(memory["missed"]), undrawn, overdue, rounding_N, norms)


@dataclass(frozen=True, slots=True)
class Away:
    """What came of one fragment's progress after an absence."""

    fragment: int
    missed: int  # outer steps of the fragment that passed by
    steps: int  # inner steps made
    counted: int  # inner steps that the contribution stands for; 0: dropped, the fragment starts from the anchor
    dropped_N: Tensor  # progress that is given up, flat float32, a descent direction

    def sentence(self) -> str:
        """For people."""
        passed = f"{self.missed} round{'s' if self.missed != 1 else ''} passed by: "
        if self.counted:
            return f"{passed}{self.steps} inner steps count as {self.counted}"
        return f"{passed}{self.steps} inner steps are dropped, training goes on from the anchor"

    def fields(self) -> dict[str, object]:
        """As an event tells it."""
        return {"fragment": self.fragment, "missed": self.missed, "steps": self.steps, "counted": self.counted}


def share_of(
    progress: Progress, norm: float, *, whole: int, held: int, overdue: int, stale: int = ROUNDS, rounds: int = 1
) -> float:
    """The share of a fragment's progress that may be sent: 1 for a peer that was not away, 0 when it is to be dropped.

    Args:
        progress: steps, missed rounds and usual norm of the fragment.
        norm: of its pseudo-gradient.
        whole: H, the inner steps between two outer steps of one fragment.
        held: inner steps made while a contribution was due and could not be sent.
        overdue: outer steps that passed by what is to be sent; 0: none, or only such as drew other parameters.
        stale: outer steps of the fragment that may pass by before it is dropped.
        rounds: that are behind what is sent as a rule: more than one where a method draws parameters.

    """
    if progress.missed > stale or (progress.missed and progress.steps > (stale + 1) * whole):
        return 0.0
    if not overdue and (progress.missed or held < whole):
        return 1.0
    each, by_steps = progress.usual_norm, min(1.0, rounds * whole / max(1, progress.behind))
    usual = None if each is None else each * rounds
    if not overdue:
        return by_steps if usual is None else min(1.0, usual / max(norm, usual))
    if each is not None and norm > NORM * each * max(rounds, 1 + progress.undrawn / whole):
        return 0.0
    return by_steps if usual is None or norm * by_steps <= usual else usual / norm
