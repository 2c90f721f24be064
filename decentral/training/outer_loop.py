"""What happens at a step boundary: merge the commits that came, contribute when due, wait when the algorithm waits.

One class for all that train: a peer's training thread, a simulated peer, a test. The synchronous family offers to a
round that all agree on (`round_steps`); the gossip family swaps with one partner and ends with one merge of all
replicas (`gossip_steps`).
"""

from __future__ import annotations

from collections.abc import Iterable

from decentral.errors import NonFiniteError
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.gossip_steps import GossipSteps
from decentral.training.loop_parts import LoopParts
from decentral.training.merging import Merger
from decentral.training.round_steps import RoundSteps
from decentral.training.schedule.sync_schedule import SyncSchedule
from decentral.training.starting_over import RESTARTS


class OuterLoop:
    """The training side of rounds. ``step_boundary`` after every inner step, until ``done``."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts, self._merger = parts, Merger(parts)
        gossip = parts.swarm.node.gossip
        self._pairs = None if gossip is None else GossipSteps(parts, self._merger, gossip)
        self._steps = self._pairs or RoundSteps(parts, self._merger)
        self._left_at: float | None = None  # when the last boundary ended; None: none has, see ``step_boundary``
        self._saved_at = 0  # commits merged when the last checkpoint was begun
        self.forgets = False  # whether inner moments that are NaN are to be dropped; for the caller to do and to clear

    @property
    def done(self) -> bool:
        """Whether the run is over for this peer, and the live model what it made."""
        return self._merger.done

    @property
    def schedule(self) -> SyncSchedule:
        """Step counters, to be read."""
        return self._parts.schedule

    @property
    def is_up_to_date(self) -> bool:
        """Whether every commit so far is in the live model."""
        return self._merger.is_up_to_date

    async def step_boundary(self) -> set[int]:
        """What is to be done after an inner step; returns the fragments that were written.

        The first boundary begins to measure: what lies before it is waiting for company, or a model that is compiled.
        Raises NonFiniteError, which names the parameter, unless the live model is to be put back to the anchor then.
        """
        step_seconds = None if self._left_at is None else self._parts.clock() - self._left_at
        self._parts.schedule.trained(step_seconds or 0.0)
        try:
            changed = await self._steps.boundary(step_seconds)
            self._merger.tell_given_up()
            self._save_if_due()
            return changed | self._parts.schedule.detours.told() | await self.end_if_over()
        except NonFiniteError as error:
            self._parts.schedule.withdrawn()
            if self._parts.on_nan == "stop" or self._merger.restarts == RESTARTS:
                raise
            return await self._restart_after_nan(error)
        finally:
            self._left_at = self._parts.clock()

    async def _restart_after_nan(self, error: NonFiniteError) -> set[int]:
        """The user asked for it: all of the live model to the anchor, and on with fresh moments where they are NaN.

        What is owed is of contributions before, and finite: it stays.
        """
        written = await self._merger.start_over(self._parts.all_fragments, forget=[])
        if written:
            self._merger.restarts += 1
            self.forgets = True
            self._parts.events.restarted(str(error))
            self._parts.schedule.given_up.clear()
        return written

    async def end_if_over(self) -> set[int]:
        """The end of the run for whom it was over before: it comes late, or was away; returns what was written.

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

    async def settle(self) -> bool:
        """Before the last checkpoint, after an end at any moment: wait for what a partner may have taken. False: nobody
        knows whether it did, and no checkpoint may be made of this model.
        """
        return self._pairs is None or await self._pairs.settle()

    async def begin(self, included: Iterable[CommittedUpdate], *, afresh: bool = False) -> set[int]:
        """Merge what came before the first step, but what is ``included`` in the live model already: that is noted.

        ``afresh``: the inner optimizer has no moments yet. Returns the fragments that were written.
        """
        if afresh:
            self._merger.adopt_all(self._parts.all_fragments)
        self._merger.adopt_later(dict(self._parts.schedule.unadopted))
        for update in included:
            self._merger.note(update)
        return await self._merger.merge_all() | await self.end_if_over()

    def save(self) -> bool:
        """Begin to write a checkpoint; False when this is no moment for one, and the next boundary tries again."""
        saved, merged = self._parts.save(self._parts.schedule), self._parts.schedule.num_merged
        self._merger.must_save = not saved
        self._saved_at = merged if saved else self._saved_at
        return saved

    def _save_if_due(self) -> None:
        since = self._parts.schedule.num_merged - self._saved_at
        if self._merger.must_save or since >= self._parts.checkpoint_every:
            self.save()
