"""The learner's part: a record that a majority voted for is decided, once every frame that it names is here."""

from __future__ import annotations

from dataclasses import replace

from decentral.consensus.chain import check_turn
from decentral.consensus.effects import CatchUpWith, Decide
from decentral.consensus.roles.attendance import Attendance
from decentral.consensus.roles.herald import Herald
from decentral.consensus.roles.retrieval import Retrieval
from decentral.consensus.round_state import RoundState
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit

RECENT = 256  # commits kept for peers that missed them or compare branches: 0.9 MB with 16 members


class Learner:
    """Finds out what was chosen, and moves on to the next round."""

    def __init__(self, state: RoundState, retrieval: Retrieval, attendance: Attendance) -> None:
        self._state, self._retrieval, self._attendance = state, retrieval, attendance
        self._herald = Herald(state)

    def take_commit(self, sender: PeerId, commit: Commit) -> None:
        """What somebody else says is decided. Raises PayloadError unless a majority signed it."""
        state, record = self._state, commit.record
        if record.round <= state.head.round or state.decided is not None:
            return
        if record.round > state.head.round + 1:
            state.effects.append(CatchUpWith(sender))
            return
        if state.succeeds(record, sender):
            check_turn(record, state.terms.num_fragments)
            state.terms.voting.check_certified(commit)
            state.decided = (sender, commit)
            self._herald.pass_on(sender, commit)

    def count_farewells(self, now: float) -> None:
        """Those who left may have chosen a record before; it is decided once every named frame is here."""
        state = self._state
        commit = state.farewells.elected(state.acceptor, state.signer)
        if commit is None:
            return
        told = commit.certificate.votes[0][0]
        if state.succeeds(commit.record, told) and self._retrieval.all_held(commit.record, told, now):
            self._herald.announce_found(commit)
            state.decided = (told, commit)

    def finish(self, now: float) -> bool:
        """Decide once every named frame is here: a commit is never applied by half. Whether it was done."""
        state = self._state
        if state.decided is None or state.head.anchor is None:
            return False
        sender, commit = state.decided
        if not state.succeeds(commit.record, sender):
            state.decided = None
            return False
        if not self._retrieval.all_held(commit.record, sender, now):
            return False
        state.effects.append(Decide(commit))
        self._keep(commit)
        self._attendance.note(commit)
        # Nothing more is decided before this is applied, whether it moves the anchor or not: two Decide in one list of
        # effects were carried out in the wrong order when the first one's ``applied`` led to a third.
        state.restart(replace(state.head.extended(commit.record), anchor=None), now)
        state.history.add(state.head)
        return True

    def _keep(self, commit: Commit) -> None:
        recent = self._state.recent
        recent[commit.record.round] = commit
        while len(recent) > RECENT:
            recent.popitem(last=False)
