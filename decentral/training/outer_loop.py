"""The step boundary: merge the commits that came, contribute when due, wait when the algorithm waits.

One `OuterLoop` for all that train: a peer's training thread, a simulated peer, a test. Three families differ in their
boundary, each on one screen, in the order of the algorithm:

    family                     inner loop   contribution              wait                    merge
    `SynchronousRounds`        H steps      anchor less parameters    until it is committed   at once
    `OverlappedRounds`         H steps      the same                  trains on               ``overlap`` steps later
    `GossipSteps`              H steps      swapped with a partner    until the pair decides  at once; all at the end

`SyncSchedule` says when a contribution is due, makes it (``take``), and merges a commit (``merge``).
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.chain import Head, contributions, moves_anchor
from decentral.errors import DecentralError, NonFiniteError
from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep
from decentral.replica.replica import OWED
from decentral.rounds.gossip import UNDECIDED, Gossip
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_side import Parameters
from decentral.training.processes import hold_interrupts
from decentral.training.progress import Away
from decentral.training.schedule import Pace, SyncSchedule
from decentral.training.swarm_side import PendingResult, SwarmSide
from decentral.wire.frames import FrameKind
from decentral.wire.keys import Digest

# ---- what a loop is given ----
#
# Its terms, its model and swarm, and who hears of events. The shipped peer, the simulator and the tests each give their
# own, and run the same loop.

# Shape suffixes: N = elements of one fragment, B = elements of all buffers; flat float32.


class LiveParameters(Parameters, Protocol):
    """The model that is being trained, with its buffers."""

    def check_trained(self) -> None:
        """Raise ConfigError when other parameters are trained than at the join."""
        ...

    def read_buffers(self) -> Tensor:
        """Copy all buffers (B,)."""
        ...

    def write_buffers(self, flat_B: Tensor) -> None:
        """Overwrite all buffers."""
        ...


class LoopEvents(Protocol):
    """Listener to what happens at a boundary."""

    def waits(self, waiting: bool) -> None:
        """Hear that the loop begins or ends to stand still for a commit."""
        ...

    def holds(self, seconds: float) -> None:
        """Hear how long the loop stood still to copy parameters out for a contribution, or in after a commit."""
        ...

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        """Hear that a commit was merged, or changed the membership; ``of_pairs``: of a gossip run, so no round."""
        ...

    def branch_left(self, outer_step: int) -> None:
        """Hear that our rounds after so many outer steps are none of the run's: another branch is taken over."""
        ...

    def swap_begins(self, mine: Contribution) -> None:
        """Hear that the loop stands still for a gossip step."""
        ...

    def swap_ended(self, outcome: GossipStep) -> None:
        """Hear that a gossip step was taken, and is in the live model."""
        ...

    def away(self, away: Away) -> None:
        """Hear that progress of an absence is dropped, in part or whole."""
        ...

    def starts_over(self, why: str) -> None:
        """Hear that the live model was put back to the anchor because it held NaN or Inf."""
        ...


class CommitLooks(Protocol):
    """Looks at the live model around a commit that takes this peer's contribution, and changes nothing."""

    def before(self) -> None:
        """Look before the commit comes into the live model. What it raises ends the loop, once the commit is in."""
        ...

    def after(self, outer_step: int) -> None:
        """Look once it is in; ``outer_step``: outer steps made with it."""
        ...

    def give_up(self) -> None:
        """Forget the look that was begun: the live model was changed by something else."""
        ...


