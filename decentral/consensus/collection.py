"""What one peer has seen of the round in progress: offers, frames held, who is there, whether to go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from decentral.consensus.chain import Digest, Head
from decentral.consensus.deadline import Deadline
from decentral.consensus.membership import Presence
from decentral.wire.frames import FrameKind, Header, claims_of
from decentral.wire.keys import PeerId
from decentral.wire.messages import FrameRef, Offer, Record


class Collection:
    """Offers and frames of one round."""

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.offers: dict[PeerId, Offer] = {}
        self.offered_at: dict[PeerId, float] = {}
        self.first_offer: float | None = None
        self.arrived: set[PeerId] = set()
        self._described: dict[PeerId, Header] = {}  # held, of whom the offer says what the frame does
        self.quorum_since: float | None = None  # since when as many were usable as a quorum is
        self.ask_at: dict[Digest, float] = {}  # when a frame that is missing will be asked for

    def add(self, peer: PeerId, offer: Offer, now: float) -> bool:
        """Take the first offer of a peer; an equivocating second one is ignored."""
        if peer in self.offers:
            return False
        self.offers[peer] = offer
        self.offered_at[peer] = now
        self.first_offer = now if self.first_offer is None else self.first_offer
        return True

    def usable(self, head: Head, held: Mapping[Digest, Header], kind: FrameKind, states: int = 0) -> list[PeerId]:
        """The members whose offers start from our anchor and whose frames are here, in peer order.

        ``kind``: of the frames that a record names; results are not there before a plan. ``states``: channels beside
        the change that a contribution has in this round.
        """
        if not self.offers:
            return []  # as with most ticks: peers train
        return [
            peer
            for peer in head.members
            if (offer := self.offers.get(peer)) is not None
            and offer.base == head.anchor
            and (kind == FrameKind.RESULT or self._is_held(offer, peer, held, kind, states))
        ]

    def _is_held(self, offer: Offer, peer: PeerId, held: Mapping[Digest, Header], kind: FrameKind, states: int) -> bool:
        """Whether what a peer offered is here; asked with every event, so each frame is compared once."""
        header = held.get(offer.frame)
        if header is None:
            return False
        if self._described.get(peer) is header:
            return True
        if not _describes(offer, peer, header, kind, states):
            return False
        self._described[peer] = header
        return True

    def newly(self, usable: Iterable[PeerId]) -> list[Offer]:
        """The offers among ``usable`` that were not before."""
        new = [peer for peer in usable if peer not in self.arrived]
        self.arrived.update(new)
        return [self.offers[peer] for peer in new]

    def ready(self, usable: Sequence[PeerId], head: Head, presence: Presence, deadline: Deadline, now: float) -> bool:
        """All who are there have offered, or the deadline is over and waiting longer helps nobody."""
        if not usable or self.first_offer is None:
            return False
        if now >= self.first_offer + deadline.ceiling:
            return True
        here = set(usable)
        missing = (peer for peer in head.members if peer not in here and peer not in head.newcomers)
        if not any(presence.present(peer) for peer in missing):
            return True
        if now < deadline.at(self.opened, self.first_offer):
            return False
        return 2 * len(usable) >= sum(map(presence.present, head.members))


def _describes(offer: Offer, peer: PeerId, header: Header, kind: FrameKind, states: int) -> bool:
    """Whether an offer says of a frame what the frame says of itself: else nobody could vote for it."""
    found = (header.sender, header.epoch, header.round, header.fragment, header.base)
    said = (peer, offer.epoch, offer.round, offer.fragment, offer.base)
    return found == said and (header.kind, header.states) == (kind, states) and claims_match(header, offer)


def claims_match(header: Header, said: Offer | FrameRef) -> bool:
    """Whether what is said of a frame, which its weight may follow from, is what its sender signed with it."""
    signed = (header.steps, header.tokens, header.claims)
    return signed == (said.steps, said.tokens, claims_of(said.based, said.summary))


def references(peers: Iterable[PeerId], offers: Mapping[PeerId, Offer]) -> tuple[FrameRef, ...]:
    """The offers of ``peers`` as a record names them, in peer order."""
    said = ((peer, offers[peer]) for peer in sorted(peers))
    return tuple(
        FrameRef(peer, offer.frame, 0, offer.steps, offer.tokens, offer.based, offer.summary) for peer, offer in said
    )


def fits(header: Header, ref: FrameRef, record: Record, kind: FrameKind, states: int = 0) -> bool:
    """Whether a held frame is the one the record means: every field that changes its meaning is compared.

    ``kind``: of what records of this run name; of another, it could not be decoded once it is committed. ``states``:
    channels beside the change that what the record names has in its outer step.
    """
    return (
        (header.kind, header.sender, header.round, header.epoch) == (kind, ref.peer, record.round, record.epoch)
        and (header.fragment, header.base, header.part) == (record.fragment, record.base, ref.part)
        and (kind == FrameKind.RESULT) == bool(record.contributors)
        and (kind != FrameKind.RESULT or header.plan == record.plan)
        and header.states == states
        and claims_match(header, ref)
    )
