"""What a leader that is free proposes: the record of what was offered, and before it the plan of a reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decentral.consensus.ballot import Ballot, Partition, Planned, results_of
from decentral.consensus.collection import references
from decentral.consensus.effects import SendSlices
from decentral.consensus.roles.readiness import Readiness
from decentral.consensus.round_state import RoundState
from decentral.wire import messages as m
from decentral.wire.keys import PeerId


class RecordBuilder:
    """Makes the value of a ballot."""

    def __init__(self, state: RoundState, readiness: Readiness) -> None:
        self._state, self._readiness = state, readiness

    def new_record(self, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
        """The record to propose; None while it is too early, or while a reduce is under way."""
        state = self._state
        if not self._readiness.frames_ready(usable, now):
            return self._record() if self._readiness.membership_due() else None
        if not state.reduces:
            return self._record(frames=references(usable, state.round.offers))
        return self._reduced_record(leading, usable, now)

    def carried_on(self, bound: m.Record) -> m.Record:
        """A value that may be chosen. By the few who are left it must also say who was given up: were it chosen before,
        one of those would have voted for it; that peer re-syncs if it returns. So it is when those who were to vote on
        it were few, and are gone, while others are back whom it drops: nobody could vote for it as it is.
        """
        if self._state.presence.is_majority_here(self._state.terms.voting.voters_on(bound)):
            return bound
        return replace(bound, next_members=self._state.next_members())

    def _reduced_record(self, leading: Ballot, usable: Sequence[PeerId], now: float) -> m.Record | None:
        """Plan the reduce, wait for every owner's result, re-plan without those who let it down."""
        state, planned = self._state, leading.planned
        absent = [peer for peer in state.head.members if not state.presence.present(peer)]
        if planned is not None:
            frames = results_of(planned.plan, state.results)
            if frames is not None:
                plan = planned.plan
                return self._record(frames, plan.contributors, plan.partition, plan.number)
            if not planned.failed(absent, state.patience(), now):
                return None
        plan = self._plan(leading, usable, absent)
        if planned is not None and planned.asks_the_same(plan) and not planned.late(state.patience(), now):
            return None  # nobody else is there: told again at once, it would fail again at once, and so on
        leading.planned = Planned(plan, now)
        state.planned_number = plan.number
        state.carries_out(plan)
        state.broadcast(plan)
        state.effects.append(SendSlices(plan))
        return None

    def _plan(self, leading: Ballot, usable: Sequence[PeerId], absent: Sequence[PeerId]) -> m.ReducePlan:
        state, dropped = self._state, set(absent)
        if leading.planned is not None:
            dropped |= leading.planned.blamed or leading.planned.silent_owners(state.results, state.me)
        peers = [peer for peer in usable if peer not in dropped] or usable[:1]
        assert state.terms.partition is not None
        fragment = state.head.fragment(state.terms.num_fragments)
        return m.ReducePlan(
            state.head.epoch,
            state.head.round + 1,
            leading.ballot,
            leading.next_plan_number(),
            references(peers, state.round.offers),
            state.terms.partition(fragment, tuple(sorted(peers))),
        )

    def _record(
        self,
        frames: tuple[m.FrameRef, ...] = (),
        contributors: tuple[m.FrameRef, ...] = (),
        partition: Partition = (),
        plan: int = 0,
    ) -> m.Record:
        state, head = self._state, self._state.head
        assert head.anchor is not None
        last = bool(frames) and (head.outer_step + 1 >= state.terms.rounds or state.terms.clock.is_up)
        return m.Record(
            run=head.run,
            epoch=head.epoch,
            round=head.round + 1,
            outer_step=head.outer_step,
            fragment=head.fragment(state.terms.num_fragments),
            plan=plan,
            previous=head.hash,
            base=head.anchor,
            members=head.members,
            frames=frames,
            contributors=contributors,
            partition=partition,
            next_members=state.next_members(),
            final=last,
        )
