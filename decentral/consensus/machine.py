"""The round protocol as a state machine: messages, timers and frames in; effects out. No I/O, no clock, no task.

One round is one single-decree Paxos over the record that names its frames. The value is proposed by the leader
of a ballot, voted on by every voter that holds all named frames, and decided by a majority of them. Level
triggered: every event updates the state and then asks "what can be done now", so lost, late and repeated
messages cost time and nothing else.

Per round and peer: one offer to every member and one vote, ``119 N`` bytes; the leader sends every member a proposal of
``153 N`` and a commit of ``201 N`` bytes, ``354 N**2`` in all. Beyond 21 members a committee votes: offers are to
and of its members, proposals to them, and every voter passes on its share of a commit of ``153 N`` bytes.

Source: Lamport, "Paxos Made Simple", 2001; the fast first ballot is Multi-Paxos' implied promise.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

from decentral.consensus.chain import Head, Past
from decentral.consensus.leader import Leader
from decentral.consensus.learner import RECENT, Attendance, Learner, Offers
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import FETCH_AFTER, CatchUpWith, Effect, Returning, RoundState, RoundTerms
from decentral.consensus.voter import Retrieval, Succession, Voter
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import Header
from decentral.wire.keys import Digest, PeerId, Signer

__all__ = ["TICK", "RoundMachine"]

TICK = 0.25  # s between calls of tick: finer than any timer here needs


class RoundMachine:
    """One peer's part in agreeing on the next record.

    Drive it with ``offer``, ``hold``, ``receive``, ``tick``, ``liveness``, ``unreachable``, ``applied``; carry out the
    returned effects in order. Raises PayloadError for a message that breaks a rule: drop it, the state is as before.
    """

    def __init__(
        self, signer: Signer, head: Head, terms: RoundTerms, now: float, acceptor: Acceptor | None = None
    ) -> None:
        self.state = state = RoundState(signer, head, terms, now, acceptor)
        retrieval, succession = Retrieval(state), Succession(state)
        self._attendance = Attendance(state)
        self._offers, self._succession = Offers(state, succession), succession
        self._voter = Voter(state, retrieval)
        self._leader = Leader(state, self._voter, retrieval, succession)
        self._learner = Learner(state, retrieval, self._attendance)

    @property
    def head(self) -> Head:
        """Where this peer's chain stands."""
        return self.state.head

    def remember(self, past: Past) -> None:
        """Take up what a previous incarnation of this peer knew of the way to the head it stands at."""
        state = self.state
        for head in past.heads[:-1]:
            state.history.add(head)
        state.history.add(state.head)
        state.recent.update((commit.record.round, commit) for commit in past.commits[-RECENT:])
        for commit in past.commits[-RECENT:]:
            self._attendance.note_who_was_active(commit)
        state.held.update((frame.hash, frame.header) for frame in past.frames if frame.header.round > state.head.round)

    def offer(self, offer: m.Offer, now: float) -> list[Effect]:
        """This peer's own contribution is ready; its frame is held already. Tell whoever may lead."""
        return self._progress(now) if self._offers.offer(offer, now) else []

    def hold(self, frame: Digest, header: Header, now: float) -> list[Effect]:
        """A frame arrived and was checked: signature, size, finite values."""
        state = self.state
        state.held[frame] = header
        state.unsent.came(header.sender)
        state.round.ask_at.pop(frame, None)
        state.note_result(frame, header)
        return self._progress(now)

    def receive(self, sender: PeerId, message: m.Message, now: float) -> list[Effect]:
        """Take a message whose sender the transport has authenticated."""
        self.state.presence.heard(sender)
        match message:
            case m.JoinRequest():
                self._attendance.take_join(sender, message, now)
            case m.Farewell():
                self._attendance.take_farewell(sender, message)
            case m.Behind():
                self._attendance.take_behind(sender, message)
            case m.Commit():
                self._learner.take_commit(sender, message, now)
            case (
                m.Offer()
                | m.ReducePlan()
                | m.Proposal()
                | m.Vote()
                | m.Prepare()
                | m.Promise()
                | m.Missing()
                | m.Refusal()
            ):
                self._take_round_message(sender, message, now)
        return self._progress(now)

    def liveness(
        self,
        expired: frozenset[PeerId],
        gone: frozenset[PeerId],
        now: float,
        *,
        missed: frozenset[PeerId] = frozenset(),
        known: frozenset[PeerId] = frozenset(),
    ) -> list[Effect]:
        """Name whose lease ran out, and whose did so long ago that the peer is given up. ``missed``: nothing is heard
        of them now; ``known``: have a live lease.
        """
        presence = self.state.presence
        if (expired, gone, missed, known) == (presence.expired, presence.gone, presence.missed, presence.known):
            return []  # as most often: the tick before it has done what there was to do
        presence.expired, presence.gone, presence.missed, presence.known = expired, gone, missed, known
        return self._progress(now)

    def came_back(self, now: float, *, excused: bool, away: float = math.inf) -> None:
        """This peer slept, was restarted, or left another branch: it votes again when it has heard all members, or
        after a lease, or as long as it was ``away``. ``excused``: that was so long that the others could give it up.
        """
        self.state.returning = Returning(now, now + min(self.state.terms.lease, away), excused=excused)

    def unreachable(self, peer: PeerId, now: float) -> list[Effect]:
        """A send to ``peer`` failed: do not wait for it until it speaks again."""
        self.state.presence.unreachable.add(peer)
        return self._progress(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        state = self.state
        if now - state.round.opened > FETCH_AFTER:
            ahead = [peer for peer, message in state.early if _round_of(message) > state.head.round + 1]
            # Who is named last is asked: the first member, if there is one.
            latest_first = reversed(dict.fromkeys(ahead))
            state.effects += map(CatchUpWith, sorted(latest_first, key=state.head.members.__contains__))
        self._offers.repeat(now)
        return self._progress(now)

    def applied(self, anchor: Digest, now: float) -> list[Effect]:
        """The newest record was applied; the anchor's digest is ``anchor``."""
        self.state.head = replace(self.state.head, anchor=anchor)
        return self._progress(now)

    def time_left(self, now: float) -> float | None:
        """Seconds in which this peer should offer what it has rather than come late; None while nothing presses."""
        return self._offers.time_left(now)

    def full_times(self) -> tuple[float, ...]:
        """Seconds that other members take for a full contribution."""
        return self._offers.full_times()

    def leave(self) -> m.Farewell:
        """Vote no more, until ``stay``; the others are to be told what is returned."""
        self.state.has_left = True
        return self._voter.last_word()

    def stay(self) -> None:
        """Vote again."""
        self.state.has_left = False

    def _take_round_message(self, sender: PeerId, message: m.Message, now: float) -> None:
        """Only what is said of the round in progress is acted upon."""
        head, round_ = self.state.head, _round_of(message)
        if self._attendance.crossed(round_, now):
            return
        if round_ <= head.round:
            self._attendance.help_laggard(sender, round_ - 1)
        elif round_ > head.round + 1:
            self.state.early.keep(sender, message, head.members)
        elif sender in head.members and _epoch_of(message) == head.epoch:
            self._dispatch(sender, message, now)

    def _dispatch(self, sender: PeerId, message: m.Message, now: float) -> None:
        match message:
            case m.Offer():
                self._offers.take_offer(sender, message, now)
            case m.Prepare():
                self._voter.take_prepare(sender, message)
            case m.Proposal():
                self._voter.take_proposal(sender, message)
            case m.ReducePlan():
                self._voter.take_plan(sender, message)
            case m.Promise():
                self._leader.take_promise(sender, message)
            case m.Vote():
                self._leader.take_vote(sender, message)
            case m.Missing():
                self._leader.take_missing(sender, message)
            case m.Refusal():
                self._voter.take_refusal(sender, message)

    def _progress(self, now: float) -> list[Effect]:
        """Do what can be done now; what is to be carried out."""
        state = self.state
        self._look_whether_back(now)
        self._finish(now)
        if state.decided is None and state.head.anchor is not None and not state.head.final:
            self._voter.answer_prepares(self._succession, now)
            self._voter.vote(now)
            self._voter.end_refused(now)
            self._learner.count_farewells(now)
            if state.decided is None:
                self._leader.lead(now)
            self._finish(now)
        effects, state.effects = state.effects, []
        return effects

    def _look_whether_back(self, now: float) -> None:
        state = self.state
        others = (peer for peer in state.head.members if peer != state.me)
        if state.returning is not None and state.returning.is_over(others, now):
            state.returning = None

    def _finish(self, now: float) -> None:
        """Decide, if it is time, and take what was said too early of the round that is open then."""
        if not self._learner.finish(now):
            return
        for peer, message in self.state.early.take_all():
            with suppress(PayloadError):  # its sender was wrong, not the commit that we are finishing
                if isinstance(message, m.Farewell):
                    self._attendance.take_farewell(peer, message)
                else:
                    self._take_round_message(peer, message, now)


def _round_of(message: m.Message) -> int:
    return message.record.round if isinstance(message, m.Proposal) else int(getattr(message, "round", 0))


def _epoch_of(message: m.Message) -> int:
    return message.record.epoch if isinstance(message, m.Proposal) else int(getattr(message, "epoch", 0))
