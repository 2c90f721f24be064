"""A peer's step boundaries, inside ``optimizer.step``: what happens there, and what all its processes know alike.

Only the main process talks to the swarm. At every boundary it packs what it knows into a few whole numbers, which go
to the others with the fragments that were written; from then on shards, schedules and ``peer.done`` are alike on all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from struct import pack, unpack
from typing import NamedTuple, Self

from decentral.consensus.chain import Head
from decentral.errors import NoPeersError
from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.peer.participation import Participation, PeerLimits
from decentral.peer.saved import LOOK_EVERY
from decentral.peer.settings import Settings
from decentral.peer.shown import Tracked, Trackers
from decentral.quantities import time_left
from decentral.signals import StopSignals
from decentral.tasks.batches import ShardPlace
from decentral.training.clocks import RoundEnded, RunSchedule, Scheduler, StepCount, move_on
from decentral.training.inner import InnerSteps, Stage
from decentral.training.outer_loop import LoopControl
from decentral.training.swarm_side import LoopEnded, run_blocking
from decentral.wire.keys import PeerId

_DIGEST = ">8I"  # 32 bytes as whole numbers


class NewestRound(NamedTuple):
    """The newest round, as ``peer.on_round`` tells of it; bytes are this peer's, since its process began."""

    members: int = 0
    contributed: int = 0  # 1: it has this peer's update
    bytes_sent: int = 0
    bytes_received: int = 0

    @classmethod
    def of(cls, part: Participation) -> Self:
        """Read it from the swarm side."""
        total, node = part.swarm.node.transport.traffic.total, part.swarm.node
        contributed = part.reporter.counters.outcomes[-1:] == [True]
        return cls(len(node.driver.head.members), int(contributed), total.sent, total.received)


@dataclass(frozen=True, slots=True)
class Word:
    """The word of the main process to the others at a boundary, packed as whole numbers below 2**63."""

    forgets: bool = False  # moments that are not finite are to be dropped
    seed: int = 0  # of the peer; 0 before it has entered the run
    place: ShardPlace = field(default_factory=ShardPlace)
    count: tuple[int, ...] = (0, 0, 0, 0)  # as `StepCount.told` gives them
    newest: NewestRound = field(default_factory=NewestRound)
    anchor: bytes = bytes(32)  # digest; kept up to date where there are other processes

    def pack(self) -> tuple[int, ...]:
        """Write it as numbers, as many in every word."""
        place, anchor = (self.place.rank, self.place.count, self.place.steps), unpack(_DIGEST, self.anchor)
        return (int(self.forgets), self.seed, *place, *self.count, *self.newest, *anchor)

    @classmethod
    def unpack(cls, numbers: tuple[int, ...]) -> Self:
        """Read it back."""
        forgets, seed, rank, members, steps, *rest = numbers
        count, newest, anchor = rest[:4], rest[4:8], rest[8:]
        return cls(
            forgets=bool(forgets),
            seed=seed,
            place=ShardPlace(rank, members, steps),
            count=tuple(count),
            newest=NewestRound(*newest),
            anchor=pack(_DIGEST, *anchor),
        )


