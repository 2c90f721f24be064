"""The round protocol as a state machine: messages, timers and frames in; effects out. No I/O, no clock, no task.

One round is one single-decree Paxos over the record that names its frames. The value is proposed by the leader
of a ballot, voted on by every peer that holds all named frames, and decided by a majority of the epoch. Level
triggered: every event updates the state and then asks "what can be done now", so lost, late and repeated
messages cost time and nothing else.

Per round and peer: one offer to every member, one proposal, vote and commit with its leader; about
``150 N + 32 N`` bytes sent, and ``250 N`` by the leader. Grows with N: groups bound it.

Source: Lamport, "Paxos Made Simple", 2001; the fast first ballot is Multi-Paxos' implied promise.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from decentral.errors import PayloadError
from decentral.rounds import chain
from decentral.rounds.acceptor import Acceptor
from decentral.rounds.chain import Digest, Head
from decentral.rounds.collection import Collection, fits, references
from decentral.rounds.deadline import Deadline
from decentral.rounds.effects import CatchUp, Decide, Effect, Fetch, Persist, Send, SendSlices
from decentral.rounds.leading import Leading, Partition, Planned, results_of
from decentral.rounds.membership import Presence
from decentral.wire import messages as m
from decentral.wire.frames import Header, Kind
from decentral.wire.keys import PeerId, Signer, verify

TICK = 0.25  # s between calls of tick: finer than any timer here needs
FETCH_AFTER = 1.0  # s a pushed frame may take before it is asked for: a fetch at once would send most frames twice
RESEND_AFTER = 3.0  # s before a message without an answer is sent again
RECENT = 64  # commits kept at hand for peers that missed them


@dataclass(frozen=True, slots=True)
class Terms:
    """What the machine needs to know of the manifest."""

    num_fragments: int
    rounds: int  # outer steps after which the run is done
    min_peers: int  # members below which nothing is committed
    floor: float  # s, least slack given to late offers
    ceiling: float  # s, longest wait after the first offer
    patience: float  # s a leader may take before the next one tries; doubles with every ballot
    partition: Callable[[int, tuple[PeerId, ...]], Partition] | None = None  # reduce: (fragment, owners) -> ranges


class RoundMachine:
    """One peer's part in agreeing on the next record.

    Drive it with ``offer``, ``hold``, ``receive``, ``tick``, ``liveness``, ``unreachable``, ``applied``; carry out the
    returned effects in order. Raises PayloadError for a message that breaks a rule: drop it, the state is as before.
    """

    def __init__(self, signer: Signer, head: Head, terms: Terms, now: float, acceptor: Acceptor | None = None) -> None:
        self.signer = signer
        self.me = signer.peer
        self.terms = terms
        self.deadline = Deadline(terms.floor, terms.ceiling)
        self.presence = Presence(self.me)
        self.joiners: dict[PeerId, m.JoinRequest] = {}
        self.recent: OrderedDict[int, m.Commit] = OrderedDict()
        self.held: dict[Digest, Header] = {}
        self.time_is_up = False
        self._effects: list[Effect] = []
        self._early: dict[tuple[PeerId, str], m.Message] = {}
        self._offered_at = now
        self.restart(head, now, acceptor)

    def restart(self, head: Head, now: float, acceptor: Acceptor | None = None) -> None:
        """Stand at ``head`` with nothing seen of the next round: at start, after a commit, after a catch-up."""
        self.head = head
        kept = acceptor is not None and acceptor.round == head.round + 1
        self.acceptor = acceptor if kept and acceptor is not None else Acceptor(head.round + 1)
        self.round = Collection(now)
        self.results: dict[tuple[int, int], m.FrameRef] = {}
        self.leading: Leading | None = None
        self.proposal: tuple[PeerId, m.Proposal] | None = None
        self.decided: tuple[PeerId, m.Commit] | None = None
        self.stalled_since: float | None = None
        self.planned_number = -1
        self.held = {frame: header for frame, header in self.held.items() if header.round > head.round}
        self._replay_results()

    # ---- events ----

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
        self.round.missing_since.pop(frame, None)
        if header.kind == Kind.RESULT and header.round == self.head.round + 1:
            self._note_result(frame, header)
        return self._progress(now)

    def receive(self, sender: PeerId, message: m.Message, now: float) -> list[Effect]:
        """Take a message whose sender the transport has authenticated."""
        self.presence.heard(sender)
        if isinstance(message, m.JoinRequest):
            self._take_join(sender, message)
        elif isinstance(message, m.Goodbye):
            self.presence.leaving.add(sender)
            self.joiners.pop(sender, None)
        elif isinstance(message, m.Behind):
            self._effects += [CatchUp(sender)] if message.round > self.head.round else []
        elif isinstance(message, m.Commit):
            self._take_commit(sender, message)
        elif isinstance(message, m.Offer | m.Plan | m.Proposal | m.Vote | m.Prepare | m.Promise | m.Missing):
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
                self._effects.append(CatchUp(peer))
                break
        self._repeat_offer(now)
        return self._progress(now)

    def applied(self, anchor: Digest, now: float) -> list[Effect]:
        """The newest record was applied; the anchor's digest is ``anchor``."""
        self.head = replace(self.head, anchor=anchor)
        return self._progress(now)

    # ---- taking messages ----

    def _take_join(self, sender: PeerId, request: m.JoinRequest) -> None:
        self.presence.leaving.discard(sender)
        if sender not in self.head.members:
            self.joiners[sender] = request
        elif request.round < self.head.round:
            self._help_laggard(sender, request.round)

    def _take_commit(self, sender: PeerId, commit: m.Commit) -> None:
        record = commit.record
        if record.round <= self.head.round or self.decided is not None:
            return
        if record.round > self.head.round + 1:
            self._effects.append(CatchUp(sender))
            return
        if self._succeeds(record, sender):
            chain.check_certified(commit)
            self.decided = (sender, commit)

    def _succeeds(self, record: m.Record, sender: PeerId) -> bool:
        """Whether ``record`` continues our chain; if not, one of us is on another branch and the shell compares."""
        try:
            chain.check_succession(self.head, record)
        except PayloadError:
            self._effects.append(CatchUp(sender))
            return False
        return True

    def _take_round_message(self, sender: PeerId, message: m.Message, now: float) -> None:
        round_ = _round_of(message)
        if round_ <= self.head.round:
            self._help_laggard(sender, round_ - 1)
        elif round_ > self.head.round + 1:
            self._early[(sender, type(message).__name__)] = message
        elif sender in self.head.members and _epoch_of(message) == self.head.epoch:
            self._dispatch(sender, message, now)

    def _dispatch(self, sender: PeerId, message: m.Message, now: float) -> None:
        if isinstance(message, m.Offer):
            self._take_offer(sender, message, now)
        elif isinstance(message, m.Prepare):
            self._take_prepare(sender, message)
        elif isinstance(message, m.Proposal):
            self._take_proposal(sender, message)
        elif isinstance(message, m.Plan):
            self._take_plan(sender, message)
        elif self.leading is None:
            return
        elif isinstance(message, m.Promise) and message.ballot == self.leading.ballot:
            if message.accepted is not None and not self._succeeds(message.accepted, sender):
                return
            self.leading.promises[sender] = message
        elif isinstance(message, m.Vote):
            self._take_vote(sender, message)
        elif isinstance(message, m.Missing) and self.leading.planned is not None:
            self.leading.planned.blame(message.plan, message.peers)

    def _take_offer(self, sender: PeerId, offer: m.Offer, now: float) -> None:
        if offer.fragment != self.head.fragment(self.terms.num_fragments):
            raise PayloadError(f"offer for fragment {offer.fragment} in round {offer.round}: not its turn; drop it")
        if self.round.add(sender, offer, now):
            self.deadline.observe(now - self.round.opened)

    def _take_prepare(self, sender: PeerId, prepare: m.Prepare) -> None:
        promised = self.acceptor.promise(prepare.ballot)
        if promised is None or self.leader_of(prepare.ballot) != sender:
            return
        self._become(promised)
        answer = m.Promise(self.head.epoch, promised.round, prepare.ballot, promised.accepted_ballot, promised.accepted)
        self._effects.append(Send(sender, answer))

    def _take_proposal(self, sender: PeerId, proposal: m.Proposal) -> None:
        if self.leader_of(proposal.ballot) != sender:
            raise PayloadError(f"proposal of ballot {proposal.ballot} by a peer that does not lead it; drop it")
        if not self._succeeds(proposal.record, sender):
            return
        if self.proposal is None or proposal.ballot > self.proposal[1].ballot:
            self.proposal = (sender, proposal)
        elif proposal == self.proposal[1] and self.acceptor.accepted_ballot == proposal.ballot:
            self._effects.append(Send(sender, self._vote_for(proposal)))  # our vote was lost

    def _take_plan(self, sender: PeerId, plan: m.Plan) -> None:
        leads = self.leader_of(plan.ballot) == sender
        if leads and plan.ballot >= self.acceptor.promised and plan.number > self.planned_number:
            self.planned_number = plan.number
            self._effects.append(SendSlices(plan))

    def _take_vote(self, sender: PeerId, vote: m.Vote) -> None:
        leading = self.leading
        if leading is None or leading.proposal is None or vote.ballot != leading.ballot:
            return
        record = leading.proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, vote.ballot, record.hash)
        if vote.record != record.hash or not verify(sender, vote.signature, text):
            raise PayloadError(f"vote in round {vote.round} is for another record or not signed by its sender; drop it")
        leading.votes[sender] = vote.signature

    # ---- what can be done now ----

    def _progress(self, now: float) -> list[Effect]:
        if self.decided is not None:
            self._finish(now)
        if self.decided is None and self.head.anchor is not None and not self.head.final:
            self._vote(now)
            self._lead(now)
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
        self.presence.leaving &= set(commit.record.next_members)
        for peer in commit.record.next_members:
            self.joiners.pop(peer, None)
        self.restart(self.head.extended(commit.record), now)
        early, self._early = self._early, {}
        for (peer, _), message in early.items():
            with suppress(PayloadError):  # its sender was wrong, not the commit that we are finishing
                self._take_round_message(peer, message, now)

    def _vote(self, now: float) -> None:
        if self.proposal is None or self.me not in self.head.members:
            return
        sender, proposal = self.proposal
        if self.acceptor.accepted_ballot >= proposal.ballot or proposal.ballot < self.acceptor.promised:
            return
        if not self._succeeds(proposal.record, sender):  # again: the anchor may have been unknown when it came
            self.proposal = None
            return
        if not self.presence.may_drop(proposal.record) or not self._all_held(proposal.record, sender, now):
            return
        accepted = self.acceptor.accept(proposal.ballot, proposal.record)
        if accepted is None:
            return
        self._become(accepted)
        self._stall(now)
        vote = self._vote_for(proposal)
        if sender == self.me and self.leading is not None:
            self.leading.votes[self.me] = vote.signature
        else:
            self._effects.append(Send(sender, vote))

    def _lead(self, now: float) -> None:
        """Lead the ballot in charge if it is ours and there is something to commit."""
        if self.me not in self.head.members:
            return
        usable = self.round.usable(self.head, self.held, self.terms.partition is not None)
        self._ask_for_offered_frames(now)
        if not self._has_work(usable, now):
            return
        self._stall(now)
        ballot = self._ballot_in_charge(now)
        if ballot is None or self.leader_of(ballot) != self.me:
            return
        if self.leading is None or self.leading.ballot < ballot:
            self._open_ballot(ballot, now)
        leading = self.leading
        if leading is None or not leading.prepared(self.head.members, self.presence.given_up()):
            self._resend(now)
            return
        if leading.proposal is None:
            bound = leading.bound_value(self.acceptor)
            record = self._new_record(leading, usable, now) if bound is None else self._shrunk(bound)
            if record is not None:
                self._propose(leading, record, now)
        self._resend(now)
        self._elect(leading)
        if self.decided is not None:
            self._finish(now)

    def _has_work(self, usable: list[PeerId], now: float) -> bool:
        carried_on = self.acceptor.accepted is not None or self.leading is not None or self.acceptor.promised > 0
        return carried_on or self._frames_ready(usable, now) or self._membership_due()

    def _frames_ready(self, usable: list[PeerId], now: float) -> bool:
        enough = len(self.head.members) >= self.terms.min_peers
        return enough and self.round.ready(usable, self.head, self.presence, self.deadline, now)

    def _membership_due(self) -> bool:
        """Between rounds the membership may change by itself; with offers under way it rides along."""
        waiting = not self.round.offers or len(self.head.members) < self.terms.min_peers
        return waiting and self._next_members() != self.head.members

    def _new_record(self, leading: Leading, usable: list[PeerId], now: float) -> m.Record | None:
        if not self._frames_ready(usable, now):
            return self._record() if self._membership_due() else None
        if self.terms.partition is None:
            return self._record(frames=references(usable, self.round.offers))
        return self._reduced_record(leading, usable, now)

    def _reduced_record(self, leading: Leading, usable: list[PeerId], now: float) -> m.Record | None:
        """Plan the reduce, wait for every owner's result, re-plan without those who let it down."""
        absent = [peer for peer in self.head.members if not self.presence.present(peer)]
        planned = leading.planned
        if planned is not None:
            frames = results_of(planned.plan, self.results)
            if frames is not None:
                plan = planned.plan
                return self._record(frames, plan.contributors, plan.partition, plan.number)
            if not planned.failed(absent, self.terms.patience, now):
                return None
        leading.planned = Planned(self._plan(leading, usable, absent), now)
        self.planned_number = leading.planned.plan.number
        self._broadcast(leading.planned.plan)
        self._effects.append(SendSlices(leading.planned.plan))
        return None

    def _plan(self, leading: Leading, usable: list[PeerId], absent: list[PeerId]) -> m.Plan:
        dropped = set(absent)
        if leading.planned is not None:
            dropped |= leading.planned.blamed or leading.planned.silent_owners(self.results, self.me)
        peers = [peer for peer in usable if peer not in dropped] or usable[:1]
        assert self.terms.partition is not None
        fragment = self.head.fragment(self.terms.num_fragments)
        return m.Plan(
            self.head.epoch,
            self.head.round + 1,
            leading.ballot,
            leading.next_plan_number(),
            references(peers, self.round.offers),
            self.terms.partition(fragment, tuple(sorted(peers))),
        )

    def _record(
        self,
        frames: tuple[m.FrameRef, ...] = (),
        contributors: tuple[m.FrameRef, ...] = (),
        partition: Partition = (),
        plan: int = 0,
    ) -> m.Record:
        head = self.head
        assert head.anchor is not None
        last = bool(frames) and (head.outer_step + 1 >= self.terms.rounds or self.time_is_up)
        return m.Record(
            run=head.run,
            epoch=head.epoch,
            round=head.round + 1,
            outer_step=head.outer_step,
            fragment=head.fragment(self.terms.num_fragments),
            plan=plan,
            previous=head.hash,
            base=head.anchor,
            members=head.members,
            frames=frames,
            contributors=contributors,
            partition=partition,
            next_members=self._next_members(),
            final=last,
        )

    def _next_members(self) -> tuple[PeerId, ...]:
        return self.presence.next_members(self.head.members, self.joiners)

    def _shrunk(self, bound: m.Record) -> m.Record:
        """An accepted value carried on by the few who are left: it must also say who was given up.

        Were it chosen earlier, one of the given-up peers would have voted for it; that peer re-syncs if it returns.
        """
        if self.presence.is_majority_here(bound.members):
            return bound
        return replace(bound, next_members=self._next_members())

    # ---- ballots ----

    def leader_of(self, ballot: int) -> PeerId:
        """Who leads ``ballot`` of the round in progress."""
        order = self._order()
        return order[ballot % len(order)]

    def _order(self) -> list[PeerId]:
        return chain.leaders(self.head)

    def _stall(self, now: float) -> None:
        self.stalled_since = now if self.stalled_since is None else self.stalled_since

    def _ballot_in_charge(self, now: float) -> int | None:
        """The lowest ballot not yet given up whose leader is there; each ballot gets twice the time of the last."""
        waited = now - (now if self.stalled_since is None else self.stalled_since)
        suspected = int(math.log2(waited / self.terms.patience + 1.0))
        first = max(self.acceptor.promised, suspected)
        ballots = range(first, first + len(self.head.members))
        return next((ballot for ballot in ballots if self.presence.present(self.leader_of(ballot))), None)

    def _open_ballot(self, ballot: int, now: float) -> None:
        self.leading = Leading(ballot, sent_at=now)
        if ballot == 0:
            return
        promised = self.acceptor.promise(ballot)
        assert promised is not None, "the ballot in charge is never below the promised one"
        self._become(promised)
        own = m.Promise(self.head.epoch, promised.round, ballot, promised.accepted_ballot, promised.accepted)
        self.leading.promises[self.me] = own
        self._broadcast(m.Prepare(self.head.epoch, promised.round, ballot))

    def _propose(self, leading: Leading, record: m.Record, now: float) -> None:
        """Accept our own proposal durably first: a leader that restarts proposes the same or nothing."""
        leading.proposal = m.Proposal(leading.ballot, record)
        leading.sent_at = now
        self.proposal = (self.me, leading.proposal)
        if self.acceptor.accepted_ballot == leading.ballot:  # restarted after voting: same record, same signature
            leading.votes[self.me] = self._vote_for(leading.proposal).signature
        self._vote(now)
        self._broadcast(leading.proposal)

    def _elect(self, leading: Leading) -> None:
        commit = leading.elected()
        if commit is None:
            return
        self._broadcast(commit, also=self.joiners)
        self.decided = (self.me, commit)

    def _resend(self, now: float) -> None:
        leading = self.leading
        if leading is None or now - leading.sent_at < RESEND_AFTER:
            return
        leading.sent_at = now
        if leading.proposal is not None:
            self._broadcast(leading.proposal, but=leading.votes)
        elif leading.planned is not None:
            self._broadcast(leading.planned.plan)
        elif leading.ballot > 0:
            prepare = m.Prepare(self.head.epoch, self.head.round + 1, leading.ballot)
            self._broadcast(prepare, but=leading.promises)

    def _repeat_offer(self, now: float) -> None:
        """An offer or its answer may have been lost: tell whoever leads now."""
        offer = self.round.offers.get(self.me)
        if offer is None or now - self._offered_at < RESEND_AFTER:
            return
        self._offered_at = now
        ballot = self._ballot_in_charge(now)
        leader = None if ballot is None else self.leader_of(ballot)
        if leader is not None and leader != self.me:
            self._effects.append(Send(leader, offer))

    def _vote_for(self, proposal: m.Proposal) -> m.Vote:
        record = proposal.record
        text = m.vote_text(record.run, record.epoch, record.round, proposal.ballot, record.hash)
        return m.Vote(record.epoch, record.round, proposal.ballot, record.hash, self.signer.sign(text))

    def _become(self, acceptor: Acceptor) -> None:
        self.acceptor = acceptor
        self._effects.append(Persist(acceptor))

    # ---- frames ----

    def _all_held(self, record: m.Record, likely: PeerId, now: float) -> bool:
        missing = [ref for ref in record.frames if ref.frame not in self.held]
        for ref in missing:
            self._ask(ref.frame, ref.peer, likely, now)
        return not missing and all(fits(self.held[ref.frame], ref, record) for ref in record.frames)

    def _ask_for_offered_frames(self, now: float) -> None:
        """A leader cannot propose what it does not hold: ask for frames whose push never came."""
        if self.terms.partition is not None:
            return
        for peer, offer in self.round.offers.items():
            if offer.frame not in self.held:
                self._ask(offer.frame, peer, peer, now)

    def _ask(self, frame: Digest, owner: PeerId, likely: PeerId, now: float) -> None:
        since = self.round.missing_since.setdefault(frame, now)
        if now - since < FETCH_AFTER and self.presence.present(owner):
            return
        self.round.missing_since[frame] = now + RESEND_AFTER - FETCH_AFTER
        others = [peer for peer in self.head.members if peer not in (self.me, owner, likely)]
        first = dict.fromkeys((likely, owner, *others))
        holders = tuple(peer for peer in first if peer != self.me and self.presence.present(peer))
        if holders:
            self._effects.append(Fetch(frame, holders))

    def _note_result(self, frame: Digest, header: Header) -> None:
        ref = m.FrameRef(header.sender, frame, header.part, header.steps, header.tokens)
        self.results.setdefault((header.plan, header.part), ref)

    def _replay_results(self) -> None:
        for frame, header in self.held.items():
            if header.kind == Kind.RESULT and header.round == self.head.round + 1:
                self._note_result(frame, header)

    # ---- sending ----

    def _broadcast(self, message: m.Message, but: object = (), also: object = ()) -> None:
        skip = set(but)  # type: ignore[call-overload]
        peers = dict.fromkeys((*self.head.members, *also))  # type: ignore[misc]
        self._effects.extend(Send(peer, message) for peer in peers if peer != self.me and peer not in skip)

    def _help_laggard(self, peer: PeerId, stands_at: int) -> None:
        """Send the commit that ``peer`` missed, or tell it how far the chain is."""
        commit = self.recent.get(stands_at + 1)
        alone = commit is not None and stands_at + 1 == self.head.round
        self._effects.append(Send(peer, commit if commit is not None and alone else m.Behind(self.head.round)))


def _round_of(message: m.Message) -> int:
    return message.record.round if isinstance(message, m.Proposal) else int(getattr(message, "round", 0))


def _epoch_of(message: m.Message) -> int:
    return message.record.epoch if isinstance(message, m.Proposal) else int(getattr(message, "epoch", 0))
