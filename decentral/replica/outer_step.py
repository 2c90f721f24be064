"""What a commit makes of a replica, before it is installed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decentral.replica.received.estimates import NOTHING_KEPT, KeptOfSenders

# Shape suffixes: N = elements of one fragment, S = places of its sample, B = elements of all buffers; flat float32.


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The result of one commit, not yet installed."""

    fragment: int
    before_N: Tensor
    after_N: Tensor
    state: dict[str, Tensor]
    digest: bytes  # of after_N
    buffers_B: Tensor | None = None  # after it; None: as before
    told: KeptOfSenders = NOTHING_KEPT  # what every receiver keeps of the contributors
    channels: frozenset[str] = frozenset()  # of which something came
    came_S: Tensor | None = None  # where in the fragment's sample the change came, bool; None: it did not
    unmoved: str = ""  # why nothing moved, alike on every peer; "": it did