@dataclass(slots=True)
class LoopControl:
    """The wishes of people for a peer. Any thread may write it; the loop reads it at every boundary."""

    paused: bool = False  # contribute nothing
    leaving: bool = False  # wait for nothing any more
    interrupted: bool = False  # nor in this step, at whose end Ctrl-C is heard
    may_be_cut: bool = False  # the loop waits where Ctrl-C may end the waiting, as what is waited for goes on
    was_cut: bool = False  # by an error that was nobody's here: see `Merger.next_update`
    finishes_after: float | None = None  # outer steps, beyond which the peer leaves; inf: asked before it had any
    asked_to_leave: threading.Event = field(default_factory=threading.Event)  # ends what is waited for elsewhere

    def leave(self) -> None:
        """Wait for nothing any more, and end at the next boundary."""
        self.leaving = True
        # The handler of a signal calls it, too, which may have come while this thread holds the event's lock.
        start_new_thread(self.asked_to_leave.set, ())

    def hurry(self) -> None:
        """Wait for nothing in this step."""
        self.interrupted = True

    @property
    def hurries(self) -> bool:
        """True when nothing is to be waited for."""
        return self.leaving or self.interrupted

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let Ctrl-C end the waiting inside: what is waited for goes on without the loop."""
        self.may_be_cut = True
        try:
            if self.interrupted:
                raise KeyboardInterrupt
            yield
        finally:
            self.may_be_cut = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """Parts that one peer gives its loop: terms, model, schedule, swarm, and who hears of events."""

    manifest: Manifest
    tokens_per_step: int
    checkpoint_every: int  # commits
    on_nan: Literal["stop", "restart"]  # raise, or put the live model back to the anchor
    model: LiveParameters
    schedule: SyncSchedule
    swarm: SwarmSide
    events: LoopEvents
    control: LoopControl
    clock: Callable[[], float]  # s, monotonic
    save: Callable[[SyncSchedule], bool]  # begin to write a checkpoint; False when this is no moment for one
    may_save: Callable[[], bool] = lambda: True  # as far as the disk's people allow it
    looks: CommitLooks | None = None
    is_stage: bool = False  # of a replica of several machines

    def give_up_look(self) -> None:
        """Forget a look that was begun: the live model was changed by other than own steps."""
        if self.looks is not None:
            self.looks.give_up()

    @contextmanager
    def looking(self, outer_step: int | None, *, wanted: bool) -> Iterator[None]:
        """Look at the live model before and after what is done inside, where that is ``wanted``.

        ``outer_step``: made with the commit that is brought in there; None: it takes no contribution of this peer's.
        What is inside is done even if Ctrl-C comes while somebody looks: a commit is taken from the swarm once.
        """
        if self.looks is None or not wanted or self.control.hurries:
            yield
            return
        if outer_step is None:
            yield
            self.give_up_look()
            return
        self.events.waits(False)  # the swarm is not what is waited for now
        try:
            self.looks.before()
        finally:
            yield
        self.looks.after(outer_step)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Tell how long the work inside held the training thread."""
        began = self.clock()
        yield
        self.events.holds(self.clock() - began)

    def take(self, fragment: int, based_on: Digest, outer_step: int) -> Contribution | None:
        """Take a fragment's contribution to an outer step of the run off the live model; None: it was away too long.

        ``based_on``: the head that the live model has come to; the chain may go on meanwhile.
        """
        replica, tokens = self.swarm.node.replica, self.tokens_per_step
        with self.holding():
            self.model.check_trained()
            anchor_N = replica.anchors[fragment]
            made = self.schedule.take(self.model, fragment, anchor_N, based_on, tokens, outer_step=outer_step)
            if made is not None:
                made.tail = self.tail(fragment)
                made.check_finite(replica)  # here, where an error reaches the loop
        return made

    @property
    def all_fragments(self) -> list[int]:
        """Numbers of the live model's fragments."""
        return list(range(self.manifest.outer.fragments))

    @property
    def holds_back(self) -> bool:
        """True when contributions are held back: by a person, or because the day's upload is used up."""
        return self.control.paused or bool(self.swarm.node.resting.reasons)

    def tail(self, fragment: int) -> bytes:
        """Pack this peer's buffers as they are now, where ``fragment`` carries them."""
        tail = self.swarm.node.replica.tail
        return tail.pack(self.model.read_buffers()) if tail.nbytes(fragment) else b""

    def take_buffers(self, buffers_B: Tensor | None) -> None:
        """Bring shared buffers into the live model; None: there are none."""
        if buffers_B is not None:
            self.model.write_buffers(buffers_B)


# ---- the loop ----

LOOK_EVERY = 0.2  # s to wait for the next commit at a time: Ctrl-C must get through on every platform
APPLIED = 8.0  # s, at the end, until a commit that is decided is applied here, too; then the checkpoint before stays
DECIDED = 2.0  # s, at the end, for a contribution that is in flight: whoever leaves does so within ten
RESTARTS = 3  # after NaN, without a commit that names this peer in between: then the settings are wrong, not a batch


