"""Putting a live model back to the anchor: after an absence, or after NaN where the user asked for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.consensus.chain import Digest
from decentral.node.node import Node
from decentral.parameters.sharding import local_part
from decentral.replica.replica import OWED
from decentral.tensors.ops import is_finite

RESTARTS = 3  # after NaN, without a commit that names this peer in between: then the settings are wrong, not a batch


@dataclass(frozen=True, slots=True)
class FreshStart:
    """What a live model that starts over becomes."""

    anchors: list[Tensor]
    buffers_B: Tensor | None  # None: each peer has its own, or there are none
    debts: dict[int, Tensor]  # by fragment, what was owed of this peer's progress and is no more


async def anchors_without_debt(node: Node, seen: Digest, fragments: Sequence[int]) -> FreshStart | None:
    """Drop what ``fragments`` owe of this peer's progress, and return where to start, as it is after the record
    ``seen``. None: the chain moved.

    To be run on the swarm's loop, where no commit can come in between, with nothing of this peer's in flight.
    """
    if node.driver.head.hash != seen or node.driver.pending is not None:
        return None
    feedback, debts = node.replica.feedback, {}
    for fragment in fragments:
        if (debt_N := feedback[fragment].get("debt")) is not None:
            debts[fragment] = debt_N
        owed_N = node.replica.owed(fragment)  # as an owner of a reduce: the progress of others, which nobody else has
        feedback[fragment] = {} if owed_N is None else {OWED: owed_N}
    return FreshStart(list(node.replica.anchors), node.replica.shared_buffers(0), debts)


def forget_non_finite(
    optimizer: torch.optim.Optimizer, agree: Callable[[list[int]], list[int]] = lambda found: found
) -> int:
    """Drop an inner optimizer's state of every parameter where it holds NaN or Inf; returns of how many.

    Such moments would make the parameter NaN again at the next step. It starts anew there, as a joiner does everywhere.
    ``agree``: among the processes of a peer, each of which holds a part of a parameter's state.
    """
    held = list(optimizer.state.items())
    found = [int(any(isinstance(one, Tensor) and _is_poisoned(one) for one in state.values())) for _, state in held]
    poisoned = [parameter for (parameter, _), is_poisoned in zip(held, agree(found), strict=True) if is_poisoned]
    for parameter in poisoned:
        del optimizer.state[parameter]
    return len(poisoned)


def _is_poisoned(value: Tensor) -> bool:
    return value.is_floating_point() and not is_finite(local_part(value))
