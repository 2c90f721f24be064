"""What was found in a checkpoint or a snapshot of a replica, checked, and not yet taken over."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decentral.replica.received.senders import Kept

# Shape suffix: B = elements of all buffers; flat float32.


@dataclass(frozen=True, slots=True)
class Loaded:
    """A replica's tensors, a fragment each."""

    anchors: list[Tensor]
    states: list[dict[str, Tensor]]
    feedback: list[dict[str, Tensor]]  # this peer's own; {} where a snapshot of another is loaded
    senders: list[Kept]
    buffers_B: Tensor
    digests: list[bytes]  # of the anchors