class OuterLoop:
    """The training side of rounds. ``step_boundary`` after every inner step, until ``done``."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts, self._merger = parts, Merger(parts)
        gossip = parts.swarm.node.gossip
        self._family: GossipSteps | SynchronousRounds | OverlappedRounds
        if gossip is not None:
            self._family = GossipSteps(parts, self._merger, gossip)
        elif parts.schedule.timing.overlap:
            self._family = OverlappedRounds(parts, self._merger)
        else:
            self._family = SynchronousRounds(parts, self._merger)
        self._left_at: float | None = None  # when the last boundary ended; None: none has, see ``step_boundary``
        self._saved_at = 0  # commits merged when the last checkpoint was begun
        self.forgets = False  # whether inner moments that are NaN are to be dropped; for the caller to do and to clear

    @property
    def done(self) -> bool:
        """True when the run is over for this peer, and the live model holds its outcome."""
        return self._merger.done

    @property
    def schedule(self) -> SyncSchedule:
        """The counters of inner steps, and what takes a contribution and merges a commit."""
        return self._parts.schedule

    @property
    def is_up_to_date(self) -> bool:
        """True when every commit so far is in the live model."""
        return self._merger.is_up_to_date

    @property
    def outer_steps(self) -> int:
        """Outer steps that the live model has: a commit that is applied, and waits for its time, is not counted yet."""
        node = self._parts.swarm.node
        head = node.driver.head
        if node.gossip is not None:
            return node.gossip.step
        if head.hash == self._parts.schedule.seen:  # else only records tell: more of them are applied already
            self._merger.outer_steps = head.outer_step
        return self._merger.outer_steps

    async def step_boundary(self) -> set[int]:
        """Merge, contribute and wait as the family does after an inner step; return the fragments that were written.

        The first boundary begins to measure: what lies before it is waiting for company, or a model that is compiled.
        Raises NonFiniteError, which names the parameter, unless the live model is to be put back to the anchor then.
        """
        step_seconds = None if self._left_at is None else self._parts.clock() - self._left_at
        self._parts.schedule.timing.seconds += step_seconds or 0.0
        try:
            changed = await self._family.boundary(step_seconds)
            self._merger.report_absences()
            self._save_if_due()
            return changed | self._parts.schedule.collect_written() | await self.end_if_over()
        except NonFiniteError as error:
            self._parts.schedule.timing.withdraw()
            if self._parts.on_nan == "stop" or self._merger.restarts == RESTARTS:
                raise
            return await self._restart_after_nan(error)
        finally:
            self._left_at = self._parts.clock()

    async def _restart_after_nan(self, error: NonFiniteError) -> set[int]:
        """Put all of the live model to the anchor, as the user asked, and go on with fresh moments where they are NaN.

        What is owed is of contributions before, and finite: it stays.
        """
        written = await self._merger.start_over(self._parts.all_fragments, forget=[])
        if written:
            self._merger.restarts += 1
            self.forgets = True
            self._parts.events.starts_over(str(error))
            self._parts.schedule.absences.clear()
        return written

    async def end_if_over(self) -> set[int]:
        """End the run for a peer that comes when it is over, late or after an absence; return the fragments written.

        There is no round any more in which what this peer learnt meanwhile could count, so the live model becomes what
        the run made. Commits that are on their way are merged first, as any others.
        """
        node = self._parts.swarm.node
        head = node.driver.head
        left = self.done or self._parts.control.leaving
        if left or not head.final or head.anchor is None or not self.is_up_to_date:
            return set()
        behind = node.gossip is not None and head.anchor != node.replica.digest
        if behind and not await self._parts.swarm.call(node.follow_others):
            return set()  # in gossip a head comes without the replicas that were merged
        self._parts.schedule.seen = head.hash
        return self._merger.end_at_replica()

    async def stand_by(self) -> set[int]:
        """Merge what came where no inner step can be made; wait a moment for it. Return the fragments written."""
        timing = self._parts.schedule.timing
        overlap, timing.overlap = timing.overlap, 0  # no inner step comes that a merge could wait for
        try:
            if not isinstance(self._family, GossipSteps):
                await self._family.withdraw_if_refused()
            changed = await self._merger.merge_waiting(LOOK_EVERY, looks=False)
        finally:
            timing.overlap = overlap
        return changed | await self.end_if_over()

    async def train_part(self, part: range) -> set[int]:
        """Train these fragments alone from now on, beginning at the anchor; return the fragments written. None: a
        commit comes in just now, or what this peer offered waits for one, so that it is to be asked again.
        """
        schedule = self._parts.schedule
        schedule.part = part
        written = await self._merger.start_over(self._parts.all_fragments, forget=[])
        schedule.absences = [away for away in schedule.absences if away.steps]  # of others nothing was dropped
        self._merger.report_absences()
        return written

    async def settle(self) -> bool:
        """Before the last checkpoint, after an end at any moment, bring live model and chain in step: no step follows.

        Commits are merged whose time had not come, or that are only now applied; what a partner may have taken is
        waited for. False: it was not decided in time, and no checkpoint may be made of this model.
        """
        is_in_step = await self._family.settle()
        self._merger.report_absences()
        return is_in_step

    async def begin(
        self, included: Iterable[CommittedUpdate], *, afresh: bool = False, outer_steps: int = 0
    ) -> set[int]:
        """Merge what came before the first step, but what is ``included`` in the live model already: that is noted.

        ``afresh``: the inner optimizer has no moments yet. ``outer_steps``: in the live model. Returns the fragments
        that were written.
        """
        if afresh:
            self._merger.adopt_all(self._parts.all_fragments)
        self._merger.adopt_later(dict(self._parts.schedule.unadopted))
        for update in included:
            self._merger.note(update)
        self._merger.outer_steps = outer_steps
        return await self._merger.merge_all() | await self.end_if_over()

    def save(self) -> bool:
        """Begin to write a checkpoint; False when this is no moment for one, and the next boundary tries again."""
        saved, merged = self._parts.save(self._parts.schedule), self._parts.schedule.num_merged
        self._merger.must_save = not saved
        self._saved_at = merged if saved else self._saved_at
        return saved

    def _save_if_due(self) -> None:
        since = self._parts.schedule.num_merged - self._saved_at
        if self._merger.must_save or (since >= self._parts.checkpoint_every and self._parts.may_save()):
            self.save()


# ---- boundaries of the synchronous family ----
#
# Each family of rounds offers its progress to a round that all agree on, and merges the outcome of the round.


class _Rounds:
    """The inner steps, the contribution and the end, alike whether training waits for a round or goes on."""

    def __init__(self, parts: LoopParts, merger: Merger) -> None:
        self._parts, self._merger = parts, merger
        self._schedule, self._timing, self._swarm = parts.schedule, parts.schedule.timing, parts.swarm
        self._pace = Pace(parts.manifest.inner, self._timing.interval, self._timing.overlap + 1)
        self._offered: PendingResult[bool] | None = None  # of what is in flight, where training goes on meanwhile
        self._has_left = False  # was asked to before this boundary

    def _is_due(self, step_seconds: float | None) -> bool:
        """Tell whether the inner loop of this round is over.

        Asked to leave in this step, a peer offers what is due, and `settle` sees to the rest: one step more would come
        before that in its next life.
        """
        driver = self._swarm.node.driver
        self._timing.paced = self._pace.steps(driver.full_times)
        due = self._timing.due or self._schedule.due_early(driver.pressed, step_seconds or 0.0)
        may_offer = not (self._parts.holds_back or self._merger.done or self._has_left)
        self._has_left = self._parts.control.leaving
        return due and may_offer

    @property
    def _is_ours(self) -> bool:
        """True when the round is of a fragment that this peer trains, or has to pass without those who do."""
        driver = self._swarm.node.driver
        trains = driver.head.fragment(self._parts.manifest.outer.fragments) in self._schedule.part
        return trains or driver.untrained == driver.head.hash

    async def _pass_turn(self) -> set[int]:
        """Let others make a round of a fragment that this peer does not train, and make no more steps than they do."""
        changed, seen, timing = set[int](), self._schedule.seen, self._timing
        if self._parts.is_stage or timing.since < (timing.paced or timing.interval) + timing.overlap:
            return changed  # of a stage the others go on no further than all do
        until = self._parts.clock() + self._patience()
        self._parts.events.waits(True)
        while self._schedule.seen == seen and not self._is_ours and self._parts.clock() < until:
            changed |= await self._merger.merge_waiting(LOOK_EVERY)
            if self._merger.done or self._parts.control.hurries or not self._swarm.alive:
                break
        self._parts.events.waits(False)
        return changed

    def _patience(self) -> float:
        """Say how long a round may hold the training: ceiling and frames, and as long again for the vote."""
        return 2.0 * (self._parts.manifest.swarm.deadline_ceiling + self._swarm.node.driver.allowed)

    async def _make_contribution(self, changed: set[int]) -> Contribution | None:
        """Make the contribution of the fragment whose turn it is. None when the chain is elsewhere just now, or when
        this peer was away for too long and starts from the anchor: the fragments written so are added to ``changed``.
        """
        head = self._swarm.node.driver.head
        if head.anchor is None or head.hash != self._schedule.seen or not self._swarm.node.driver.state.is_member:
            return None
        fragment = head.fragment(self._parts.manifest.outer.fragments)
        contribution = self._parts.take(fragment, head.hash, head.outer_step)
        if contribution is None:
            dropped = self._schedule.away_too_long(fragment)
            changed |= await self._merger.start_over(dropped, forget=dropped)
        return contribution

    async def settle(self) -> bool:
        """Merge all that waits, at the end; wait for what is being applied, and a little for what is in flight.

        A commit of this peer's waits in the queue for its ``overlap``, and the chain is ahead of the live model
        meanwhile: no checkpoint can be made of the two.
        """
        self._timing.overlap = 0  # no inner step comes that a merge could wait for
        began, is_in_step = self._parts.clock(), False
        while True:
            await self.withdraw_if_refused()
            await self._merger.merge_waiting(0.0, looks=False)
            head, waited = self._swarm.node.driver.head, self._parts.clock() - began
            is_in_step = head.anchor is not None and head.hash == self._schedule.seen
            is_decided = self._timing.sent_at is None or self._merger.done or waited >= DECIDED
            if (is_in_step and is_decided) or waited >= APPLIED or not self._swarm.alive:
                return is_in_step
            await self._merger.merge_waiting(LOOK_EVERY, looks=False)

    async def withdraw_if_refused(self) -> None:
        """Take a contribution back that was offered while training went on, and did not fit the chain any more."""
        if self._offered is None or not self._offered.done():
            return
        offered, self._offered = self._offered, None
        try:
            fits = await offered.result()
        except (DecentralError, CancelledError):
            fits = False
        if not fits:
            self._timing.withdraw()


class SynchronousRounds(_Rounds):
    """DiLoCo: training stands still from the contribution until the round is committed and merged."""

    async def boundary(self, step_seconds: float | None) -> set[int]:
        """Contribute when H inner steps are made, wait for the round, and merge it."""
        if step_seconds is not None:
            self._pace.stepped(step_seconds)
        changed = await self._merger.merge_all()  # commits that passed by since the last boundary
        if not self._is_due(step_seconds):
            return changed
        if not self._is_ours:
            return changed | await self._pass_turn()
        if self._swarm.node.driver.head.hash != self._schedule.seen:
            # A commit is about to be handed over, and without it nothing can be contributed. A peer that went on
            # instead made one more inner step, alone, when it met a membership change at its boundary.
            changed |= await self._merger.merge_waiting(LOOK_EVERY)
        contribution = await self._make_contribution(changed)
        if contribution is None or not await self._offer(contribution):
            return changed
        self._parts.events.waits(True)
        changed |= await self._merger.merge_all(until=self._parts.clock() + self._patience())
        self._parts.events.waits(False)
        return changed

    async def _offer(self, contribution: Contribution) -> bool:
        """Hand a contribution to the round; tell whether it fits the chain."""
        offered = self._swarm.begin(self._swarm.node.driver.contribute, contribution)
        with self._parts.control.waiting():
            fits = await offered.result()
        if not fits:
            self._timing.withdraw()
        return fits


class OverlappedRounds(_Rounds):
    """Streaming and overlapped DiLoCo: training goes on while a round is made, which is merged some steps later."""

    async def boundary(self, step_seconds: float | None) -> set[int]:
        """Merge a round ``overlap`` inner steps after its contribution; contribute when the next ones are made."""
        if step_seconds is not None:
            self._pace.stepped(step_seconds)
        await self.withdraw_if_refused()
        changed = await self._merger.merge_all()
        if not self._is_due(step_seconds):
            return changed
        if not self._is_ours:
            return changed | await self._pass_turn()
        contribution = await self._make_contribution(changed)
        if contribution is not None:
            self._offered = self._swarm.begin(self._swarm.node.driver.contribute, contribution)
        return changed


# ---- boundaries of the gossip family ----
#
# A peer swaps with one partner every H steps.

SWAP_SLACK = 1.0  # s beyond the time in which a pair decides
MERGE_EVERY = 1.0  # s between two offers of a replica for the last merge


class GossipSteps:
    """NoLoCo and its kin: training stands still while a pair swaps progress; at the end all replicas are merged."""

    def __init__(self, parts: LoopParts, merger: Merger, gossip: Gossip) -> None:
        self._parts, self._merger, self._gossip = parts, merger, gossip
        self._model, self._schedule, self._swarm = parts.model, parts.schedule, parts.swarm
        self._swap: PendingResult[GossipStep] | None = None  # outcome of the step in progress

    async def boundary(self, step_seconds: float | None) -> set[int]:
        """Swap with a partner when H inner steps are made; after the last swap, merge all replicas."""
        changed = await self._merger.merge_all()
        node = self._swarm.node
        if not self._is_due(node):
            return changed
        if self._schedule.was_away and await self._swarm.call(node.follow_others):
            return changed | self._merger.stand_at_replica()
        step, based_on = self._gossip.step, node.driver.head.hash
        mine = self._parts.take(step % self._parts.manifest.outer.fragments, based_on, step)
        if mine is None:  # merges at the run's end passed it by
            return changed | self._merger.stand_at_replica()
        await self._exchange(mine)
        if self._gossip.step >= self._parts.manifest.run.rounds or node.clock.is_up:
            return await self._merge_replicas(node)
        return changed | {mine.fragment}

    def _is_due(self, node: Node) -> bool:
        over = self._merger.done or self._parts.control.leaving or node.driver.head.final
        return self._schedule.timing.due and not self._parts.holds_back and not over

    async def _exchange(self, mine: Contribution) -> None:
        self._parts.events.swap_begins(mine)
        self._swap = self._swarm.begin(self._gossip.exchange, mine)
        await self._end_swap()

    async def _end_swap(self, within: float | None = None) -> None:
        """Wait for the outcome of the swap in progress, ``within`` seconds, and bring it into the live model.

        Ctrl-C ends the waiting and not the swap: the partner may take its half, so whoever saves asks here first.
        """
        if self._swap is None:
            return
        outcome = self._swap
        with self._parts.control.waiting() if within is None else nullcontext():
            swapped = await outcome.result(within)
        paired_at = None if swapped.partner is None else swapped.step + 1
        looking = self._parts.looking(paired_at, wanted=within is None)
        with looking, hold_interrupts(), self._parts.holding():  # whole, whenever Ctrl-C comes: see `Merger`
            self._swap = None
            self._schedule.merge_swap(self._model, swapped.fragment, swapped.after_N, unmoved=bool(swapped.unmoved))
            self._parts.take_buffers(swapped.buffers_B)
        self._parts.events.swap_ended(swapped)

    async def settle(self) -> bool:
        """Wait, at the end, for a swap that Ctrl-C left; False: it stays undecided, and no checkpoint may be made."""
        with suppress(DecentralError, TimeoutError, CancelledError):
            await self._end_swap(UNDECIDED + SWAP_SLACK)
        return self._swap is None

    async def _merge_replicas(self, node: Node) -> set[int]:
        """End a gossip run with one full average, agreed on like any other round."""
        while not _is_over(node.driver.head) and not self._parts.control.leaving:
            with self._parts.control.waiting():
                await self._swarm.call(self._offer_merge, node)
                within = MERGE_EVERY
                while (update := await self._merger.next_update(within)) is not None:
                    within = 0.0
                    if update.record is not None:
                        self._parts.events.round_ended(update, of_pairs=True)
        return self._merger.end_at_replica()

    async def _offer_merge(self, node: Node) -> None:
        head, replica = node.driver.head, node.replica
        if node.driver.state.pending is not None or head.final:
            return
        fragment = head.fragment(self._parts.manifest.outer.fragments)
        slow_N, tail = replica.anchors[fragment], self._parts.tail(fragment)
        encoded = await node.driver.state.offload(replica.merge_codec.encode, slow_N, {}, replica.shapes(fragment))
        kind = FrameKind.MERGE
        offered = Contribution(fragment, head.hash, slow_N, slow_N, 0, 0, kind=kind, encoded=encoded, tail=tail)
        await node.driver.contribute(offered)


def _is_over(head: Head) -> bool:
    """Tell whether the last commit is applied: before, the head has no anchor, and the replica is the old one."""
    return head.final and head.anchor is not None


# ---- merging into the live model ----
#
# Decisions of the swarm come into the live model alike in all algorithms, and their consequences are noted.


class Merger:
    """Brings commits into the live model, and knows how far it has come: over, to be saved, to be adopted."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._model, self._schedule, self._swarm = parts.model, parts.schedule, parts.swarm
        self.done = False  # nothing that this peer learns can count any more
        self.must_save = False  # the last checkpoint has progress that was dropped since
        self.restarts = 0  # after NaN, since a commit named this peer last
        self.outer_steps = 0  # in the live model, as of the newest record
        self._to_adopt: dict[int, tuple[Mapping[str, Tensor], frozenset[str]]] = {}  # by fragment: state and channels

    @property
    def is_up_to_date(self) -> bool:
        """True when every commit so far is in the live model."""
        return not self._swarm.has_updates

    async def merge_all(self, until: float | None = None) -> set[int]:
        """Merge every commit whose time has come; wait for our own contribution's fate ``until`` then.

        Returns the fragments that were written.
        """
        changed: set[int] = set()
        while True:
            changed |= await self.merge_waiting(LOOK_EVERY if until is not None else 0.0)
            in_flight = self._schedule.timing.sent_at is not None and not self.done and self._swarm.alive
            late = until is None or self._parts.clock() >= until
            if late or not in_flight or self._parts.control.hurries:
                return changed

    async def merge_waiting(self, within: float, *, looks: bool = True) -> set[int]:
        """Merge every commit whose time has come; where there is none, wait for one, at most so many seconds.

        ``looks``: whether there is time to evaluate beside it.
        """
        changed: set[int] = set()
        while (update := await self.next_update(within)) is not None:
            within = 0.0
            with self._parts.looking(_outer_step_of(update), wanted=looks and update.before_N is not None):
                with self._parts.holding():
                    changed |= self._merge(update)
                self.note(update)
        self._adopt()
        return changed

    def _merge(self, update: CommittedUpdate) -> set[int]:
        """Bring one commit into the live model; return the fragments that were written.

        All of it, whenever Ctrl-C comes: of a model that was half written the last checkpoint would take what the
        others learnt, and this model has not, for progress backwards.
        """
        with hold_interrupts():
            if not self._schedule.merge(update, self._model):
                return set()
            self._parts.take_buffers(update.buffers_B)
            self._will_adopt(update.fragment, update.state, update.channels)
        return {update.fragment}

    async def next_update(self, within: float) -> CommittedUpdate | None:
        """Take the oldest commit off the queue; None when there is none whose time comes within so many seconds.

        Most of a boundary's time may pass here, and signals are handled in it. What a handler raises, as DataLoader's
        of a worker that was killed, leaves nothing undone, as Ctrl-C does not.
        """
        try:
            return await self._swarm.next_update(within, self._schedule.timing.may_merge)
        except Exception as error:
            self._parts.control.was_cut = not isinstance(error, DecentralError)
            raise

    def adopt_all(self, fragments: Iterable[int]) -> None:
        """Have the inner optimizer take the shared state's moments: it has none there, or those of another time."""
        channels = frozenset(channel.name for channel in self._schedule.method.channels())
        self.adopt_later(dict.fromkeys(fragments, channels))

    def adopt_later(self, channels: Mapping[int, Iterable[str]]) -> None:
        """Have it take channels of fragments from the shared state as it is now, after the next inner step."""
        replica = self._swarm.node.replica
        for fragment, names in channels.items() if self._schedule.method.inner else ():
            self._will_adopt(fragment, replica.states[fragment], frozenset(names))

    def _will_adopt(self, fragment: int, state: Mapping[str, Tensor], channels: frozenset[str]) -> None:
        if state and channels:
            before = self._to_adopt[fragment][1] if fragment in self._to_adopt else frozenset()
            self._to_adopt[fragment] = (state, before | channels)
            self._schedule.unadopted[fragment] = sorted(before | channels)

    def _adopt(self) -> None:
        """Hand what waits to the inner optimizer; what it has no place for yet waits for its next step."""
        method, live = self._schedule.method, self._schedule.live
        for fragment, (state, channels) in list(self._to_adopt.items()):
            if method.adopt(state, live, fragment, channels):
                del self._to_adopt[fragment], self._schedule.unadopted[fragment]

    def note(self, update: CommittedUpdate) -> None:
        """Report a merged commit; note the end of the run."""
        record = update.record
        if update.adopted:
            self.must_save = True  # the last checkpoint is of a branch, or a time, that this peer has left
        if update.parted is not None:
            self._parts.events.branch_left(update.parted)
        if record is None:
            return
        self.outer_steps = record.outer_step + moves_anchor(record)
        self._parts.events.round_ended(update, of_pairs=self._swarm.node.gossip is not None)
        if update.contribution is not None:
            self.restarts = 0
        if record.final and self._swarm.node.gossip is None:
            self.done = True

    def report_absences(self) -> None:
        """Report what absences cost."""
        for away in self._schedule.absences:
            self._parts.events.away(away)
        self._schedule.absences.clear()

    async def start_over(self, fragments: Sequence[int], forget: Sequence[int]) -> set[int]:
        """Put fragments to the anchor, and forget what some owe; none when a commit comes in just now."""
        fresh = await self._swarm.call(anchors_without_debt, self._swarm.node, self._schedule.seen, forget)
        return set() if fresh is None else self._restart(fragments, fresh)

    def stand_at_replica(self) -> set[int]:
        """Put the live model, in gossip after an absence, to this peer's replica, often a copy of another's by now."""
        replica = self._swarm.node.replica
        return self._restart(self._parts.all_fragments, FreshStart(replica.anchors, replica.shared_buffers(0), {}))

    def _restart(self, fragments: Sequence[int], fresh: FreshStart) -> set[int]:
        with hold_interrupts():
            self._schedule.restart(self._model, fresh.anchors, fragments, fresh.debts)
            self.adopt_all(fragments)
            if 0 in fragments:  # which carries them
                self._parts.take_buffers(fresh.buffers_B)
            self._parts.give_up_look()
            self.must_save = True
        return set(fragments)

    def end_at_replica(self) -> set[int]:
        """End the run: the live model becomes its outcome."""
        replica = self._swarm.node.replica
        with hold_interrupts():
            for fragment, anchor_N in enumerate(replica.anchors):
                self._schedule.put(self._model, fragment, anchor_N)
            self._parts.take_buffers(replica.shared_buffers(0))
            self.done = True
        return set(self._parts.all_fragments)


