"""What a training loop offers to a round, whatever the method: made by the schedule that the shipped one has."""

from __future__ import annotations

import torch

from decentral.consensus.chain import Head
from decentral.replica.contribution import Contribution
from decentral.replica.replica import Replica
from decentral.simulate.training import FlatModel
from decentral.training.schedule import SyncSchedule


def contribution_of(
    replica: Replica, head: Head, fragment: int, local_N: torch.Tensor, *, steps: int, tail: bytes = b""
) -> Contribution:
    """The change to ``local_N`` with all that the method sends beside it; the inner optimizer has no moments."""
    model = FlatModel([local_N if f == fragment else anchor_N for f, anchor_N in enumerate(replica.anchors)])
    schedule = SyncSchedule(1, 0, replica.method, head.hash, len(replica.anchors))
    made = schedule.take(model, fragment, replica.anchors[fragment], head.hash, 1, outer_step=head.outer_step)
    assert made is not None
    beside = {"states": made.states, "summary": made.summary, "tail": tail}
    return Contribution(fragment, head.hash, local_N, made.gradient_N, steps, 1, **beside)
