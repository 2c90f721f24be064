"""The training side of a simulated peer: it steps, contributes and merges exactly when a real one would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import torch
from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.node.node import Node
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.equations import state_name
from decentral.simulate.lessons import Lesson
from decentral.training.outer_loop import LoopControl, LoopParts, OuterLoop
from decentral.training.progress import Away, read_live
from decentral.training.schedule import SyncSchedule
from decentral.training.swarm_side import SameLoop

CHECKPOINT_EVERY = 5  # commits
Note = Callable[..., None]  # event, tensors, fields

# Shape suffix: N = elements of one fragment, flat float32.


class FlatModel:
    """The live parameters, fragment by fragment."""

    def __init__(self, fragments: Sequence[Tensor]) -> None:
        self.fragments = [fragment.clone() for fragment in fragments]

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment."""
        return self.fragments[fragment].clone()

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment."""
        self.fragments[fragment] = flat_N.clone()

    def keeps(self, fragment: int) -> bool:
        """It is float32."""
        return True

    def in_place(self, fragment: int) -> list[Tensor]:
        """All of it."""
        return [self.fragments[fragment]]

    def check_trained(self) -> None:
        """All of it is, always."""

    def read_buffers(self) -> Tensor:
        """It has none."""
        return torch.zeros(0)

    def write_buffers(self, flat_B: Tensor) -> None:
        """It has none."""


@dataclass(slots=True)
class StepPace:
    """Seconds of one inner step: a peer's own speed, a factor per step, and now and then a straggle.

    Sources: proposals of ours, with the tail as in Dean and Barroso, "The Tail at Scale", 2013.
    """

    generator: random.Random
    seconds: float
    jitter: float = 0.0  # sigma of the lognormal factor
    straggles: float = 0.0  # share of steps that take a Pareto(1.3) factor of at most 50

    def next(self) -> float:
        """Seconds that the next step takes."""
        factor = self.generator.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        if self.straggles and self.generator.random() < self.straggles:
            factor *= min(50.0, self.generator.paretovariate(1.3))
        return self.seconds * factor


class TraceEvents:
    """Events of the loop, as entries of the trace."""

    def __init__(self, node: Node, model: FlatModel, lesson: Lesson, note: Note) -> None:
        self._node, self._model, self._lesson, self._note = node, model, lesson, note
        self._before: dict[str, Tensor] = {}  # the gossip step in progress
        self._sent: tuple[Tensor, Tensor] | None = None  # of its change, in a pair and alone

    def waits(self, waiting: bool) -> None:
        """Its clock shows that."""

    def holds(self, seconds: float) -> None:
        """Copying takes none of its time."""

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        """It was noted as it was applied."""

    def swap_begins(self, mine: Contribution) -> None:
        """Note what the checker of pairs needs of before."""
        state = self._node.replica.states[mine.fragment]
        self._before = {state_name(name): one_N for name, one_N in state.items()}
        self._sent = self._as_sent(mine)

    def _as_sent(self, mine: Contribution) -> tuple[Tensor, Tensor]:
        """Return what compression leaves of the change with the residual, and all of both, which a peer alone takes."""
        replica, change_N = self._node.replica, mine.gradient_N
        if replica.method.channels()[0].is_replica:
            return change_N, change_N
        owed, shapes = replica.feedback[mine.fragment], replica.shapes(mine.fragment)
        payloads = replica.codec.encode(change_N, owed, shapes).payloads
        return replica.codec.decompress(payloads), replica.codec.all_of(change_N, owed, shapes)[0]

    def swap_ended(self, outcome: GossipStep) -> None:
        """A gossip step."""
        assert self._sent is not None, "it began"
        change_N = self._sent[0 if outcome.partner else 1]
        tensors = {"before": outcome.before_N, "after": outcome.after_N, "change": change_N, **self._before}
        loss = self._lesson.loss(self._model.fragments)
        self._note("swapped", tensors, round=outcome.step, partner=outcome.partner, loss=loss)

    def branch_left(self, outer_step: int) -> None:
        """The trace has the branch by its records."""

    def away(self, away: Away) -> None:
        """Progress, and with what starts over its debt, that is given up."""
        self._note("away", {str(away.fragment): away.dropped_N}, **away.fields())

    def starts_over(self, why: str) -> None:
        """Nothing here becomes NaN."""
        self._note("restarted", None, why=why)


class Trainer:
    """The training of one life of one peer: ``run`` it beside the node."""

    def __init__(
        self,
        side: SameLoop,
        model: FlatModel,
        schedule: SyncSchedule,
        pace: StepPace,
        lesson: Lesson,
        note: Note,
        save: Callable[[SyncSchedule], bool],
        *,
        is_stage: bool = False,
    ) -> None:
        self.node, self.model, self.schedule, self.pace = side.node, model, schedule, pace
        self.lesson, self.note = lesson, note
        self.num_steps = 0  # a process that goes on for a previous incarnation says from where
        self.asleep = False
        self.busy_seconds = 0.0
        self._control, self._scope, self._ended = LoopControl(), anyio.CancelScope(), anyio.Event()
        self.loop = OuterLoop(
            LoopParts(
                manifest=side.node.manifest,
                tokens_per_step=1,
                checkpoint_every=CHECKPOINT_EVERY,
                on_nan="stop",
                model=model,
                schedule=schedule,
                swarm=side,
                events=TraceEvents(side.node, model, lesson, note),
                control=self._control,
                clock=anyio.current_time,
                save=save,
                is_stage=is_stage,
            )
        )

    @property
    def idle(self) -> bool:
        """Return whether it makes no inner steps any more, and only follows."""
        return self._control.paused

    def rest(self) -> None:
        """Make no inner step any more."""
        self._control.paused = True
        self.schedule.timing.overlap = 0  # no inner step comes that a merge could wait for

    async def run(self) -> None:
        """Train until the run is over, or until stopped."""
        try:
            with self._scope:
                while not self.loop.done:
                    await self._train()
        finally:
            self._ended.set()

    async def stop(self) -> bool:
        """Interrupt it as Ctrl-C does, wherever it is, and wait for what a partner may have taken; False: not known."""
        self._scope.cancel()
        await self._ended.wait()
        return await self.loop.settle()

    async def _train(self) -> None:
        seconds = self.pace.next()
        await anyio.sleep(seconds)
        if self.asleep:
            return
        if not self.idle:
            self._step()
            self.busy_seconds += seconds
        await self.loop.step_boundary()

    def _step(self) -> None:
        self.num_steps += 1
        steps = self.lesson.step(self.model.fragments, self.num_steps, self.schedule.calls.before_step)
        for fragment in self.schedule.part:
            self.model.fragments[fragment] -= steps[fragment]
        self.schedule.stepped()
        self.note("stepped", number=self.num_steps, part=list(self.schedule.part))

    def uncommitted(self) -> dict[str, Tensor]:
        """Return what no commit has taken yet, per fragment: local progress and the debt of what was sent by halves."""
        return {str(f): self._uncommitted(f, anchor_N) for f, anchor_N in enumerate(self.node.replica.anchors)}

    def without_debts(self) -> dict[str, Tensor]:
        """The local progress alone: all that is left when a partner may hold what was owed."""
        anchors = enumerate(self.node.replica.anchors)
        return {f"learnt/{f}": self._learnt(f, anchor_N) for f, anchor_N in anchors}

    def _learnt(self, fragment: int, anchor_N: Tensor) -> Tensor:
        """As if training had gone on where a contribution was taken, which is where a restart goes on from."""
        return anchor_N - read_live(self.model, fragment, self.schedule.progress[fragment])

    def _uncommitted(self, fragment: int, anchor_N: Tensor) -> Tensor:
        debt_N = self.node.replica.feedback[fragment].get(DEBT)
        progress_N = self._learnt(fragment, anchor_N)
        return progress_N if debt_N is None else progress_N + debt_N
