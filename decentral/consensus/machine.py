"""The round protocol as a state machine: messages, timers and frames in; effects out. No I/O, no clock, no task.

*Who decides that a round is committed.* No single peer does. One round is one single-decree Paxos over the record that
names its frames: the leader of a ballot proposes a record (`leader`), every voter that holds all frames named in it
accepts it durably and signs (`voter`), and the record with the signatures of a majority is the commit: the leader
counts them (`Ballot.elect` in `paxos`), everybody checks them (`learner`).

*Why two peers cannot decide differently.* Any two majorities share a voter. Before a later ballot proposes anything,
its leader asks a majority what it accepted, and must carry on the record that may have been chosen
(`Ballot.bound_value` in `paxos`); who promised a ballot accepts nothing of a lower one (`Acceptor`, made durable before
any answer leaves). Every record names its predecessor by hash, so equal heads mean equal histories. The exception is
said aloud: when a majority is given up, the few who are left go on, and branches are compared when they meet (`chain`).

*Where to look when a round hangs.* Everything is level triggered: each event updates the state, and ``_progress`` then
asks what can be done now, so lost, late and repeated messages cost time and nothing else. Nothing is proposed: see
``_frames_ready`` in `leader` (who is waited for) and ``ballot_in_charge`` in `voter` (who should lead). No votes come:
see ``vote`` in `voter`, of which each ``return`` is a reason, and ``may_vote`` in `round_state`. A commit is here and
not applied: see ``finish`` in `learner` (a named frame is missing); decided and not applied, which holds up all that
follows: the disk or the outer step (`decentral.rounds.commits`). The effects are carried out in
`decentral.rounds.driver`; a peer that is behind or on another branch is the work of `decentral.rounds.catch_up`.

Per round and peer: one offer to every member and one vote, ``119 N`` bytes; the leader sends every member a proposal of
``153 N`` and a commit of ``201 N`` bytes, ``354 N**2`` in all. Beyond 21 members a committee votes: offers are to
and of its members, proposals to them, and every voter passes on its share of a commit of ``153 N`` bytes.

Source: Lamport, "Paxos Made Simple", 2001; the fast first ballot is Multi-Paxos' implied promise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from decentral.consensus import leader, learner, voter
from decentral.consensus.chain import Head, Past
from decentral.consensus.learner import RECENT
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import FETCH_AFTER, CatchUpWith, Effect, Returning, RoundState, RoundTerms
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import Header
from decentral.wire.keys import Digest, PeerId, Signer

__all__ = ["TICK", "RoundMachine"]

_ALL_TRAIN_ALL: Mapping[PeerId, range] = {}

TICK = 0.25  # s between calls of tick: finer than any timer here needs


class RoundMachine:
    """The part of one peer in agreeing on the next record.

    Drive it with ``offer``, ``hold``, ``receive``, ``tick``, ``liveness``, ``unreachable``, ``note_applied``; carry out
    the returned effects in order. Raises PayloadError for a message that breaks a rule: drop it, the state is as
    before.
    """

    def __init__(
        self, signer: Signer, head: Head, terms: RoundTerms, now: float, acceptor: Acceptor | None = None
    ) -> None:
        self.state = RoundState(signer, head, terms, now, acceptor)

    @property
    def head(self) -> Head:
        """Return the head of this peer's chain."""
        return self.state.head

    def remember(self, past: Past) -> None:
        """Take up what a previous incarnation of this peer knew of the way to the head it stands at."""
        state = self.state
        for head in past.heads[:-1]:
            state.history.add(head)
        state.history.add(state.head)
        state.recent.update((commit.record.round, commit) for commit in past.commits[-RECENT:])
        for commit in past.commits[-RECENT:]:
            learner.note_who_was_active(state, commit)
        state.held.update((frame.hash, frame.header) for frame in past.frames if frame.header.round > state.head.round)

    def offer(self, offer: m.Offer, now: float) -> list[Effect]:
        """Tell whoever may lead that this peer's own contribution is ready; its frame is held already."""
        return self._progress(now) if learner.make_offer(self.state, offer, now) else []

    def hold(self, frame: Digest, header: Header, now: float) -> list[Effect]:
        """Hold a frame that arrived and was checked: signature, size, finite values."""
        state = self.state
        state.held[frame] = header
        state.unsent.note_frame(header.sender)
        state.round.ask_at.pop(frame, None)
        state.note_result(frame, header)
        return self._progress(now)

    def receive(self, sender: PeerId, message: m.Message, now: float) -> list[Effect]:
        """Take a message whose sender the transport has authenticated."""
        state = self.state
        state.presence.heard(sender)
        match message:
            case m.JoinRequest():
                learner.take_join(state, sender, message, now)
            case m.Farewell():
                learner.take_farewell(state, sender, message)
            case m.Behind():
                learner.take_behind(state, sender, message)
            case m.Commit():
                learner.take_commit(state, sender, message, now)
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
        parts: Mapping[PeerId, range] = _ALL_TRAIN_ALL,
    ) -> list[Effect]:
        """Name whose lease ran out, and whose did so long ago that the peer is given up. ``missed``: nothing is heard
        of them now; ``known``: have a live lease; ``parts``: the fragments of those that do not train all of them.
        """
        presence, said = self.state.presence, (expired, gone, missed, known, parts)
        if said == (presence.expired, presence.gone, presence.missed, presence.known, presence.parts):
            return []  # as most often: the tick before it has done what there was to do
        presence.expired, presence.gone, presence.missed, presence.known, presence.parts = said
        return self._progress(now)

    def listen_first(self, now: float, *, excused: bool, away: float = math.inf) -> None:
        """Listen only, after sleep, a restart, or another branch: this peer votes again when it has heard all members,
        or after a lease, or as long as it was ``away``. ``excused``: that was so long that the others could give it up.
        """
        self.state.returning = Returning(now, now + min(self.state.terms.lease, away), excused=excused)

    def unreachable(self, peer: PeerId, now: float) -> list[Effect]:
        """Note that a send to ``peer`` failed: it is not waited for until it speaks again."""
        self.state.presence.unreachable.add(peer)
        return self._progress(now)

    def tick(self, now: float) -> list[Effect]:
        """Do what is due as time has passed."""
        state = self.state
        if now - state.round.opened > FETCH_AFTER:
            ahead = [peer for peer, message in state.early if _round_of(message) > state.head.round + 1]
            # Who is named last is asked: the first member, if there is one.
            latest_first = reversed(dict.fromkeys(ahead))
            state.effects += map(CatchUpWith, sorted(latest_first, key=state.head.members.__contains__))
        learner.repeat_offer(state, now)
        return self._progress(now)

    def note_applied(self, anchor: Digest, now: float) -> list[Effect]:
        """Note that the newest record was applied; the anchor's digest is ``anchor``."""
        self.state.head = replace(self.state.head, anchor=anchor)
        return self._progress(now)

    def time_left(self, now: float) -> float | None:
        """Return the seconds in which this peer should offer what it has rather than come late; None while nothing
        presses.
        """
        return learner.time_left(self.state, now)

    def full_times(self) -> tuple[float, ...]:
        """Return the seconds that other members take for a full contribution."""
        return learner.full_times(self.state)

    def leave(self) -> m.Farewell:
        """Vote no more, until ``stay``; the others are to be told what is returned."""
        self.state.has_left = True
        return voter.last_word(self.state)

    def stay(self) -> None:
        """Vote again."""
        self.state.has_left = False

    def _take_round_message(self, sender: PeerId, message: m.Message, now: float) -> None:
        """Act upon a message of the round in progress, and on no other."""
        state, head, round_ = self.state, self.state.head, _round_of(message)
        if learner.has_crossed(state, round_, now):
            return
        if round_ <= head.round:
            learner.help_laggard(state, sender, round_ - 1)
        elif round_ > head.round + 1:
            state.early.keep(sender, message, head.members)
        elif sender in head.members and _epoch_of(message) == head.epoch:
            self._dispatch(sender, message, now)

    def _dispatch(self, sender: PeerId, message: m.Message, now: float) -> None:
        state = self.state
        match message:
            case m.Offer():
                learner.take_offer(state, sender, message, now)
            case m.Prepare():
                voter.take_prepare(state, sender, message)
            case m.Proposal():
                voter.take_proposal(state, sender, message)
            case m.ReducePlan():
                voter.take_plan(state, sender, message)
            case m.Promise():
                leader.take_promise(state, sender, message)
            case m.Vote():
                leader.take_vote(state, sender, message)
            case m.Missing():
                leader.take_missing(state, sender, message)
            case m.Refusal():
                voter.take_refusal(state, sender, message)

    def _progress(self, now: float) -> list[Effect]:
        """Do what can be done now; return what is to be carried out."""
        state = self.state
        self._look_whether_back(now)
        self._finish(now)
        if state.decided is None and state.head.anchor is not None and not state.head.final:
            voter.answer_prepares(state, now)
            voter.vote(state, now)
            voter.end_refused(state, now)
            learner.count_farewells(state, now)
            if state.decided is None:
                leader.lead(state, now)
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
        if not learner.finish(self.state, now):
            return
        for peer, message in self.state.early.take_all():
            with suppress(PayloadError):  # its sender was wrong, not the commit that we are finishing
                if isinstance(message, m.Farewell):
                    learner.take_farewell(self.state, peer, message)
                else:
                    self._take_round_message(peer, message, now)


def _round_of(message: m.Message) -> int:
    return message.record.round if isinstance(message, m.Proposal) else int(getattr(message, "round", 0))


def _epoch_of(message: m.Message) -> int:
    return message.record.epoch if isinstance(message, m.Proposal) else int(getattr(message, "epoch", 0))
