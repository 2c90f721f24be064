"""A run of three peers that train: what they learn goes through their schedules, and rounds as the run's terms say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.manifest import Manifest
from decentral.optimizers import OuterMethod
from decentral.replica.codec import codec_of
from decentral.replica.contribution import Contribution
from decentral.replica.replica import Replica
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.training import FlatModel
from decentral.training.live_side import LiveSide
from decentral.training.schedule import SyncSchedule
from tests.kit.learners import EXACT, SCHEMA, Inner, Learner
from tests.kit.replicas import NUMEL, SIGNERS, Books, Cut, Met, Swarm

# Shape suffix: N = elements of the one fragment, flat.


@dataclass
class Account:
    """What one peer learnt in all, and where it went; float64."""

    learnt_N: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))  # a descent direction
    given_N: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))  # contributed, and taken
    dropped_N: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))  # by an absence
    again_N: Tensor = field(default_factory=lambda: torch.zeros(NUMEL, dtype=torch.float64))  # left of what was taken


@dataclass(frozen=True)
class Round:
    """One round, and the books on both sides of it."""

    made: Mapping[int, Contribution]
    before: Books
    after: Books
    owed_before_N: Tensor
    owed_after_N: Tensor
    met: Met


class Course:
    """``round`` after round. The method may have keys that no manifest can spell; the rest is as ``manifest`` says."""

    def __init__(self, manifest: Manifest, method: OuterMethod) -> None:
        self.method, self.reduces, self.codec = method, manifest.exchange.kind == "reduce", codec_of(manifest)
        replicas = [Replica(SCHEMA, [torch.zeros(NUMEL)], method, self.codec, EXACT) for _ in SIGNERS]
        self.peers = [self._learner(n, replica) for n, replica in enumerate(replicas)]
        self.swarm = Swarm(replicas)
        self.accounts = [Account() for _ in SIGNERS]

    def _learner(self, n: int, replica: Replica) -> Learner:
        model, inner = FlatModel([torch.zeros(NUMEL)]), Inner(n)
        live = LiveSide(model, inner, SIGNERS[n].peer, SCHEMA)
        return Learner(replica, model, inner, SyncSchedule(1, 0, self.method, bytes(32), live=live))

    @property
    def anchor_N(self) -> Tensor:
        """All peers'."""
        return self.peers[0].anchor_N.double()

    def round(self, steps: Sequence[Tensor], present: Sequence[int], cut: Cut) -> Round:
        """Everybody makes an inner step; those who are present contribute, by ``cut`` where parts have owners."""
        for peer, step_N, account in zip(self.peers, steps, self.accounts, strict=True):
            before_N = peer.live_N.double()
            peer.learn(step_N)
            account.learnt_N += before_N - peer.live_N.double()
        kept = {n: self._kept(n) for n in present}
        made = {n: self._taken(n) for n in present}
        books, owed_N = self.swarm.books(), self.swarm.owed()
        met = self.swarm.reduced(made, cut) if self.reduces else self.swarm.gathered(made)
        for n, peer in enumerate(self.peers):
            self._merge(n, peer, made.get(n), met)
            self.accounts[n].again_N -= kept.get(n, 0.0)
        return Round(made, books, self.swarm.books(), owed_N, self.swarm.owed(), met)

    def _kept(self, n: int) -> Tensor:
        """What the peer has learnt of parameters that the round to come does not speak of."""
        peer, places = self.peers[n], self.method.drawn(self.swarm.head.outer_step).places
        learnt_N = peer.anchor_N.double() - peer.live_N.double()
        return torch.zeros_like(learnt_N) if places is None else torch.where(places(NUMEL), 0.0, learnt_N)

    def _taken(self, n: int) -> Contribution:
        peer, head = self.peers[n], self.swarm.head
        made = peer.schedule.take(peer.model, 0, peer.anchor_N, head.hash, 1, outer_step=head.outer_step)
        assert made is not None
        return made

    def _merge(self, n: int, peer: Learner, mine: Contribution | None, met: Met) -> None:
        step, account = met.steps[n], self.accounts[n]
        moved = (0, step.before_N, step.after_N, mine)
        update = CommittedUpdate(met.record, met.record.hash, *moved, state=step.state, channels=step.channels)
        peer.schedule.merge(update, peer.model)
        if mine is not None:
            account.given_N += mine.gradient_N.double()
            account.again_N += peer.anchor_N.double() - peer.live_N.double()
        for away in peer.schedule.absences:
            account.dropped_N += away.dropped_N.double()
        peer.schedule.absences.clear()
