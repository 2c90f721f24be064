"""Boundaries of the synchronous family: contribute to a round that all agree on, and wait when the algorithm waits."""

from __future__ import annotations

from concurrent.futures import CancelledError

from decentral.consensus.chain import Head
from decentral.errors import DecentralError
from decentral.replica.contribution import Contribution
from decentral.training.loop_parts import LoopParts
from decentral.training.merging import LOOK_EVERY, Merger
from decentral.training.schedule.pace import Pace
from decentral.training.swarm.side import PendingResult


class RoundSteps:
    """Offers what was learnt since the last round, and merges what the round made of it."""

    def __init__(self, parts: LoopParts, merger: Merger) -> None:
        self._parts, self._merger = parts, merger
        self._model, self._schedule, self._swarm = parts.model, parts.schedule, parts.swarm
        self._pace = Pace(parts.manifest.inner, parts.schedule.interval, parts.schedule.overlap + 1)
        self._offered: PendingResult[bool] | None = None  # of what is in flight, where training goes on meanwhile

    async def boundary(self, step_seconds: float | None) -> set[int]:
        """Merge what has come, contribute when due, wait when the algorithm waits; returns the fragments written.

        ``step_seconds``: of the inner step before it; None: nobody knows.
        """
        if step_seconds is not None:
            self._pace.stepped(step_seconds)
        await self._withdraw_if_refused()
        changed = await self._merger.merge_all()
        if not self._may_contribute(step_seconds or 0.0):
            return changed
        waits = self._schedule.overlap == 0
        if waits and self._swarm.node.driver.head.hash != self._schedule.seen:
            changed |= await self._catch_update()
        if await self._contribute(changed) and waits:
            self._parts.events.waits(True)
            changed |= await self._merger.merge_all(until=self._parts.clock() + self._patience())
            self._parts.events.waits(False)
        return changed

    def _may_contribute(self, step_seconds: float) -> bool:
        self._schedule.paced = self._pace.steps(self._swarm.node.driver.full_times)
        due = self._schedule.due or self._schedule.due_early(self._swarm.node.driver.pressed, step_seconds)
        return due and not (self._parts.rests or self._merger.done or self._parts.control.leaving)

    async def _catch_update(self) -> set[int]:
        """Merge a commit that the swarm is about to hand over: without it nothing can be contributed.

        A peer that went on instead made one more inner step, alone, when it met a membership change at its boundary.
        """
        return await self._merger.merge_waiting(LOOK_EVERY)

    def _patience(self) -> float:
        """How long a round may hold the training: ceiling and frames, and as long again for the vote."""
        return 2.0 * (self._parts.manifest.swarm.deadline_ceiling + self._swarm.node.driver.allowed)

    async def _contribute(self, changed: set[int]) -> bool:
        """Take the fragment whose turn it is and offer it; False when the chain is elsewhere just now, or when this
        peer was away for too long and starts from the anchor: what that writes is added to ``changed``.
        """
        head = self._swarm.node.driver.head
        if head.anchor is None or head.hash != self._schedule.seen or not self._swarm.node.driver.is_member:
            return False
        fragment = head.fragment(self._parts.manifest.outer.fragments)
        with self._parts.holding():
            contribution = self._take(fragment, head)
        if contribution is None:
            dropped = self._schedule.away_too_long(fragment)
            changed |= await self._merger.start_over(dropped, forget=dropped)
            return False
        return await self._offer(contribution)

    def _take(self, fragment: int, head: Head) -> Contribution | None:
        self._model.check_trained()
        replica, tokens = self._swarm.node.replica, self._parts.tokens_per_step
        contribution = self._schedule.take(
            self._model, fragment, replica.anchors[fragment], head.hash, tokens, outer_step=head.outer_step
        )
        if contribution is not None:
            contribution.tail = self._parts.tail(fragment)
            contribution.check_finite(replica)  # here, where an error reaches the loop
        return contribution

    async def _offer(self, contribution: Contribution) -> bool:
        offered = self._swarm.begin(self._swarm.node.driver.contribute, contribution)
        if self._schedule.overlap:
            self._offered = offered
        elif not await offered.result():
            self._schedule.withdrawn()
            return False
        return True

    async def _withdraw_if_refused(self) -> None:
        """What was offered while training went on did not fit the chain any more."""
        if self._offered is None or not self._offered.done():
            return
        offered, self._offered = self._offered, None
        try:
            fits = await offered.result()
        except (DecentralError, CancelledError):
            fits = False
        if not fits:
            self._schedule.withdrawn()
