"""Brings into the live model what the swarm decided, and notes what follows from it; alike in all algorithms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from decentral.rounds.local_state import CommittedUpdate
from decentral.training.loop_parts import LoopParts
from decentral.training.processes.orders import undisturbed
from decentral.training.starting_over import anchors_without_debt

LOOK_EVERY = 0.2  # s to wait for the next commit at a time: Ctrl-C must get through on every platform


class Merger:
    """What came of the commits so far, and the ways in which the live model takes them over."""

    def __init__(self, parts: LoopParts) -> None:
        self._parts = parts
        self._model, self._schedule, self._swarm = parts.model, parts.schedule, parts.swarm
        self.done = False  # nothing that this peer learns can count any more
        self.must_save = False  # the last checkpoint has what was given up meanwhile
        self.restarts = 0  # after NaN, since a commit named this peer last
        self._to_adopt: dict[int, tuple[Mapping[str, Tensor], frozenset[str]]] = {}  # by fragment: state and channels

    @property
    def is_up_to_date(self) -> bool:
        """Whether every commit so far is in the live model."""
        return not self._swarm.has_updates

    async def merge_all(self, until: float | None = None) -> set[int]:
        """Merge every commit whose time has come; wait for our own contribution's fate ``until`` then.

        Returns the fragments that were written.
        """
        changed: set[int] = set()
        while True:
            changed |= await self.merge_waiting(LOOK_EVERY if until is not None else 0.0)
            in_flight = self._schedule.sent_at is not None and not self.done and self._swarm.alive
            late = until is None or self._parts.clock() >= until
            if late or not in_flight or self._parts.control.leaving:
                return changed

    async def merge_waiting(self, within: float) -> set[int]:
        """Merge every commit whose time has come; where there is none, wait for one, at most so many seconds."""
        changed: set[int] = set()
        while (update := await self.next_update(within)) is not None:
            within = 0.0
            with self._parts.holding():
                changed |= self._merge(update)
            self.note(update)
        self._adopt()
        return changed

    def _merge(self, update: CommittedUpdate) -> set[int]:
        """Into the live model; the fragments that were written.

        All of it, whenever Ctrl-C comes: of a model that was half written the last checkpoint would take what the
        others learnt, and this model has not, for progress backwards.
        """
        with undisturbed():
            if not self._schedule.merge(update, self._model):
                return set()
            self._parts.take_buffers(update.buffers_B)
            self._will_adopt(update.fragment, update.state, update.channels)
        return {update.fragment}

    async def next_update(self, within: float) -> CommittedUpdate | None:
        """Take the oldest commit off the queue; None when there is none whose time comes within so many seconds."""
        return await self._swarm.next_update(within, self._schedule.may_merge)

    def adopt_all(self, fragments: Iterable[int]) -> None:
        """The inner optimizer has no moments there, or those of another time: it takes the shared state's."""
        channels = frozenset(channel.name for channel in self._schedule.method.channels())
        self.adopt_later(dict.fromkeys(fragments, channels))

    def adopt_later(self, channels: Mapping[int, Iterable[str]]) -> None:
        """After the next inner step, by fragment the channels to take from the shared state as it is now."""
        replica = self._swarm.node.replica
        for fragment, names in channels.items() if self._schedule.method.inner else ():
            self._will_adopt(fragment, replica.states[fragment], frozenset(names))

    def _will_adopt(self, fragment: int, state: Mapping[str, Tensor], channels: frozenset[str]) -> None:
        if state and channels:
            before = self._to_adopt[fragment][1] if fragment in self._to_adopt else frozenset()
            self._to_adopt[fragment] = (state, before | channels)
            self._schedule.unadopted[fragment] = sorted(before | channels)

    def _adopt(self) -> None:
        """Into the inner optimizer; what that has no place for yet waits for its next step."""
        method, live = self._schedule.method, self._schedule.live
        for fragment, (state, channels) in list(self._to_adopt.items()):
            if method.adopt(state, live, fragment, channels):
                del self._to_adopt[fragment], self._schedule.unadopted[fragment]

    def note(self, update: CommittedUpdate) -> None:
        """Events of a merged commit; the end of the run."""
        record = update.record
        if update.adopted:
            self.must_save = True  # the last checkpoint is of a branch, or a time, that this peer has left
        if record is None:
            return
        self._parts.events.round_ended(update, of_pairs=self._swarm.node.gossip is not None)
        if update.contribution is not None:
            self.restarts = 0
        if record.final and self._swarm.node.gossip is None:
            self.done = True

    def tell_given_up(self) -> None:
        """Say what absences cost."""
        for away in self._schedule.given_up:
            self._parts.events.away(away)
        self._schedule.given_up.clear()

    async def start_over(self, fragments: Sequence[int], forget: Sequence[int]) -> set[int]:
        """Put fragments to the anchor, and forget what some owe; none when a commit comes in just now."""
        fresh = await self._swarm.call(anchors_without_debt, self._swarm.node, self._schedule.seen, forget)
        if fresh is None:
            return set()
        with undisturbed():
            self._schedule.restart(self._model, fresh.anchors, fragments, fresh.debts)
            self.adopt_all(fragments)
            if 0 in fragments:  # which carries them
                self._parts.take_buffers(fresh.buffers_B)
            self.must_save = True
        return set(fragments)

    def stand_at_replica(self) -> set[int]:
        """In gossip, after an absence: the live model becomes this peer's replica, often a copy of another's by now."""
        replica = self._swarm.node.replica
        with undisturbed():
            self._schedule.restart(self._model, replica.anchors, self._parts.all_fragments)
            self.adopt_all(self._parts.all_fragments)
            self._parts.take_buffers(replica.shared_buffers(0))
            self.must_save = True
        return set(self._parts.all_fragments)

    def end_at_replica(self) -> set[int]:
        """The run is over: the live model becomes what it made."""
        replica = self._swarm.node.replica
        with undisturbed():
            for fragment, anchor_N in enumerate(replica.anchors):
                self._schedule.put(self._model, fragment, anchor_N)
            self._parts.take_buffers(replica.shared_buffers(0))
            self.done = True
        return set(self._parts.all_fragments)
