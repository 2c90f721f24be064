"""The round protocol as a state machine: messages, timers and frames in; effects out. No I/O, no clock, no task.

One round is one single-decree Paxos over the record that names its frames. The value is proposed by the leader
of a ballot, voted on by every peer that holds all named frames, and decided by a majority of the epoch. Level
triggered: every event updates the state and then asks "what can be done now", so lost, late and repeated
messages cost time and nothing else.

Per round and peer: one offer to every member and one vote, ``110 N`` bytes; the leader sends every member a proposal of
``144 N`` and a commit of ``192 N`` bytes, ``336 N**2`` in all. Grows with N: groups bound it.

Source: Lamport, "Paxos Made Simple", 2001; the fast first ballot is Multi-Paxos' implied promise.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from decentral.consensus import chain
from decentral.consensus.chain import Digest
from decentral.consensus.effects import CatchUpWith, Decide, Effect
from decentral.consensus.history import Past
from decentral.consensus.leader import Leader
from decentral.consensus.round_state import FETCH_AFTER
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, Header
from decentral.wire.keys import PeerId

__all__ = ["TICK", "RoundMachine"]

TICK = 0.25  # s between calls of tick: finer than any timer here needs
_EARLY_STRANGERS = 32  # messages of later rounds kept of peers that are no members yet: 32 MiB, were all the largest
RECENT = 256  # commits kept for peers that missed them or compare branches: 0.8 MB with 16 members


class RoundMachine(Leader):
    """One peer's part in agreeing on the next record.

    Drive it with ``offer``, ``hold``, ``receive``, ``tick``, ``liveness``, ``unreachable``, ``applied``; carry out the
    returned effects in order. Raises PayloadError for a message that breaks a rule: drop it, the state is as before.
    """

    def remember(self, past: Past) -> None:
        """Take up what an earlier life of this peer knew of the way to the head it stands at."""
        for head in past.heads[:-1]:
            self.history.add(head)
        self.history.add(self.head)
        self.recent.update((commit.record.round, commit) for commit in past.commits[-RECENT:])
        self.held.update((frame.hash, frame.header) for frame in past.frames if frame.header.round > self.head.round)

    def offer(self, offer: m.Offer, now: float) -> list[Effect]:
        """This peer's own contribution is ready; its frame is held already. Tell every member."""
        if (offer.epoch, offer.round) != (self.head.epoch, self.head.round + 1):
            return []
        self._take_offer(self.me, offer, now)
        self._offered_at = now
        self._broadcast(offer)
        return self._progress(now)

    def hold(self, frame: Digest, header: Header, now: float) -> list[Effect]:
        """A frame arrived and was checked: signature, size, finite values."""
        self.held[frame] = header
        self.unsent.came(header.sender)
        self.round.ask_at.pop(frame, None)
        if header.kind == FrameKind.RESULT and header.round == self.head.round + 1:
            self._note_result(frame, header)
        return self._progress(now)

    def receive(self, sender: PeerId, message: m.Message, now: float) -> list[Effect]:
        """Take a message whose sender the transport has authenticated."""
        self.presence.heard(sender)
        if isinstance(message, m.JoinRequest):
            self._take_join(sender, message, now)
        elif isinstance(message, m.Farewell):
            self._take_farewell(sender, message)
        elif isinstance(message, m.Behind):
            self._take_behind(sender, message)
        elif isinstance(message, m.Commit):
            self._take_commit(sender, message)
        elif isinstance(message, m.Offer | m.ReducePlan | m.Proposal | m.Vote | m.Prepare | m.Promise | m.Missing):
            self._take_round_message(sender, message, now)
        return self._progress(now)

    def liveness(self, expired: frozenset[PeerId], gone: frozenset[PeerId], now: float) -> list[Effect]:
        """Whose lease ran out, and whose did so long ago that the peer is given up."""
        self.presence.expired, self.presence.gone = expired, gone
        return self._progress(now)

    def unreachable(self, peer: PeerId, now: float) -> list[Effect]:
        """A send to ``peer`` failed: do not wait for it until it speaks again."""
        self.presence.unreachable.add(peer)
        return self._progress(now)

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        for (peer, _), early in list(self._early.items()):
            if now - self.round.opened > FETCH_AFTER and _round_of(early) > self.head.round + 1:
                self._effects.append(CatchUpWith(peer))
                break
        self._repeat_offer(now)
        return self._progress(now)

    def applied(self, anchor: Digest, now: float) -> list[Effect]:
        """The newest record was applied; the anchor's digest is ``anchor``."""
        self.head = replace(self.head, anchor=anchor)
        return self._progress(now)

    def time_left(self, now: float) -> float | None:
        """Seconds in which this peer should offer what it has rather than come late; None while nothing presses.

        Only a full contribution presses: else everybody could hurry everybody, and nobody make all inner steps.
        """
        seen = self.round
        waits = self.head.anchor is not None and not self.head.final and self.me in self.head.members
        full = any(offer.steps >= self.terms.steps for offer in seen.offers.values())
        if not waits or seen.first_offer is None or self.me in seen.offers or not full:
            return None
        return self.deadline.early_at(seen.opened, seen.first_offer) - now

    def _take_behind(self, sender: PeerId, message: m.Behind) -> None:
        if sender in self.head.members:
            self.stands_at[sender] = message.round
        if message.round > self.head.round:
            self._effects.append(CatchUpWith(sender))

    def leave(self) -> m.Farewell:
        """Vote no more, until ``stay``; the others are to be told what is returned."""
        self.has_left = True
        return self._last_word()

    def stay(self) -> None:
        """Vote again."""
        self.has_left = False

    def _take_farewell(self, sender: PeerId, message: m.Farewell) -> None:
        if message.round > self.head.round + 1:  # it knows a commit that this peer missed, and counts until then
            self._keep_for_later(sender, message)
            self._effects.append(CatchUpWith(sender))
            return
        if sender in self.head.members:
            self.farewells.take(sender, message)
        self.presence.leaving.add(sender)
        self.joiners.pop(sender, None)
        if self.leading is not None:
            self.leading.parted.add(sender)

    def _take_join(self, sender: PeerId, request: m.JoinRequest, now: float) -> None:
        self._is_back(sender)
        if sender not in self.head.members:
            self.joiners[sender] = request
        elif request.round < self.head.round and not self._crossed(request.round + 1, now):
            self._help_laggard(sender, request.round)

    def _crossed(self, round_: int, now: float) -> bool:
        """Whether a message about ``round_`` was on its way when that round's commit was: its sender gets it anyway.

        A leader would send half of all peers the commit twice, for the votes that a majority did not need, and a late
        offer or a request to join would bring its sender the commit from every member: N times 190 N bytes.
        """
        return round_ == self.head.round and now - self.round.opened < FETCH_AFTER

    def _take_commit(self, sender: PeerId, commit: m.Commit) -> None:
        record = commit.record
        if record.round <= self.head.round or self.decided is not None:
            return
        if record.round > self.head.round + 1:
            self._effects.append(CatchUpWith(sender))
            return
        if self._succeeds(record, sender):
            chain.check_certified(commit)
            self.decided = (sender, commit)

    def _take_round_message(self, sender: PeerId, message: m.Message, now: float) -> None:
        round_ = _round_of(message)
        if self._crossed(round_, now):
            return
        if round_ <= self.head.round:
            self._help_laggard(sender, round_ - 1)
        elif round_ > self.head.round + 1:
            self._keep_for_later(sender, message)
        elif sender in self.head.members and _epoch_of(message) == self.head.epoch:
            self._dispatch(sender, message, now)

    def _keep_for_later(self, sender: PeerId, message: m.Message) -> None:
        """A message of a round that is yet to come. Strangers may be its members, but cost nothing to make: few fit."""
        kept = (sender, type(message).__name__)
        strangers = sum(peer not in self.head.members for peer, _ in self._early)
        if sender in self.head.members or kept in self._early or strangers < _EARLY_STRANGERS:
            self._early[kept] = message

    def _dispatch(self, sender: PeerId, message: m.Message, now: float) -> None:
        if isinstance(message, m.Offer):
            self._take_offer(sender, message, now)
        elif isinstance(message, m.Prepare):
            self._take_prepare(sender, message)
        elif isinstance(message, m.Proposal):
            self._take_proposal(sender, message)
        elif isinstance(message, m.ReducePlan):
            self._take_plan(sender, message)
        elif self.leading is None:
            return
        elif isinstance(message, m.Promise) and message.ballot == self.leading.ballot:
            if message.accepted is not None and not self._succeeds(message.accepted, sender):
                return
            self._answered(self.leading, sender)
            self.leading.promises[sender] = message
        elif isinstance(message, m.Vote):
            self._take_vote(sender, message)
        elif isinstance(message, m.Missing) and self.leading.planned is not None:
            self.leading.planned.blame(message.plan, message.peers)

    def _take_offer(self, sender: PeerId, offer: m.Offer, now: float) -> None:
        if offer.fragment != self.head.fragment(self.terms.num_fragments):
            raise PayloadError(f"offer for fragment {offer.fragment} in round {offer.round}: not its turn; drop it")
        if offer.nbytes > self.terms.largest:
            raise PayloadError(f"offer of {offer.nbytes} bytes, {self.terms.largest} are possible here; drop it")
        if self.farewells.since(sender) < offer.round:  # one of the same round may be older than the farewell
            self._is_back(sender)  # to drop it would find no votes
        self.round.add(sender, offer, now)

    def _progress(self, now: float) -> list[Effect]:
        if self.decided is not None:
            self._finish(now)
        if self.decided is None and self.head.anchor is not None and not self.head.final:
            self._vote(now)
            self._count_farewells(now)
            if self.decided is None:
                self._lead(now)
            if self.decided is not None:
                self._finish(now)
        effects, self._effects = self._effects, []
        return effects

    def _finish(self, now: float) -> None:
        """Decide once every named frame is here: a commit is never applied by half."""
        assert self.decided is not None
        sender, commit = self.decided
        if self.head.anchor is None:
            return
        if not self._succeeds(commit.record, sender):
            self.decided = None
            return
        if not self._all_held(commit.record, sender, now):
            return
        self._effects.append(Decide(commit))
        self.recent[commit.record.round] = commit
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        for peer, offer in self.round.offers.items():
            if offer.frame not in self.held:
                self.unsent.passed_over(peer, commit.record.round)
        self._note_who_is_back(commit)
        self._note_shrink(commit.record)
        self.presence.leaving &= set(commit.record.next_members)
        self.farewells.keep(commit.record.next_members)
        for peer in commit.record.next_members:
            self.joiners.pop(peer, None)
        # Nothing more is decided before this is applied, whether it moves the anchor or not: two Decide in one list of
        # effects were carried out in the wrong order when the first one's ``applied`` led to a third.
        self.restart(replace(self.head.extended(commit.record), anchor=None), now)
        self.history.add(self.head)
        early, self._early = self._early, {}
        for (peer, _), message in early.items():
            with suppress(PayloadError):  # its sender was wrong, not the commit that we are finishing
                if isinstance(message, m.Farewell):
                    self._take_farewell(peer, message)
                else:
                    self._take_round_message(peer, message, now)

    def _note_who_is_back(self, commit: m.Commit) -> None:
        """Who voted in a round after its farewell came back meanwhile, though nothing it sent came here.

        One that was told so by a commit alone counted the old farewell as a promise, was all that was left, and forked.
        """
        for peer, _ in commit.certificate.votes:
            if self.farewells.since(peer) < commit.record.round:
                self._is_back(peer)

    def _note_shrink(self, record: m.Record) -> None:
        """Remember whom ``record`` gives up although no majority is left: they may live on, and fork the chain."""
        silent = set(record.members) - set(record.next_members) - self.presence.leaving
        shrinks = chain.voters_on(record) != record.members
        self.given_up = (self.given_up | (silent if shrinks else set())) - set(record.next_members)


def _round_of(message: m.Message) -> int:
    return message.record.round if isinstance(message, m.Proposal) else int(getattr(message, "round", 0))


def _epoch_of(message: m.Message) -> int:
    return message.record.epoch if isinstance(message, m.Proposal) else int(getattr(message, "epoch", 0))