class Boundary:
    """The step boundaries of one peer: the main process acts there, and its word brings the others in step.

    Beside it: the ``word`` of the last one, whether training is over (``done``), and the ``count`` of inner steps.
    """

    def __init__(self, settings: Settings, control: LoopControl) -> None:
        manifest = settings.manifest
        interval = manifest.inner.steps // manifest.outer.fragments
        self.count = StepCount(interval=interval, rounds=manifest.run.rounds)
        self.schedules = Schedules(settings.options["scheduler"], self.count)
        self.done = False
        self.word = Word()
        self._manifest, self._model, self._states, self._control = manifest, settings.model, settings.states, control
        self._standing = Standing(manifest)

    def share(self, part: Participation | None, changed: Iterable[int]) -> None:
        """Bring the peer's processes in step, with ``changed`` fragments; ``part`` is there on the main one.

        Every process calls it at every boundary.
        """
        over, changed = self.done, set(changed)
        if part is not None:
            over = self.done or part.loop.done or self._control.leaving
            self.word = self._word_of(part, changed)
        self.done, numbers = self._model.share(changed, over, self.word.pack())
        self.word = Word.unpack(numbers)
        self.count.hear(self.word.count)
        if self.word.forgets:
            self._states.forget_non_finite()
        self.schedules.follow(self._model.team.size, over=self.done, warns=part is not None)
        self._model.averages.resume(to_train=not self.done)

    def _word_of(self, part: Participation, changed: set[int]) -> Word:
        loop, node = part.loop, part.swarm.node
        forgets, loop.forgets = loop.forgets, False
        place = self._standing.place(node)
        is_news = self.count.reaches(loop.outer_steps)
        newest = NewestRound.of(part) if is_news else self.word.newest
        # Shared buffers are hashed anew for a digest, so not at every step, and not for a peer of one process.
        moved = self._model.team.orders is not None and (is_news or bool(changed))
        anchor = node.replica.digest if moved else self.word.anchor
        return Word(forgets, part.seed, place, self.count.numbers(), newest, anchor)

    def act(self, part: Participation) -> set[int]:
        """Merge, contribute and wait, on the main process after an inner step; return the fragments written."""
        loop, swarm, control = part.loop, part.swarm, self._control
        part.behind.check()
        loop.schedule.stepped()
        part.giving.stepped(paused=control.paused)
        if control.finishes_after == math.inf:
            control.finishes_after = self.outer_steps(part)
        try:
            changed = run_blocking(loop.step_boundary())
        except (LoopEnded, CancelledError):  # the swarm's side ends just now, and its error says more
            raise swarm.reason() from None
        self._leave_if_finished(part)
        if not (swarm.alive or loop.done or self.done):
            raise swarm.reason()
        return changed

    def stand_by(self, part: Participation) -> None:
        """Merge what comes where no inner step can be made; it takes a moment."""
        try:
            self.share(part, run_blocking(part.loop.stand_by()))
        except (LoopEnded, CancelledError):
            raise part.swarm.reason() from None
        if not (part.swarm.alive or part.loop.done or self.done):
            raise part.swarm.reason()
        self._leave_if_finished(part)

    def _leave_if_finished(self, part: Participation) -> None:
        """Leave with the first round after a person asked to finish."""
        last = self._control.finishes_after
        if last == math.inf:
            self._control.finishes_after = self.outer_steps(part)
        elif last is not None and self.outer_steps(part) > last and not part.loop.done:
            self._control.leave()

    def outer_steps(self, part: Participation | None) -> int:
        """Count the outer steps of the anchor; where the peer has several processes, those of the last boundary."""
        if part is None or self._model.team.orders is not None:
            return self.count.round
        return part.swarm.node.outer_steps

    def round_ended(self, before: int) -> RoundEnded | None:
        """Describe the rounds that came into the model after outer step ``before``; None: none came."""
        now, newest = self.count.round, self.word.newest
        if now == before:
            return None
        return RoundEnded(
            round=now,
            rounds=self._manifest.run.rounds,
            merged=max(1, now - before),
            members=newest.members,
            contributed=bool(newest.contributed),
            bytes_sent=newest.bytes_sent,
            bytes_received=newest.bytes_received,
            done=self.done,
        )

    # ---- waiting for other members, before the first step ----

    def wait_for_company(self, part: Participation | None) -> None:
        """Wait until the run has a second member; not at all if it ever had one."""
        self.wait_for_members(part, 2, lambda head: head.epoch > 0)

    def wait_for_members(self, part: Participation | None, count: int, enough: Callable[[Head], bool]) -> None:
        """Wait, on every process at once, until the chain's head has ``enough`` members: ``count``, for people.

        ``part`` is there on the main process. Raises NoPeersError.
        """
        with self._model.team.as_one():
            while not self._model.share((), part is not None and self._may_begin(part, count, enough), ())[0]:
                if part is not None and time_left(part.settings.give_up_at) == 0.0:
                    here = len(part.swarm.node.driver.head.members)
                    raise NoPeersError(
                        f"{here} of {count} peers within the time given to join_timeout; start the others, then "
                        f"this one again in {part.settings.called}, where it goes on as the same peer, or wait for "
                        "fewer of them"
                    )
                self._control.asked_to_leave.wait(LOOK_EVERY)
        self.share(part, ())

    def _may_begin(self, part: Participation, count: int, enough: Callable[[Head], bool]) -> bool:
        """Tell, on the main process, whether the wait is over, for whatever reason."""
        loop, swarm = part.loop, part.swarm
        run_blocking(loop.end_if_over())
        begins = enough(swarm.node.driver.head) or loop.done or self._control.leaving or not swarm.alive
        part.reporter.counters.waits_for(0 if begins else count)
        swarm.node.waits = not begins
        return begins


class Schedules:
    """The schedules of a peer, brought to where the run is: those of `Peer.schedule`, and those that the loop steps."""

    def __init__(self, given: Scheduler | Iterable[Scheduler] | None, count: StepCount) -> None:
        self._of_the_loop = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
        self._of_the_run: list[RunSchedule] = []
        self._count, self._has_moved = count, False

    def add(self, schedule: RunSchedule) -> RunSchedule:
        """Step it at every boundary from now on."""
        self._of_the_run.append(schedule)
        return schedule

    def follow(self, processes: int, *, over: bool, warns: bool) -> None:
        """Step the run's, and move the loop's on where they are far behind; the first time with a warning."""
        for of_the_run in self._of_the_run:
            of_the_run.step()
        if not self._count.behind or over:
            return
        for schedule in self._of_the_loop:
            sentence = move_on(schedule, self._count, processes)
            if sentence and warns and not self._has_moved:
                logging.getLogger("decentral").warning(sentence)
        self._count.advance += self._count.behind
        self._has_moved = True


