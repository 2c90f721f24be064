"""Pairs of a gossip run in virtual time: each peer waits for its partner of the step, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decentral.consensus.chain import Head
from decentral.lab.lab_peer import LabPeer, LabWorld
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep, Half, half_of, install, step_alone, step_together
from decentral.rounds.partners import partner_of

__all__ = ["Gossiping", "step_apart", "step_as_pair"]


@dataclass(frozen=True, slots=True)
class _Offered:
    """A peer that stands still for its step."""

    made: Contribution
    half: Half | None  # what it sends; None: it has no partner
    at: float


class Gossiping:
    """Who waits for whom."""

    def __init__(self, head: Head, peers: Sequence[LabPeer], world: LabWorld) -> None:
        self._head, self._peers, self._world = head, peers, world
        self._rank_of = {peer.signer.peer: peer.rank for peer in peers}
        self._offers: dict[int, _Offered] = {}  # by rank
        self._sent: dict[int, float] = {}  # bytes of all peers, by gossip step

    def offers(self, peer: LabPeer, now: float) -> bool:
        """A peer's step is due; False where it starts over instead, and need not wait."""
        made = peer.take(self._head, peer.outer_step)
        if made is None:
            return False
        half = None
        if len(self._group(peer.rank)) == 2:
            half = half_of(peer.replica, made.fragment, made.gradient_N, made.states)
        self._offers[peer.rank] = _Offered(made, half, now)
        return True

    @property
    def next_at(self) -> float:
        """When the next pair has met."""
        return min((self._met_at(group) for group in self._ready()), default=float("inf"))

    def meet(self, now: float) -> list[LabPeer]:
        """Those that have met by ``now`` take their step; they may step on."""
        moved = list[LabPeer]()
        for group in list(self._ready()):
            if self._met_at(group) <= now:
                moved += self._swap(group)
        return moved

    def nbytes_of(self, step: int) -> float:
        """Bytes that one peer sent in this step, on average."""
        return self._sent.pop(step, 0.0) / len(self._peers)

    def _ready(self) -> list[list[int]]:
        """Groups of which everybody is there, each once."""
        groups = {tuple(sorted(self._group(rank))) for rank in self._offers}
        return [list(group) for group in sorted(groups) if self._all_there(group)]

    def _group(self, rank: int) -> list[int]:
        peer = self._peers[rank]
        method, fragments = peer.schedule.method, peer.schedule.num_fragments
        partner = None
        if method.meets(peer.outer_step // fragments):
            partner = partner_of(self._head.run, peer.outer_step, self._head.members, peer.signer.peer)
        return [rank] if partner is None else [rank, self._rank_of[partner]]

    def _all_there(self, group: Sequence[int]) -> bool:
        return all(r in self._offers for r in group) and len({self._peers[r].outer_step for r in group}) == 1

    def _met_at(self, group: Sequence[int]) -> float:
        begun = max(self._offers[rank].at for rank in group)
        return begun + max(self._seconds(rank, len(group)) for rank in group)

    def _seconds(self, rank: int, taking_part: int) -> float:
        half = self._offers[rank].half
        return 0.0 if half is None else self._world.seconds_of_round(rank, len(half.body), "pair", taking_part)

    def _swap(self, group: Sequence[int]) -> list[LabPeer]:
        members, offered = [self._peers[rank] for rank in group], [self._offers.pop(rank) for rank in group]
        step, halves = members[0].outer_step, [one.half for one in offered if one.half is not None]
        if len(halves) == 2:
            step_as_pair(members, offered[0].made.fragment, halves, step)
        else:
            step_apart(members[0], offered[0].made, step)
        self._sent[step] = self._sent.get(step, 0.0) + sum(len(half.body) for half in halves)
        return members


# ---- one gossip step ----
#
# Of a pair, or of a peer alone: as ``Swapping`` in `decentral.rounds.gossip` makes it once both have committed.


def step_apart(peer: LabPeer, made: Contribution, step: int) -> None:
    """Gossip step ``step`` of a peer without a partner."""
    alone = step_alone(peer.replica, made.fragment, step, made.gradient_N, made.states)
    _take_over(peer, made.fragment, alone)


def step_as_pair(peers: Sequence[LabPeer], fragment: int, halves: Sequence[Half], step: int) -> None:
    """Gossip step ``step`` of two peers, by what each sends."""
    theirs = [half.sent_CN for half in reversed(halves)]
    steps = [
        step_together(peer.replica, fragment, step, half, other_CN)
        for peer, half, other_CN in zip(peers, halves, theirs, strict=True)
    ]
    for peer, one in zip(peers, steps, strict=True):
        _take_over(peer, fragment, one)


def _take_over(peer: LabPeer, fragment: int, step: GossipStep) -> None:
    install(peer.replica, fragment, step)
    peer.schedule.merge_swap(peer.live, fragment, step.after_N, unmoved=bool(step.unmoved))
    peer.schedule.absences.clear()
    peer.live.averages.resume()
    peer.outer_step += 1
