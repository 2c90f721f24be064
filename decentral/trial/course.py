"""The course of a run of replicas in virtual time: who steps, who contributes, who waits, and when a round is decided.

Events are the ends of inner steps and the decisions of rounds. Peers whose steps end at the same moment step together,
so that their gradients are made at once. A round is decided when all have contributed, or as the method's quorum says;
a peer that it passes by carries its progress on, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from decentral.consensus.chain import Head
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.replica.contribution import Contribution
from decentral.trial.meeting import Gossiping, Met, body_of, first_head, gather, reduce, slice_of
from decentral.trial.replicas import TrialPeer, TrialWorld

__all__ = ["Course", "Gradients", "Losses", "Reached", "StepTogether"]

NEVER = float("inf")


class Losses(Protocol):
    """The task that is learnt."""

    def loss(self, module: nn.Module, rank: int, step: int) -> Tensor:
        """Mean loss of the batch of inner step ``step``, counted from 0, of the replica of this rank."""
        ...


class Gradients(Protocol):
    """Makes gradients for several replicas."""

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Leave gradients in the parameters of each module of ``steps``, by rank its inner step; return the losses."""
        ...


class StepTogether(Protocol):
    """Inner steps of all replicas at once."""

    def step(self, seconds: Sequence[float]) -> None:
        """Make one of every replica; ``seconds``: virtual ones that it takes each of them."""
        ...

    def dissolve(self) -> None:
        """Let each replica step by itself from now on."""
        ...


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a run is after an outer step."""

    outer_step: int
    seconds: float  # virtual
    inner_steps: int  # of all peers
    nbytes: float  # that one peer sent since the one before, on average, of the small model


class Course:
    """A run. ``go`` until its outer steps are made; the peers are there to be looked at in between.

    With ``lockstep`` the inner steps of peers that all step at one moment are made together.
    """

    def __init__(
        self,
        work: Losses,
        peers: list[TrialPeer],
        trained: Gradients,
        world: TrialWorld,
        lockstep: StepTogether | None = None,
    ) -> None:
        self.work, self.peers, self.world = work, peers, world
        self.manifest = peers[0].manifest
        self.trained = trained
        self.head: Head = first_head(peers)
        for peer in peers:
            peer.schedule.seen = self.head.hash
        self.now = 0.0
        self._ready = [world.seconds_of_step(peer.rank) for peer in peers]  # when each one's inner step ends
        self._offers: dict[int, tuple[Contribution, float]] = {}  # by rank, with when everybody has it
        self._pairs = Gossiping(self.head, peers, world) if self._gossips else None
        self._lockstep = lockstep
        self._forward_only = INNER_OPTIMIZERS[self.manifest.inner.optimizer_name].forward_only

    @property
    def _gossips(self) -> bool:
        return not self.peers[0].replica.agrees

    @property
    def outer_step(self) -> int:
        """Return the outer steps that all peers have made."""
        return min(peer.outer_step for peer in self.peers) if self._gossips else self.head.outer_step

    def go(self) -> Iterator[Reached]:
        """Run, and yield after every outer step."""
        while self.outer_step < self.manifest.run.rounds:
            decided = self._decision_time()
            stepping = min(self._ready)
            self.now = min(decided, stepping)
            assert self.now < NEVER, "somebody steps, or a round can be decided"
            if decided <= stepping:
                yield from self._decide()
            else:
                self._step([rank for rank, at in enumerate(self._ready) if at <= self.now])

    # ---- inner steps ----

    def _step(self, ranks: list[int]) -> None:
        if self._lockstep is not None and len(ranks) < len(self.peers):
            self._lockstep.dissolve()
            self._lockstep = None
        if self._lockstep is not None:
            self._lockstep.step([self._pace(rank) for rank in ranks])
        else:
            self._step_apart(ranks)
        for rank in ranks:
            self._boundary(self.peers[rank])

    def _step_apart(self, ranks: list[int]) -> None:
        losses = {} if self._forward_only else self.trained.backward({r: self.peers[r].steps for r in ranks})
        for rank in ranks:
            self._step_one(self.peers[rank], losses)

    def _step_one(self, peer: TrialPeer, losses: Mapping[int, Tensor]) -> None:
        rank, step = peer.rank, peer.steps
        if self._forward_only:
            peer.step(lambda: self.work.loss(peer.module, rank, step), Tensor.backward, self._pace(rank))
        else:
            peer.step(lambda: losses[rank], lambda loss: None, self._pace(rank))

    def _pace(self, rank: int) -> float:
        return self.world.seconds_of_step(rank)

    def _boundary(self, peer: TrialPeer) -> None:
        """After an inner step: merge, contribute where that is due, and step on or wait."""
        peer.merge_waiting()
        self._ready[peer.rank] = self.now + self._pace(peer.rank)
        if self._pairs is not None:
            if peer.schedule.timing.due and self._pairs.offers(peer, self.now):
                self._ready[peer.rank] = NEVER
        elif peer.schedule.timing.due and peer.schedule.seen == self.head.hash:
            self._offer(peer)
        peer.live.averages.resume()

    def _offer(self, peer: TrialPeer) -> None:
        made = peer.take(self.head, self.head.outer_step)
        if made is None:
            return
        self._offers[peer.rank] = (made, self.now + self._seconds_to_all(peer, made))
        if not peer.schedule.timing.overlap:
            self._ready[peer.rank] = NEVER

    def _seconds_to_all(self, peer: TrialPeer, made: Contribution) -> float:
        """Return the seconds until everybody has it; a slice is encoded for this alone, where bytes take time."""
        kind = self.manifest.exchange.kind
        takes_time = self.world.rate < NEVER
        nbytes = (body_of(peer, made) if kind == "gather" else slice_of(peer, made)) if takes_time else 0
        return self.world.seconds_of_round(peer.rank, nbytes, kind, len(self.peers))

    # ---- rounds ----

    def _decision_time(self) -> float:
        """Return when the round in progress will be decided, as far as offers tell by now."""
        if self._pairs is not None:
            return self._pairs.next_at
        timing = self.peers[0].schedule.method.timing
        arrivals = sorted(there for _, there in self._offers.values())
        if len(arrivals) == len(self.peers):
            return max(self.now, arrivals[-1])
        if timing.quorum and len(arrivals) >= timing.quorum:
            return max(self.now, arrivals[timing.quorum - 1] + timing.grace)
        return NEVER

    def _decide(self) -> Iterator[Reached]:
        if self._pairs is not None:
            before = self.outer_step
            for peer in self._pairs.meet(self.now):
                self._ready[peer.rank] = self.now + self._pace(peer.rank)
            for step in range(before, self.outer_step):
                yield self._reach(step + 1, self._pairs.nbytes_of(step))
            return
        named = {rank: made for rank, (made, there) in sorted(self._offers.items()) if there <= self.now}
        met = self._met(named)
        self.head = met.head
        self._offers.clear()
        sent = [self.world.sent(n, self.manifest.exchange.kind, len(named)) for n in met.nbytes.values()]
        self._wake()
        yield self._reach(self.head.outer_step, sum(sent) / self.world.scale / len(self.peers))

    def _met(self, named: dict[int, Contribution]) -> Met:
        make = reduce if self.manifest.exchange.kind == "reduce" else gather
        return make(self.head, self.peers, named)

    def _wake(self) -> None:
        """Let peers that stood still merge now, and step on."""
        for peer in self.peers:
            if self._ready[peer.rank] == NEVER:
                peer.merge_waiting()
                self._ready[peer.rank] = self.now + self._pace(peer.rank)

    def _reach(self, outer_step: int, nbytes: float) -> Reached:
        return Reached(outer_step, self.now, sum(peer.steps for peer in self.peers), nbytes)
