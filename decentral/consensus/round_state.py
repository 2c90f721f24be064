"""What every role of a round stands on: the chain's head, what was seen of the round, how to say something.

The machine is layered by role, each layer in its own module: ground, voting, leadership, machine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decentral.consensus import chain
from decentral.consensus.acceptor import Acceptor
from decentral.consensus.allowance import SLACK, Takes, Unsent, allowance, unknown
from decentral.consensus.ballot import Ballot, Partition
from decentral.consensus.chain import Digest, Head
from decentral.consensus.collection import Collection, fits
from decentral.consensus.deadline import Deadline
from decentral.consensus.effects import CatchUpWith, Effect, Fetch, Persist, Send
from decentral.consensus.farewells import Farewells, farewell
from decentral.consensus.history import Branch, History
from decentral.consensus.membership import Presence
from decentral.errors import PayloadError
from decentral.flow.send_queue import shifted
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, Header
from decentral.wire.keys import PeerId, Signer

FETCH_AFTER = 1.0  # s a pushed frame may take before it is asked for: a fetch at once would send most frames twice
RESEND_AFTER = 3.0  # s before a message without an answer is sent again


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What the machine needs to know of the manifest."""

    num_fragments: int
    rounds: int  # outer steps after which the run is done
    min_peers: int  # members below which nothing is committed
    floor: float  # s, least slack given to late offers
    ceiling: float  # s, longest wait after the first offer
    patience: float  # s a leader may take before the next one tries; doubles with every ballot
    partition: Callable[[int, tuple[PeerId, ...]], Partition] | None = None  # reduce: (fragment, owners) -> ranges
    steps: int = 0  # inner steps of a full contribution
    largest: int = 1 << 40  # bytes of the largest frame that can be valid
    takes: Takes = unknown


