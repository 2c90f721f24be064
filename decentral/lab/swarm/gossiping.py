"""Pairs of a gossip run in virtual time: each peer waits for its partner of the step, and for nobody else."""

from __future__ import annotations

from collections.abc import Sequence

from decentral.consensus.chain import Head
from decentral.dissemination.pairing import partner_of
from decentral.lab.swarm.lab_peer import LabPeer
from decentral.lab.swarm.swapping import swap
from decentral.lab.swarm.world import World
from decentral.replica.contribution import Contribution

__all__ = ["Gossiping"]


class Gossiping:
    """Who waits for whom."""

    def __init__(self, head: Head, peers: Sequence[LabPeer], world: World) -> None:
        self._head, self._peers, self._world = head, peers, world
        self._rank_of = {peer.signer.peer: peer.rank for peer in peers}
        self._offers: dict[int, tuple[Contribution, float]] = {}  # by rank, with when it was made
        self._sent: dict[int, float] = {}  # bytes of all peers, by gossip step
        self.apart: dict[int, list[float]] = {}  # how far apart pairs were, by gossip step

    def offers(self, peer: LabPeer, now: float) -> bool:
        """A peer's step is due; False where it starts over instead, and need not wait."""
        made = peer.take(self._head, peer.outer_step)
        if made is None:
            return False
        self._offers[peer.rank] = (made, now)
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
        begun = max(self._offers[rank][1] for rank in group)
        nbytes = self._last_nbytes if len(group) == 2 else 0.0
        return begun + max(self._world.seconds_of_round(rank, nbytes, "pair", len(group)) for rank in group)

    _last_nbytes = 0.0  # of the last pair's body: all are about as long

    def _swap(self, group: Sequence[int]) -> list[LabPeer]:
        members = [self._peers[rank] for rank in group]
        made, step = [self._offers.pop(rank)[0] for rank in group], members[0].outer_step
        nbytes, apart = swap(members, made, step)
        self._last_nbytes = float(nbytes)
        self._sent[step] = self._sent.get(step, 0.0) + nbytes * len(group)
        if apart is not None:
            self.apart.setdefault(step, []).append(apart)
        return members
