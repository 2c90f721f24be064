"""The training side of a simulated peer: it steps, contributes and merges exactly when a real one would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
from torch import Tensor

from decentral.node.node import Node
from decentral.rounds.driver import CommittedUpdate
from decentral.rounds.gossip import Gossip
from decentral.simulate.learning.lessons import Lesson
from decentral.training.starting_over import anchors_without_debt
from decentral.training.sync_schedule import SyncSchedule

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


@dataclass(slots=True)
class Pace:
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


class Trainer:
    """The training of one life of one peer. ``take`` its advances; ``run`` it beside the node."""

    def __init__(
        self,
        node: Node,
        model: FlatModel,
        rhythm: SyncSchedule,
        pace: Pace,
        lesson: Lesson,
        note: Note,
        *,
        num_steps: int,
        on_merged: Callable[[CommittedUpdate], None],
    ) -> None:
        self.node, self.model, self.rhythm, self.pace = node, model, rhythm, pace
        self.lesson, self.note, self.num_steps = lesson, note, num_steps
        self.on_merged = on_merged
        self.asleep = False
        self.idle = False
        self.busy_seconds = 0.0
        self._came = anyio.Event()

    def take(self, advance: CommittedUpdate) -> None:
        """The next commit; merged at the next step boundary."""
        self.rhythm.waiting.append(advance)
        self._came.set()
        self._came = anyio.Event()

    async def run(self) -> None:
        """Train until cancelled."""
        gossip = self.node.gossip
        while True:
            seconds = self.pace.next()
            await anyio.sleep(seconds)
            if self.asleep:
                continue
            if not self.idle:
                self._step()
                self.busy_seconds += seconds
            if gossip is None:
                await self._boundary(seconds)
            else:
                await self._gossip(gossip)

    def _step(self) -> None:
        self.num_steps += 1
        for live_N, step_N in zip(
            self.model.fragments, self.lesson.step(self.model.fragments, self.num_steps), strict=True
        ):
            live_N -= step_N
        self.rhythm.stepped()
        self.note("stepped", number=self.num_steps)

    async def _boundary(self, step_seconds: float) -> None:
        if self.idle:
            self.rhythm.overlap = 0  # no inner step comes any more that a merge could wait for
        self._merge()
        due = self.rhythm.due or self.rhythm.due_early(self.node.driver.pressed, step_seconds)
        if not due or self.idle or not await self._contribute() or self.rhythm.overlap:
            return
        with anyio.move_on_after(2.0 * self.node.manifest.swarm.deadline_ceiling):
            while self.rhythm.sent_at is not None:
                came = self._came
                self._merge()
                if self.rhythm.sent_at is not None:
                    await came.wait()

    def _merge(self) -> None:
        while (advance := self.rhythm.mergeable()) is not None:
            self.rhythm.merge(advance, self.model)
            self._tell_given_up()
            self.on_merged(advance)

    async def _contribute(self) -> bool:
        driver, head = self.node.driver, self.node.driver.head
        if head.anchor is None or head.hash != self.rhythm.seen or not driver.is_member or head.final:
            return False
        fragment = head.fragment(self.node.manifest.outer.fragments)
        contribution = self.rhythm.take(self.model, fragment, self.node.replica.anchors[fragment], head.hash, 1)
        if contribution is None:
            await self._start_over(self.rhythm.away_too_long(fragment))
            return False
        offered = await driver.contribute(contribution)
        if not offered:
            self.rhythm.withdrawn()
        return offered

    async def _start_over(self, fragments: list[int]) -> None:
        debts = {str(f): debt_N for f in fragments if (debt_N := self._debt(f)) is not None}
        standing = await anchors_without_debt(self.node, self.rhythm.seen, fragments)
        if standing is not None:
            self.note("away", debts)
            self.rhythm.restart(self.model, standing[0], fragments)
            self._tell_given_up()

    def _tell_given_up(self) -> None:
        for away in self.rhythm.given_up:
            self.note("away", {str(away.fragment): away.dropped_N}, **away.fields())
        self.rhythm.given_up.clear()

    async def _gossip(self, gossip: Gossip) -> None:
        self._merge()
        if self.idle or not self.rhythm.due:
            return
        fragment = gossip.step % self.node.manifest.outer.fragments
        replica = self.node.replica
        slow_N, momentum_N = replica.anchors[fragment], replica.states[fragment]["momentum"]
        mine = self.rhythm.take(self.model, fragment, slow_N, self.node.driver.head.hash, 1)
        if mine is None:  # merges at the run's end passed it by
            self.rhythm.restart(self.model, replica.anchors, range(len(replica.anchors)))
            self._tell_given_up()
            return
        swapped = await gossip.exchange(fragment, -mine.gradient_N, mine.steps, mine.tokens)
        self.rhythm.swapped(self.model, fragment, swapped.after_N)
        kept = {"before": swapped.before_N, "after": swapped.after_N, "momentum": momentum_N}
        self.note(
            "swapped",
            kept | {"delta": -mine.gradient_N},
            round=swapped.step,
            partner=swapped.partner,
            loss=self.lesson.loss(self.model.fragments),
        )

    def carried(self) -> dict[str, Tensor]:
        """What no commit has taken yet, per fragment: local progress and the debt of what was sent by halves."""
        return {str(f): self._carried(f, anchor_N) for f, anchor_N in enumerate(self.node.replica.anchors)}

    def _carried(self, fragment: int, anchor_N: Tensor) -> Tensor:
        debt_N = self._debt(fragment)
        progress_N = anchor_N - self.model.fragments[fragment]
        return progress_N if debt_N is None else progress_N + debt_N

    def _debt(self, fragment: int) -> Tensor | None:
        return self.node.replica.feedback[fragment].get("debt")
