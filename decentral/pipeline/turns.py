"""The order in which the stages of one replica work through the micro-batches of a step, and how long that takes.

A stage goes forward with the next micro-batch, as long as it holds the activations of fewer than 1 + L (S - s - 1),
stage s of S, or else back with the next; where what one of the two takes is not here, the other. Where lines take no
time that is 1F1B with L = 1, the papers' own; at L = 2 each second one may be under way, and at L = 6 a line of 20
Mbit/s and 25 ms is full. In the papers' fixed order a gradient that is here waits for states that are not: 0.12 s of a
step of 1.7 on such lines. Back first, the next stage waits for states that are here. Forward and back it is micro-batch
after micro-batch in any case, and all gradients of a step are of the same parameters: sums have the same bits, nothing
is stale, and a step ends with a flush.

    share of the time in which a stage works, all alike: M / (M + S - 1)

Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019; with a flush: "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, arXiv:2104.04473.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from decentral.wire.groups import MOST_MICRO_BATCHES

__all__ = ["FAR", "NEAR", "StageSpeed", "Turn", "Turns", "busy_share", "count_micro_batches", "step_seconds"]

MICRO_BATCHES = 4  # times the stages: then a stage works in four fifths of the time
NEAR, FAR = 2, 6  # micro-batches forward for each stage to come, before the first goes back: at home, and elsewhere
_NOTHING = 1e-6  # s that a body takes at least on a line


@dataclass(frozen=True, slots=True)
class Turn:
    """A piece of work of one stage: forward with a micro-batch, or back."""

    forward: bool
    micro: int


class Turns:
    """The turns of one stage in a step that it has not taken."""

    def __init__(self, stage: int, stages: int, micro_batches: int, lead: int = NEAR) -> None:
        """``lead``: L above."""
        self._most, self._count = 1 + lead * (stages - stage - 1), micro_batches
        self._forward = self._back = 0

    def next(self) -> list[Turn]:
        """Return those that may be taken now, first the one that goes before others; none at the end of the step."""
        turns = [Turn(True, self._forward)] if self._forward < min(self._count, self._back + self._most) else []
        if self._back < self._forward:
            turns.append(Turn(False, self._back))
        return turns

    def take(self, turn: Turn) -> None:
        """Note that one was taken."""
        self._forward += turn.forward
        self._back += not turn.forward


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
    send: float = 0.0  # that its line is busy with what goes to, or comes from, a neighbour; both share each direction
    latency: float = 0.0  # from the last byte's leaving to its arrival


def step_seconds(stages: Sequence[StageSpeed], micro_batches: int, lead: int = NEAR) -> float:
    """Return the seconds from a step's first forward turn to its last backward one.

    What goes to both neighbours of a stage shares its uplink, what comes from both its downlink, as connections do.
    """
    count = len(stages)
    left = [Turns(stage, count, micro_batches, lead) for stage in range(count)]
    here = {(0, Turn(True, micro)) for micro in range(micro_batches)}
    here |= {(count - 1, Turn(False, micro)) for micro in range(micro_batches)}
    computing: dict[int, tuple[float, Turn]] = {}  # of each stage, until when and what
    ways: dict[tuple[int, int], deque[Turn]] = {(s, to): deque() for s in range(count) for to in (s - 1, s + 1)}
    rest = dict.fromkeys(ways, 1.0)  # of the first body of each way, the share that has not left
    arriving: list[tuple[float, int, Turn]] = []
    now = 0.0
    while computing or any(turns.next() for turns in left):
        for stage, speed in enumerate(stages):
            able = [turn for turn in left[stage].next() if stage not in computing and (stage, turn) in here]
            if able:
                left[stage].take(able[0])
                computing[stage] = now + (speed.forward if able[0].forward else speed.backward), able[0]
        paces = _paces(stages, [way for way, bodies in ways.items() if bodies])
        gone = {way: now + rest[way] / pace for way, pace in paces.items()}
        ends = [at for at, _ in computing.values()] + [at for at, _, _ in arriving]
        before, now = now, min((*ends, *gone.values()))
        for way, pace in paces.items():
            rest[way] -= pace * (now - before)
            if gone[way] <= now:
                rest[way] = 1.0
                arriving.append((now + stages[way[0]].latency, way[1], ways[way].popleft()))
        for stage, (at, turn) in list(computing.items()):
            to = stage + 1 if turn.forward else stage - 1
            if at <= now:
                del computing[stage]
                if 0 <= to < count:
                    ways[stage, to].append(turn)
        here |= {(to, turn) for at, to, turn in arriving if at <= now}
        arriving = [one for one in arriving if one[0] > now]
    return now


def _paces(stages: Sequence[StageSpeed], busy: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
    """Return the bodies a second on each way in use: an equal share of the uplink or of the downlink, the smaller."""
    out, into = Counter(stage for stage, _ in busy), Counter(to for _, to in busy)
    seconds = {(s, to): max(out[s] * stages[s].send, into[to] * stages[to].send, _NOTHING) for s, to in busy}
    return {way: 1 / took for way, took in seconds.items()}
