"""What a peer gives up of its own when a commit names a frame that it sent in a previous life.

The feedback to book with a contribution dies with the process that made it. Going on with the older one would send
again what was sent: where our frame has a value it becomes zero, and stays elsewhere, as sparse methods owe it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.replica.replica import Replica
from decentral.tensors.device import beside
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What is left of what this peer owed, not yet booked."""

    feedback: dict[str, Tensor]
    sent_N: Tensor  # bool: where something may have been sent


def forgotten(replica: Replica, record: Record, frames: Mapping[bytes, Frame], me: PeerId) -> Forgotten:
    """What ``me`` owes of the record's fragment once a commit of a lost process is applied. Pure: the caller books.

    All of it goes of a reduce, whose frames are the owners', where receivers remember, and of summaries.
    """
    f, mine = record.fragment, [frames[ref.frame] for ref in record.frames if ref.peer == me]
    unseen = bool(record.contributors) or bool(replica.senders.names) or replica.method.rebuilds
    if unseen or any(frame.header.kind == FrameKind.MERGE for frame in mine):
        return Forgotten({}, torch.ones(replica.numel(f), dtype=torch.bool))
    sent_N = replica.contents.moved(mine, replica.numel(f))
    kept = {name: one_N.masked_fill(beside(sent_N, one_N), 0.0) for name, one_N in replica.feedback[f].items()}
    return Forgotten(kept, sent_N)
