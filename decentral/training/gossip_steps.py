"""Boundaries of the gossip family: swap with one partner every H steps, and end with one merge of all replicas."""

from __future__ import annotations

from concurrent.futures import CancelledError
from contextlib import suppress

from decentral.consensus.chain import Head
from decentral.errors import DecentralError
from decentral.node.node import Node
from decentral.replica.contribution import Contribution
from decentral.rounds.gossip import UNDECIDED, Gossip, Swapped
from decentral.training.loop_parts import LoopParts
from decentral.training.merging import Merger
from decentral.training.processes.orders import undisturbed
from decentral.training.swarm.side import PendingResult
from decentral.wire.frames import FrameKind

SWAP_SLACK = 1.0  # s beyond the time in which a pair decides
MERGE_EVERY = 1.0  # s between two offers of a replica for the last merge


class GossipSteps:
    """Swaps what was learnt since the last gossip step."""

    def __init__(self, parts: LoopParts, merger: Merger, gossip: Gossip) -> None:
        self._parts, self._merger, self._gossip = parts, merger, gossip
        self._model, self._schedule, self._swarm = parts.model, parts.schedule, parts.swarm
        self._swap: tuple[int, PendingResult[Swapped]] | None = None  # fragment and outcome of the step in progress

    async def boundary(self, step_seconds: float | None) -> set[int]:
        """Every H steps one gossip step; after the last one, the merge of all replicas. ``step_seconds``: no matter."""
        changed = await self._merger.merge_all()
        node = self._swarm.node
        if not self._is_due(node):
            return changed
        if self._schedule.was_away and await self._swarm.call(node.follow_others):
            return changed | self._merger.stand_at_replica()
        with self._parts.holding():
            mine = self._take(node)
        if mine is None:  # merges at the run's end passed it by
            return changed | self._merger.stand_at_replica()
        await self._exchange(mine)
        if self._gossip.step >= self._parts.manifest.run.rounds or node.clock.is_up:
            return await self._merge_replicas(node)
        return changed | {mine.fragment}

    def _is_due(self, node: Node) -> bool:
        over = self._merger.done or self._parts.control.leaving or node.driver.head.final
        return self._schedule.due and not self._parts.rests and not over

    def _take(self, node: Node) -> Contribution | None:
        self._model.check_trained()
        fragment = self._gossip.step % self._parts.manifest.outer.fragments
        slow_N, tokens = node.replica.anchors[fragment], self._parts.tokens_per_step
        based_on, step = node.driver.head.hash, self._gossip.step
        mine = self._schedule.take(self._model, fragment, slow_N, based_on, tokens, outer_step=step)
        if mine is not None:
            mine.tail = self._parts.tail(fragment)
            mine.check_finite(node.replica)
        return mine

    async def _exchange(self, mine: Contribution) -> None:
        self._parts.events.swap_begins(mine)
        told = (mine.fragment, mine.gradient_N, mine.steps, mine.tokens, mine.tail, mine.states)
        self._swap = (mine.fragment, self._swarm.begin(self._gossip.exchange, *told))
        await self._end_swap()

    async def _end_swap(self, within: float | None = None) -> None:
        """Wait for the outcome of the swap in progress, ``within`` seconds, and bring it into the live model.

        Ctrl-C ends the waiting and not the swap: the partner may take its half, so whoever saves asks here first.
        """
        if self._swap is None:
            return
        fragment, outcome = self._swap
        swapped = await outcome.result(within)
        with undisturbed(), self._parts.holding():  # see Merger: of a model that was half written a checkpoint is wrong
            self._swap = None
            self._schedule.swapped(self._model, fragment, swapped.after_N, unmoved=swapped.unmoved)
            self._parts.take_buffers(swapped.buffers_B)
        self._parts.events.swapped(swapped)

    async def settle(self) -> bool:
        """Before the last checkpoint: a swap that Ctrl-C left is decided within seconds. Else the checkpoint before has
        to stay: False.
        """
        with suppress(DecentralError, TimeoutError, CancelledError):
            await self._end_swap(UNDECIDED + SWAP_SLACK)
        return self._swap is None

    async def _merge_replicas(self, node: Node) -> set[int]:
        """The end of a gossip run: one full average, agreed on like any other round."""
        while not _is_over(node.driver.head) and not self._parts.control.leaving:
            await self._swarm.call(self._offer_merge, node)
            within = MERGE_EVERY
            while (update := await self._merger.next_update(within)) is not None:
                within = 0.0
                if update.record is not None:
                    self._parts.events.round_ended(update, of_pairs=True)
        return self._merger.end_at_replica()

    async def _offer_merge(self, node: Node) -> None:
        head, replica = node.driver.head, node.replica
        if node.driver.pending is not None or head.final:
            return
        fragment = head.fragment(self._parts.manifest.outer.fragments)
        slow_N, tail = replica.anchors[fragment], self._parts.tail(fragment)
        encoded = await node.driver.state.offload(replica.merge_codec.encode, slow_N, {}, replica.shapes(fragment))
        kind = FrameKind.MERGE
        offered = Contribution(fragment, head.hash, slow_N, slow_N, 0, 0, kind=kind, encoded=encoded, tail=tail)
        await node.driver.contribute(offered)


def _is_over(head: Head) -> bool:
    """Whether the last commit is applied: while it is, the head has no anchor, and the replica is still the old one."""
    return head.final and head.anchor is not None