class RoundState:
    """State of one round, and the helpers that every role uses."""

    def __init__(
        self, signer: Signer, head: Head, terms: RoundTerms, now: float, acceptor: Acceptor | None = None
    ) -> None:
        self.signer = signer
        self.me = signer.peer
        self.terms = terms
        self.deadline = Deadline(terms.floor, terms.ceiling)
        self.presence = Presence(self.me)
        self.farewells = Farewells()
        self.has_left = False  # and votes no more
        self.stands_at: dict[PeerId, int] = {}  # rounds that members said they have reached
        self.joiners: dict[PeerId, m.JoinRequest] = {}
        self.recent: OrderedDict[int, m.Commit] = OrderedDict()
        self.history = History(head)
        self.given_up: frozenset[PeerId] = frozenset()  # dropped without a majority left, and not back
        self.held: dict[Digest, Header] = {}
        self.unsent = Unsent()
        self.time_is_up = False
        self._effects: list[Effect] = []
        self._early: dict[tuple[PeerId, str], m.Message] = {}
        self._offered_at = now
        self._remembered = acceptor
        self.restart(head, now)

    @property
    def forgetful(self) -> bool:
        """Whether this peer voted in later rounds than it remembers commits of: its disk lost the end of the chain.

        It may have been the one peer that the quorum of a forgotten round and the next quorum share, so it takes part
        in no ballot until it has caught up, or until ``forget``.
        """
        return self._remembered is not None and self._remembered.round > self.head.round + 1

    def forget(self) -> None:
        """Nobody else knows of the forgotten rounds either: go on without them."""
        self._remembered = None

    def restart(self, head: Head, now: float) -> None:
        """Stand at ``head`` with nothing seen of the next round: at start, after a commit, after a catch-up."""
        self.head = head
        self.acceptor = self._last_vote(head) or Acceptor(head.round + 1)
        self.round = Collection(now)
        self.results: dict[tuple[int, int], m.FrameRef] = {}
        self.leading: Ballot | None = None
        self.proposal: tuple[PeerId, m.Proposal] | None = None
        self.decided: tuple[PeerId, m.Commit] | None = None
        self.stalled_since: float | None = None
        self.promised_since: tuple[int, float] | None = None  # the ballot that is promised, and since when
        self.planned_number = -1
        self.held = {frame: header for frame, header in self.held.items() if header.round > head.round}
        self._replay_results()

    def switch(self, head: Head, branch: Branch, now: float) -> None:
        """Stand at ``head`` of another branch, or so far ahead that what lies between is unknown.

        What was promised on the old branch binds nobody here: records name their predecessor, so none can be of both.
        """
        self.history.switch(branch.shared, (*branch.heads, head))
        self.recent.clear()
        self._early.clear()
        self.given_up = frozenset()
        self.restart(head, now)

    def _last_vote(self, head: Head) -> Acceptor | None:
        """What was promised and accepted before this process began, if it was for the round after ``head``."""
        kept = self._remembered
        return kept if kept is not None and kept.continues(head.round, head.hash) else None

    def leader_of(self, ballot: int) -> PeerId:
        """Who leads ``ballot`` of the round in progress."""
        order = self._order()
        return order[ballot % len(order)]

    def _order(self) -> list[PeerId]:
        return chain.leaders(self.head)

    def _succeeds(self, record: m.Record, sender: PeerId) -> bool:
        """Whether ``record`` continues our chain; if not, one of us is on another branch and the shell compares."""
        try:
            chain.check_succession(self.head, record)
        except PayloadError:
            self._effects.append(CatchUpWith(sender))
            return False
        return True

    def _next_members(self) -> tuple[PeerId, ...]:
        return self.presence.next_members(self.head.members, self.joiners)

    def _last_word(self) -> m.Farewell:
        """How this peer voted; of rounds that its disk forgot, too, or it would deny those votes."""
        kept = self._remembered if self.forgetful else None
        return farewell(kept or self.acceptor, self.signer)

    def _is_back(self, peer: PeerId) -> None:
        self.presence.leaving.discard(peer)
        self.farewells.forget(peer)

    def _stall(self, now: float) -> None:
        self.stalled_since = now if self.stalled_since is None else self.stalled_since

    def _become(self, acceptor: Acceptor) -> None:
        self.acceptor = acceptor
        self._effects.append(Persist(acceptor))

    def _all_held(self, record: m.Record, likely: PeerId, now: float) -> bool:
        missing = [ref for ref in record.frames if ref.frame not in self.held]
        for ref in missing:
            self._ask(ref.frame, ref.peer, likely, now, record)
        return not missing and all(fits(self.held[ref.frame], ref, record) for ref in record.frames)

    def _ask(self, frame: Digest, owner: PeerId, likely: PeerId, now: float, record: m.Record | None = None) -> None:
        ask_at = self.round.ask_at
        if frame not in ask_at:
            ask_at[frame] = now + self._turn_of(owner)
        if now < ask_at[frame] and self.presence.present(owner):
            return
        ask_at[frame] = now + RESEND_AFTER
        others = [peer for peer in shifted(self.head.members, self.me) if peer not in (self.me, owner, likely)]
        first = dict.fromkeys((likely, owner, *others))
        holders = tuple(peer for peer in first if peer != self.me and self.presence.present(peer))
        if holders:
            self._effects.append(Fetch(frame, owner, holders, record))

    def _turn_of(self, owner: PeerId) -> float:
        """Seconds in which a frame comes by itself, or begins to. Results of a reduce leave one after another.

        With slack: asked for by all when it is a little late, everything is sent twice, and what was late gets later.
        """
        offer = self.round.offers.get(owner)
        if offer is None or self.terms.partition is None:
            return FETCH_AFTER
        return FETCH_AFTER + SLACK * (self.terms.takes(offer.nbytes, owner, self.head.members) or 0.0) / 2

    def patience(self, plans: float = 1.0) -> float:
        """Seconds to wait for what it takes ``plans`` plans of a reduce to get; its slices alone are half of one."""
        return self.terms.patience + (plans * self.allowed() if self.terms.partition is not None else 0.0)

    def allowed(self) -> float:
        """Seconds that what was offered may be under way."""
        return self._allowed(self.round.offers)

    def _allowed(self, peers: Iterable[PeerId]) -> float:
        """Seconds that the slowest of ``peers`` has for what it offered."""
        members = self.head.members
        copies = len(members) - 1 if self.terms.partition is None else 2  # slices and results: about two bodies
        found = [(offer.nbytes, peer) for peer in peers if (offer := self.round.offers.get(peer)) is not None]
        takes = self.terms.takes
        return max((allowance(nbytes, copies, takes(nbytes, peer, members)) for nbytes, peer in found), default=0.0)

    def _note_result(self, frame: Digest, header: Header) -> None:
        ref = m.FrameRef(header.sender, frame, header.part, header.steps, header.tokens)
        self.results.setdefault((header.plan, header.part), ref)

    def _replay_results(self) -> None:
        for frame, header in self.held.items():
            if header.kind == FrameKind.RESULT and header.round == self.head.round + 1:
                self._note_result(frame, header)

    def _broadcast(self, message: m.Message, but: object = (), also: object = ()) -> None:
        skip = set(but)  # type: ignore[call-overload]
        peers = dict.fromkeys((*self.head.members, *also))  # type: ignore[misc]
        self._effects.extend(Send(peer, message) for peer in peers if peer != self.me and peer not in skip)

    def _help_laggard(self, peer: PeerId, stands_at: int) -> None:
        """Send the commit that ``peer`` missed, or tell it how far the chain is."""
        commit = self.recent.get(stands_at + 1)
        alone = commit is not None and stands_at + 1 == self.head.round
        self._effects.append(Send(peer, commit if commit is not None and alone else m.Behind(self.head.round)))