def _outer_step_of(update: CommittedUpdate) -> int | None:
    """Count outer steps made with a commit that takes this peer's contribution, and another's; None: another one."""
    record = update.record
    if record is None or update.contribution is None or len(contributions(record)) < 2:
        return None
    return record.outer_step + 1


# ---- starting over from the anchor ----
#
# The live model is put back to it after an absence, or after NaN where the user asked for that.


@dataclass(frozen=True, slots=True)
class FreshStart:
    """Tensors that a live model starts over from."""

    anchors: Sequence[Tensor]
    buffers_B: Tensor | None  # None: each peer has its own, or there are none
    debts: dict[int, Tensor]  # by fragment, what was owed of this peer's progress and is no more


async def anchors_without_debt(node: Node, seen: Digest, fragments: Sequence[int]) -> FreshStart | None:
    """Drop what ``fragments`` owe of this peer's progress, and return where to start, as it is after the record
    ``seen``. None: the chain moved.

    To be run on the swarm's loop, where no commit can come in between, with nothing of this peer's in flight.
    """
    if node.driver.head.hash != seen or node.driver.state.pending is not None:
        return None
    feedback, debts = node.replica.feedback, {}
    for fragment in fragments:
        if (debt_N := feedback[fragment].get(DEBT)) is not None:
            debts[fragment] = debt_N
        # as an owner of a reduce: the progress of others, which nobody else has
        owed_N = node.replica.owed_as_owner(fragment)
        feedback[fragment] = {} if owed_N is None else {OWED: owed_N}
    return FreshStart(list(node.replica.anchors), node.replica.shared_buffers(0), debts)