# ---- the place among the members ----
#
# It says which part of the data is this peer's own.


class Standing:
    """The place as of the last change of the membership."""

    def __init__(self, manifest: Manifest) -> None:
        self._steps = manifest.inner.steps // manifest.outer.fragments
        self._members: tuple[PeerId, ...] = ()
        self._place = ShardPlace()

    def place(self, node: Node) -> ShardPlace:
        """Return where this peer stands now; one that no commit has let in yet counts itself."""
        members = tuple(sorted({*node.driver.head.members, node.driver.state.me}))
        if members != self._members:
            self._members = members
            rank, count = members.index(node.driver.state.me), len(members)
            self._place = ShardPlace(rank, count, self._steps * _contributions(node, count))
        return self._place


def _contributions(node: Node, count: int) -> int:
    """Count those of all peers so far; gossip commits none, but all make their steps."""
    return node.driver.head.contributions if node.gossip is None else node.gossip.step * count


# ---- inside a step of the loop ----


class StepHooks:
    """The work of a peer inside every ``optimizer.step`` of the loop, on each of its processes; signals wait for it."""

    def __init__(
        self, peer: Tracked, settings: Settings, boundary: Boundary, control: LoopControl, limits: PeerLimits
    ) -> None:
        self.signals = StopSignals(control.leave, control.hurry, self._is_held)
        self.on_round: list[Callable[[RoundEnded], object]] = []
        self._peer, self._settings, self._model = peer, settings, settings.model
        self._boundary, self._control, self._limits = boundary, control, limits
        self._trackers = Trackers(settings.options["accelerator"])
        self._part: Participation | None = None
        self._steps: InnerSteps | None = None  # while they are hooked
        self._has_stepped = False

    def hook(self, part: Participation | None) -> AbstractContextManager[object]:
        """Do it until the returned context ends; ``part`` is there on the main process."""
        begins = self._before_inner_step if part is not None and part.acts_before_inner_steps else None
        looks = self._before_any_step, self._model.joined.check_tensors
        parts = self._settings.optimizers.parts
        self._part, self._steps = part, InnerSteps(parts, self._after_inner_step, begins, *looks, after=self._end_step)
        return self._steps.hook(self._model.trained)

    @property
    def stage(self) -> Stage:
        """Where in an inner step the loop is, see `InnerSteps`."""
        return "between" if self._steps is None else self._steps.stage

    def _is_held(self) -> bool:
        return self.stage != "between" and not self._control.may_be_cut

    def _before_any_step(self) -> None:
        """Runs at the beginning of any optimizer's step; the first waits for a second member, until a round is made."""
        self._control.interrupted = False
        self.signals.step_begins(done=self._boundary.done)
        has_begun = self._has_stepped or self._boundary.count.round or self._boundary.done
        self._has_stepped = True
        if not (has_begun or self._settings.options["alone"] or self._settings.options["require_peers"]):
            self._boundary.wait_for_company(self._part)
        self._model.joined.before_step()

    def _before_inner_step(self) -> None:
        """Runs at the beginning of an ``optimizer.step``."""
        if self._part is not None:
            self._part.loop.schedule.calls.before_step()
        self._model.averages.resume()  # the step goes by what trains, and a method may have looked at what is learnt

    def _after_inner_step(self) -> None:
        """Runs inside ``optimizer.step``, of the last one if there are several."""
        count, team = self._boundary.count, self._model.team
        count.stepped()
        self._control.was_cut = False
        if team.orders is not None:
            team.orders.steps = count.value
        rest, before = self._limits.seconds_to_rest(), count.round
        try:
            with team.as_one():
                changed = set() if self._part is None else self._boundary.act(self._part)
            self._boundary.share(self._part, changed)
            if self._steps is not None:
                self._steps.stage = "between"  # all of it is done: what follows is the user's code
            self._trackers.after_step(self._peer)
            if (ended := self._boundary.round_ended(before)) is not None:
                for call in self.on_round:
                    call(ended)
            self._limits.rest(rest, self._control.asked_to_leave.wait)
        except BaseException:
            self._model.averages.resume()  # a loop may catch it, and go on
            raise

    def _end_step(self) -> None:
        """Handle what came within the step, now that all is done that belongs to it."""
        self._control.interrupted = False
        self.signals.step_ends()
