"""What happens at a step boundary: merge the commits that came, contribute when due, wait when the algorithm waits.

Runs on the training thread of a peer's main process. The synchronous family offers to a round that all agree on; the
gossip family swaps with one partner and ends with one merge of all replicas.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Literal

from torch import Tensor

from decentral.consensus.chain import Head
from decentral.errors import DecentralError, NonFiniteError
from decentral.manifest import Manifest
from decentral.node.node import Node
from decentral.replica.contribution import Contribution
from decentral.rounds.driver import CommittedUpdate
from decentral.rounds.gossip import UNDECIDED, Swapped
from decentral.training.live_model import LiveModel
from decentral.training.reporting import Reporter
from decentral.training.starting_over import RESTARTS, anchors_without_debt
from decentral.training.swarm_thread import SwarmThread
from decentral.training.sync_schedule import SyncSchedule
from decentral.wire.frames import FrameKind

SWAP_SLACK = 1.0  # s beyond the time in which a pair decides
ADVANCE_WITHIN = 0.2  # s to wait for the next commit at a time


class OuterLoop(ABC):
    """The training side of rounds; ``Peer`` adds beginning, end and durability."""

    manifest: Manifest
    done: bool
    _model: LiveModel
    _rhythm: SyncSchedule
    _reporter: Reporter
    _paused: bool
    _leaving: bool
    _tokens_per_step: int
    _gossips: bool
    _checkpoint_every: int
    _must_save: bool
    _left_at: float  # monotonic seconds, when the last boundary ended
    _on_nan: Literal["stop", "restart"]
    _swap: tuple[int, Future[Swapped]] | None  # fragment and outcome of the gossip step in progress
    _restarts: int  # after NaN, since a commit named this peer last
    _forgets: bool  # whether all ranks are to drop inner moments that are NaN

    @property
    @abstractmethod
    def swarm(self) -> SwarmThread:
        """The swarm side; only the main process has one."""

    @abstractmethod
    def _save(self) -> bool:
        """Write a checkpoint; False when this is no moment for one."""

    @property
    def _rests(self) -> bool:
        """Whether contributions are held back: by a person, or because the day's upload is used up."""
        return self._paused or bool(self.swarm.node.resting)

    def _step_boundary(self) -> set[int]:
        """What is to be done after an inner step; returns the fragments that were written.

        Raises NonFiniteError, which names the parameter, unless the live model is to be put back to the anchor then.
        """
        try:
            changed = self._gossip_boundary() if self._gossips else self._boundary()
            self._tell_given_up()
            return changed | self._end_if_over()
        except NonFiniteError as error:
            self._rhythm.withdrawn()
            if self._on_nan == "stop" or self._restarts == RESTARTS:
                raise
            return self._restart_after_nan(error)

    def _boundary(self) -> set[int]:
        """Merge what has come, contribute when due, wait when the algorithm waits."""
        step_seconds = time.monotonic() - self._left_at
        changed = self._merge_all(block_until=None)
        due = self._rhythm.due or self._rhythm.due_early(self.swarm.node.driver.pressed, step_seconds)
        due = due and not self._rests and not self.done
        if due and self._rhythm.overlap == 0 and self.swarm.node.driver.head.hash != self._rhythm.seen:
            changed |= self._catch_advance()
        if due and self._contribute(changed) and self._rhythm.overlap == 0:
            self._reporter.waits(True)
            changed |= self._merge_all(block_until=time.monotonic() + self._patience())
            self._reporter.waits(False)
        self._checkpoint_if_due(changed)
        self._left_at = time.monotonic()
        return changed

    def _catch_advance(self) -> set[int]:
        """Merge a commit that the swarm's thread is about to hand over: without it nothing can be contributed.

        A peer that went on instead made one more inner step, alone, when it met a membership change at its boundary.
        """
        self._take_advances(time.monotonic() + ADVANCE_WITHIN)
        return self._merge_all(block_until=None)

    def _patience(self) -> float:
        """How long a round may hold the training thread: ceiling and frames, and as long again for the vote."""
        return 2.0 * (self.manifest.swarm.deadline_ceiling + self.swarm.node.driver.allowed)

    def _contribute(self, changed: set[int]) -> bool:
        """Take the fragment whose turn it is and offer it; False when the chain is elsewhere just now, or when this
        peer was away for too long and starts from the anchor: what that writes is added to ``changed``.
        """
        node = self.swarm.node
        head = node.driver.head
        if head.anchor is None or head.hash != self._rhythm.seen or not node.driver.is_member:
            return False
        self._model.check_trained()
        fragment = head.fragment(self.manifest.outer.fragments)
        anchor_N = node.replica.anchors[fragment]
        contribution = self._rhythm.take(self._model, fragment, anchor_N, head.hash, self._tokens_per_step)
        if contribution is None:
            dropped = self._rhythm.away_too_long(fragment)
            changed |= self._start_over(dropped, forget=dropped)
            return False
        contribution.tail = self._tail(fragment)
        node.replica.check_finite(fragment, contribution.gradient_N)  # here, where an error reaches the loop
        offered = self.swarm.begin(node.driver.contribute, contribution)
        if self._rhythm.overlap == 0 and not offered.result():
            self._rhythm.withdrawn()
            return False
        offered.add_done_callback(self._withdraw_if_refused)
        return True

    def _start_over(self, fragments: list[int], forget: list[int]) -> set[int]:
        """Put fragments to the anchor, and forget what some owe; none when a commit comes in just now."""
        standing = self.swarm.call(anchors_without_debt, self.swarm.node, self._rhythm.seen, forget)
        if standing is None:
            return set()
        anchors, buffers_B = standing
        self._rhythm.restart(self._model, anchors, fragments)
        if 0 in fragments:  # which carries them
            self._take_buffers(buffers_B)
        self._must_save = True  # the last checkpoint still has what was given up
        return set(fragments)

    def _restart_after_nan(self, error: NonFiniteError) -> set[int]:
        """The user asked for it: all of the live model to the anchor, and on with fresh moments where they are NaN.

        What is owed is of contributions before, and finite: it stays.
        """
        written = self._start_over(list(range(len(self._model.schema.fragments))), forget=[])
        if written:
            self._restarts += 1
            self._forgets = True
            self._reporter.restarted(str(error))
            self._rhythm.given_up.clear()
        return written

    def _tell_given_up(self) -> None:
        for away in self._rhythm.given_up:
            self._reporter.away(away)
        self._rhythm.given_up.clear()

    def _tail(self, fragment: int) -> bytes:
        """This peer's buffers as they are now, where ``fragment`` carries them."""
        tail = self.swarm.node.replica.tail
        return tail.pack(self._model.read_buffers()) if tail.nbytes(fragment) else b""

    def _take_buffers(self, buffers_B: Tensor | None) -> None:
        if buffers_B is not None:
            self._model.write_buffers(buffers_B)

    def _withdraw_if_refused(self, offered: Future[bool]) -> None:
        if offered.cancelled() or offered.exception() is not None or not offered.result():
            self._rhythm.withdrawn()

    def _merge_all(self, block_until: float | None) -> set[int]:
        """Merge every advance whose time has come; wait for our own contribution's fate until ``block_until``."""
        changed: set[int] = set()
        while True:
            self._take_advances(block_until)
            while (advance := self._rhythm.mergeable()) is not None:
                if self._rhythm.merge(advance, self._model):
                    changed.add(advance.fragment)
                    self._take_buffers(advance.buffers_B)
                self._note(advance)
            in_flight = self._rhythm.sent_at is not None and not self.done and self.swarm.alive
            if block_until is None or not in_flight or time.monotonic() >= block_until or self._leaving:
                return changed

    def _take_advances(self, block_until: float | None) -> None:
        advances = self.swarm.advances
        if block_until is not None and self.swarm.alive:
            try:
                self._rhythm.waiting.append(advances.get(timeout=ADVANCE_WITHIN))
            except queue.Empty:
                return
        while not advances.empty():
            self._rhythm.waiting.append(advances.get())

    def _note(self, advance: CommittedUpdate) -> None:
        """Events of a merged commit; the end of the run."""
        record = advance.record
        if record is None:
            self._must_save = True  # the last checkpoint is of a branch, or a time, that this peer has left
            return
        self._reporter.round_ended(advance)
        if advance.contribution is not None:
            self._restarts = 0
        if record.final and not self._gossips:
            self.done = True

    def _end_if_over(self) -> set[int]:
        """The end of the run for whom it was over before: it comes late, or was away; returns what was written.

        There is no round any more in which what this peer learnt meanwhile could count, so the live model becomes what
        the run made. Commits that are on their way are merged first, as any others.
        """
        node = self.swarm.node
        head = node.driver.head
        on_its_way = head.anchor is None or not self.swarm.advances.empty() or bool(self._rhythm.waiting)
        if self.done or not head.final or on_its_way:
            return set()
        if self._gossips and head.anchor != node.replica.digest and not self.swarm.call(node.follow_others):
            return set()  # in gossip a head comes without the replicas that were merged
        for fragment, anchor_N in enumerate(node.replica.anchors):
            self._rhythm.put(self._model, fragment, anchor_N)
        self._take_buffers(node.replica.shared_buffers(0))
        self._rhythm.seen, self.done = head.hash, True
        return set(range(len(self._model.schema.fragments)))

    def _gossip_boundary(self) -> set[int]:
        """Every H steps one gossip step; after the last one, the merge of all replicas."""
        changed = self._merge_all(block_until=None)
        node = self.swarm.node
        assert node.gossip is not None
        if not self._rhythm.due or self._rests or self.done or node.driver.head.final:
            return changed
        if self._rhythm.was_away and self.swarm.call(node.follow_others):
            return changed | self._stand_at_replica()
        self._model.check_trained()
        fragment = node.gossip.step % self.manifest.outer.fragments
        slow_N = node.replica.anchors[fragment]
        mine = self._rhythm.take(self._model, fragment, slow_N, node.driver.head.hash, self._tokens_per_step)
        if mine is None:  # merges at the run's end passed it by
            return changed | self._stand_at_replica()
        node.replica.check_finite(fragment, mine.gradient_N)
        self._reporter.waits(True)
        told = (-mine.gradient_N, mine.steps, mine.tokens, self._tail(fragment))
        self._swap = (fragment, self.swarm.begin(node.gossip.exchange, fragment, *told))
        self._end_swap()
        self._reporter.waits(False)
        if node.gossip.step >= self.manifest.run.rounds or node.driver.machine.time_is_up:
            return self._merge_replicas()
        self._checkpoint_if_due({fragment})
        return changed | {fragment}

    def _end_swap(self, within: float | None = None) -> None:
        """Wait for the outcome of the swap in progress, ``within`` seconds, and bring it into the live model.

        Ctrl-C ends the waiting and not the swap: the partner may take its half, so whoever saves asks here first.
        """
        if self._swap is None:
            return
        fragment, outcome = self._swap
        swapped = outcome.result(within)
        self._swap = None
        self._rhythm.swapped(self._model, fragment, swapped.after_N)
        self._take_buffers(swapped.buffers_B)
        self._reporter.swapped(swapped)

    def _end_swap_if_any(self) -> None:
        """Before the last checkpoint: a swap that Ctrl-C left is decided within seconds; else the one before stays."""
        with suppress(DecentralError, TimeoutError, CancelledError):
            self._end_swap(UNDECIDED + SWAP_SLACK)

    def _stand_at_replica(self) -> set[int]:
        """In gossip, after an absence: the live model becomes this peer's replica, often a copy of another's by now."""
        everything = list(range(len(self._model.schema.fragments)))
        replica = self.swarm.node.replica
        self._rhythm.restart(self._model, replica.anchors, everything)
        self._take_buffers(replica.shared_buffers(0))
        self._must_save = True
        return set(everything)

    def _merge_replicas(self) -> set[int]:
        """The end of a gossip run: one full average, agreed on like any other round."""
        node = self.swarm.node
        while not _is_over(node.driver.head) and not self._leaving:
            self.swarm.call(self._offer_merge, node)
            self._take_advances(time.monotonic() + 1.0)
            while (advance := self._rhythm.mergeable()) is not None:
                self._reporter.round_ended(advance) if advance.record is not None else None
        for fragment, anchor_N in enumerate(node.replica.anchors):
            self._rhythm.put(self._model, fragment, anchor_N)
        self._take_buffers(node.replica.shared_buffers(0))
        self.done = True
        return set(range(len(node.replica.anchors)))

    async def _offer_merge(self, node: Node) -> None:
        head = node.driver.head
        if node.driver.pending is not None or head.final:
            return
        fragment = head.fragment(self.manifest.outer.fragments)
        slow_N = node.replica.anchors[fragment]
        encoded = node.replica.merge_codec.encode(slow_N, {}, node.replica.shapes(fragment))
        offered = Contribution(
            fragment, head.hash, slow_N, slow_N, 0, 0, kind=FrameKind.MERGE, encoded=encoded, tail=self._tail(fragment)
        )
        await node.driver.contribute(offered)

    def _checkpoint_if_due(self, changed: set[int]) -> None:
        if self._must_save or (changed and self._rhythm.num_merged % self._checkpoint_every == 0):
            self._save()


def _is_over(head: Head) -> bool:
    """Whether the last commit is applied: while it is, the head has no anchor, and the replica is still the old one."""
    return head.final and head.anchor is not None
