"""The order in which the stages of one replica work through the micro-batches of a step, and how long that takes.

Stage s of S goes forward with 1 + L (S - s - 1) micro-batches; then, as long as there are any, back with one and
forward with the next; then back with the rest (1F1B). A stage so holds the activations of so many, however many there
are. L = 1 is the papers' own, and does where lines take no time; at L = 2 each second one may be under way, and at
L = 4 a line of 20 Mbit/s and 25 ms is full. All gradients of a step are of the same parameters: nothing is stale, and a
step ends with a flush.

    share of the time in which a stage works, all alike: M / (M + S - 1)

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019; with a flush: "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from decentral.wire.groups import MOST_MICRO_BATCHES

__all__ = ["FAR", "NEAR", "StageSpeed", "Turn", "busy_share", "count_micro_batches", "step_seconds", "turns_of"]

MICRO_BATCHES = 4  # times the stages: then a stage works in four fifths of the time
NEAR, FAR = 2, 4  # micro-batches forward for each stage to come, before the first goes back: at home, and elsewhere


@dataclass(frozen=True, slots=True)
class Turn:
    """A piece of work of one stage: forward with a micro-batch, or back."""

    forward: bool
    micro: int


def turns_of(stage: int, stages: int, micro_batches: int, lead: int = NEAR) -> list[Turn]:
    """Return the turns of one stage in a step, in order; ``lead``: L above."""
    ahead = min(1 + lead * (stages - stage - 1), micro_batches)
    order = [Turn(True, micro) for micro in range(ahead)]
    for micro in range(micro_batches):
        order.append(Turn(False, micro))
        if micro + ahead < micro_batches:
            order.append(Turn(True, micro + ahead))
    return order


def count_micro_batches(batch: int, stages: int) -> int:
    """Return into how many equal micro-batches a batch is cut: four times the stages, or the next number that goes."""
    wanted = MICRO_BATCHES * stages
    counts = [count for count in range(1, min(batch, MOST_MICRO_BATCHES) + 1) if batch % count == 0]
    return next((count for count in counts if count >= wanted), counts[-1])


def busy_share(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which equal stages work; the rest is the bubble of filling and emptying."""
    return micro_batches / (micro_batches + stages - 1)


# ---- how long a step takes ----


@dataclass(frozen=True, slots=True)
class StageSpeed:
    """Seconds of one stage and its line, for one micro-batch."""

    forward: float
    backward: float
    send: float = 0.0  # that its uplink is busy with what goes to a neighbour; both neighbours share the uplink
    latency: float = 0.0  # from the last byte's leaving to its arrival


def step_seconds(stages: Sequence[StageSpeed], micro_batches: int, lead: int = NEAR) -> float:
    """Return the seconds from a step's first forward turn to its last backward one."""
    count = len(stages)
    left = [deque(turns_of(stage, count, micro_batches, lead)) for stage in range(count)]
    arrived: dict[tuple[int, Turn], float] = {(0, Turn(True, micro)): 0.0 for micro in range(micro_batches)}
    arrived |= {(count - 1, Turn(False, micro)): 0.0 for micro in range(micro_batches)}
    free, line = [0.0] * count, [0.0] * count
    while any(left):
        for stage, speed in enumerate(stages):
            while left[stage] and (at := arrived.get((stage, left[stage][0]))) is not None:
                turn = left[stage].popleft()
                free[stage] = max(free[stage], at) + (speed.forward if turn.forward else speed.backward)
                to = stage + 1 if turn.forward else stage - 1
                if 0 <= to < count:
                    line[stage] = max(line[stage], free[stage]) + speed.send
                    arrived[to, turn] = line[stage] + speed.latency
    return max(free)
