"""The metrics of rounds: one peer's view of the contributions that commits name, as events and figures.

Nothing is sent or decoded for it: a frame was measured when it was checked, the mean was made for the outer step. In a
gather every peer sees all, in a reduce an owner its part of all. Figures are made between two waits of the loop, from
what is there. The run does not depend on them: what goes wrong here is written to the log, and the round goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.chain import contributions
from decentral.replica.contribution import Contribution
from decentral.replica.figures import DEBT_RATIO, NEVER_SENT, Figures
from decentral.replica.measures import (
    Coverage,
    Distances,
    Measure,
    Scrutiny,
    compare,
    compare_losses,
    compare_two,
    ratio,
)
from decentral.replica.pair_step import GossipStep
from decentral.replica.replica import OuterStep
from decentral.replica.weights import contributors_of
from decentral.rounds.local_state import LocalState
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId
from decentral.wire.messages import Record

# Shape suffixes: N = elements of one fragment, C = channels; flat float32.

logger = logging.getLogger("decentral.rounds")


class RoundMetrics:
    """The view of one peer of the rounds that it commits, and of the pairs that it meets."""

    def __init__(self, state: LocalState) -> None:
        self.state, self._scrutiny = state, Scrutiny()
        self._coverage = Coverage(state.replica.samples)
        self._distances = Distances()
        self._fails = False  # it has been said

    def measured(self, record: Record, step: OuterStep | None) -> Mapping[PeerId, Measure] | None:
        """Return what the round measured itself: of estimates, or of the slices of a part of ours; None: nothing."""
        told = {} if step is None else step.measures
        return told or self.state.sums.measured.get((record.round, record.plan))

    async def name_peers(
        self, record: Record, frames: Mapping[bytes, Frame], known: Mapping[PeerId, Measure] | None
    ) -> None:
        """Tell of outliers and twins."""
        state = self.state
        if record.contributors or known:
            measured = known or {}
        else:
            named = _pair_frames(record, frames)
            measured = {peer: await state.offload(state.replica.contents.measure, frame) for peer, frame in named}
        for event, fields in self._scrutiny.events(record, measured):
            state.on_event(event, fields)

    def at_round(
        self, record: Record, frames: Mapping[bytes, Frame], step: OuterStep | None, mine: Contribution | None
    ) -> None:
        """Tell the figures of a commit, once its debts are booked; ``mine``: this peer's contribution, if named."""
        if step is not None and not self.state.gossips:  # whose one commit merges replicas
            self._tell(lambda: self._figures(record, frames, step, mine))

    def at_pair(self, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor, taken: GossipStep) -> None:
        """Tell the figures of a gossip step that a pair took, before it is booked."""
        self._tell(lambda: self._pair_figures(mine, mine_CN, theirs_CN, taken))

    # ---- figures ----

    def _figures(
        self, record: Record, frames: Mapping[bytes, Frame], step: OuterStep, mine: Contribution | None
    ) -> Figures:
        measures = self._measures(record, frames, step)
        method = self.state.replica.method
        values = {} if method.summary.divides else compare(measures)
        values |= compare_losses(
            method, contributors_of(contributions(record), record.outer_step, len(self._coverage.samples))
        )
        if step.came_S is not None:
            self._coverage.add(step.fragment, step.came_S)
        learnt_S = None if mine is None else mine.change_at(self._coverage.samples[step.fragment])
        values |= self._of_fragment(step.fragment, self.state.replica.feedback[step.fragment], learnt_S)
        return Figures(record.outer_step + 1, len(measures), self._coverage.rounds, bool(record.contributors), values)

    def _pair_figures(self, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor, taken: GossipStep) -> Figures:
        due, fragment = self.state.replica.due(taken.step), taken.fragment
        values = compare_two(due, mine_CN, theirs_CN, self._coverage.samples[fragment])
        if not due[0].is_replica:
            changes = [sent_CN.view(len(due), -1)[0] for sent_CN in (mine_CN, theirs_CN)]
            self._coverage.add(fragment, *map(self._coverage.samples[fragment].nonzero, changes))
        values |= self._of_fragment(
            fragment, taken.feedback, self._coverage.samples[fragment].of(mine.gradient_N)
        ) | self._distances.add(taken.disagreement)
        return Figures(taken.step + 1, 2, self._coverage.rounds, False, values)

    def _of_fragment(self, fragment: int, books: Mapping[str, Tensor], learnt_S: Tensor | None) -> dict[str, float]:
        """Return the residual over what was learnt, and the share that was never sent."""
        sample = self._coverage.samples[fragment]
        owes = None if learnt_S is None or DEBT not in books else ratio(sample.of(books[DEBT]), learnt_S)
        found = {DEBT_RATIO: owes, NEVER_SENT: self._coverage.never_sent}
        return {name: value for name, value in found.items() if value is not None}

    def _measures(self, record: Record, frames: Mapping[bytes, Frame], step: OuterStep) -> Sequence[Measure]:
        """Return the measures of the contributors, in the record's order: all of them, or none."""
        known = self.measured(record, step)
        if known is None and not record.contributors:
            found = self.state.replica.contents.unpacked.measures
            known = {
                peer: one for peer, frame in _pair_frames(record, frames) if (one := found.get(frame.hash)) is not None
            }
        peers = [ref.peer for ref in contributions(record)]
        return [known[peer] for peer in peers] if known and all(peer in known for peer in peers) else []

    def _tell(self, make: Callable[[], Figures]) -> None:
        try:
            self.state.on_figures(make())
        except Exception:
            if not self._fails:
                logger.exception("the figures of a round could not be made; training is not affected")
            self._fails = True


def _pair_frames(record: Record, frames: Mapping[bytes, Frame]) -> list[tuple[PeerId, Frame]]:
    named = [(ref.peer, frames[ref.frame]) for ref in record.frames]
    return [(peer, frame) for peer, frame in named if frame.header.kind == FrameKind.CONTRIBUTION]
