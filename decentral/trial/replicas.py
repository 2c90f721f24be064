"""A peer without a node, that is the shipped schedule, replica and inner optimizers, and the world of machines and
lines in which it trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from decentral.consensus.chain import Head
from decentral.manifest import Manifest
from decentral.node.node import make_replica
from decentral.replica.contribution import Contribution
from decentral.replica.replica import Replica
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.inner import build_inner, inner_step, warm_up
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide, Moments
from decentral.training.schedule import SyncSchedule, make_schedule
from decentral.wire.keys import Signer

__all__ = ["ExchangeKind", "TrialPeer", "TrialWorld", "trial_peer", "trial_peers", "trial_signers"]

Backward = Callable[[Tensor], object]


@dataclass
class TrialPeer:
    """A replica that trains, with the updates that it has not merged yet."""

    rank: int
    manifest: Manifest
    signer: Signer
    module: nn.Module
    optimizers: Sequence[Any]
    live: LiveModel
    replica: Replica
    schedule: SyncSchedule
    backlog: list[CommittedUpdate] = field(default_factory=list)
    steps: int = 0  # inner steps made
    outer_step: int = 0  # gossip steps made; of a swarm that agrees, the head's
    _schedulers: list[Any] = field(default_factory=list)
    _parameters: list[Tensor] = field(default_factory=list)
    _to_adopt: dict[int, tuple[Mapping[str, Tensor], frozenset[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._schedulers = [warm_up(optimizer, self.manifest.inner.warmup) for optimizer in self.optimizers]
        self._parameters = list(self.module.parameters())  # to look them up takes as long as to step them

    # ---- inner steps ----

    def step(self, loss: Callable[[], Tensor], backward: Backward, seconds: float) -> None:
        """Make one inner step by gradients that ``backward`` makes, or by losses alone."""

        def clipped(value: Tensor) -> None:
            backward(value)
            if self.manifest.inner.clip is not None:
                nn.utils.clip_grad_norm_(self._parameters, self.manifest.inner.clip)

        inner_step(self.manifest.inner, self.optimizers, loss, backward=clipped, begins=self.stepping)
        for scheduler in self._schedulers:
            scheduler.step()
        self.stepped(seconds)

    def stepping(self) -> None:
        """Let the method look at what is learnt before an inner step; what trains is in its place again afterwards."""
        self.schedule.calls.before_step()
        self.live.averages.resume()

    def stepped(self, seconds: float) -> None:
        """Count an inner step that was made, by its own optimizers or for it."""
        self.schedule.stepped()
        self.schedule.timing.seconds += seconds
        self.steps += 1
        for parameter in self._parameters:
            parameter.grad = None
        self._adopt()

    def schedule_as(self, schedulers: Sequence[Any]) -> None:
        """Go on with its own learning rates where others stepped for it."""
        for mine, other in zip(self._schedulers, schedulers, strict=True):
            mine.load_state_dict(other.state_dict())

    # ---- rounds ----

    def take(self, head: Head, outer_step: int) -> Contribution | None:
        """Return its contribution to ``outer_step``; None: it was away for too long, and starts over."""
        fragment = outer_step % self.schedule.num_fragments
        anchor_N, tokens = self.replica.anchors[fragment], 1
        made = self.schedule.take(self.live, fragment, anchor_N, head.hash, tokens, outer_step=outer_step)
        if made is None:
            self._start_over(self.schedule.away_too_long(fragment))
        else:
            made.check_finite(self.replica)
        self.schedule.absences.clear()
        return made

    def _start_over(self, fragments: Sequence[int]) -> None:
        for fragment in fragments:
            self.replica.feedback[fragment] = {}
        self.schedule.restart(self.live, self.replica.anchors, fragments)

    def merge_waiting(self) -> None:
        """Bring into the live model every commit whose time has come."""
        while self.backlog and self.schedule.timing.may_merge(self.backlog[0]):
            update = self.backlog.pop(0)
            if self.schedule.merge(update, self.live) and self.schedule.method.inner and update.state:
                before = self._to_adopt.get(update.fragment, ({}, frozenset()))[1]
                self._to_adopt[update.fragment] = (update.state, before | update.channels)
        self.schedule.absences.clear()
        self._adopt()
        self.live.averages.resume()

    def _adopt(self) -> None:
        """Hand on shared states, as ``Merger`` in `decentral.training.outer_loop` does."""
        for fragment, (state, channels) in list(self._to_adopt.items()):
            if self.schedule.method.adopt(state, self.schedule.live, fragment, channels):
                del self._to_adopt[fragment]


Kind = TypeVar("Kind", bound=TrialPeer)


def trial_peers(manifest: Manifest, modules: Sequence[nn.Module]) -> list[TrialPeer]:
    """Make a peer of each module, which is its anchor; in the order of their ids, in which all sums are made."""
    signers = trial_signers(len(modules))
    return [
        trial_peer(manifest, rank, signer, module, build_inner(manifest.inner, module), TrialPeer)
        for rank, (signer, module) in enumerate(zip(signers, modules, strict=True))
    ]


def trial_signers(count: int) -> list[Signer]:
    """Return the keys of so many peers, by rank: the same in every run."""
    signers = [Signer(hashlib.blake2b(b"lab%d" % n, digest_size=32).digest()) for n in range(count)]
    return sorted(signers, key=lambda signer: signer.peer)


def trial_peer(
    manifest: Manifest, rank: int, signer: Signer, module: nn.Module, optimizers: Sequence[Any], kind: type[Kind]
) -> Kind:
    """Make a peer of this ``kind``, whose live model is its own ``module``, and whose anchor is the module as it is
    now.
    """
    live = LiveModel(module, manifest.outer.fragments, None, optimizers, layout=manifest.outer.fragment_layout)
    replica = make_replica(manifest, live.schema, live.read_all(), live.read_buffers())
    replica.codec.warm_up()
    side = LiveSide(live, Moments(live, optimizers), signer.peer, live.schema)
    schedule = make_schedule(manifest, bytes(32), side)
    live.averages.resume()
    return kind(rank, manifest, signer, module, optimizers, live, replica, schedule)


# ---- machines and lines ----
#
# How long a step takes, and how long bytes do.
#
# A model that is tried is small, and stands for one that somebody would train: each of its bytes counts as
# ``scale`` of that one's. Every peer has the same line, but for one that may be thin, and the same machine, but for one
# that may be slow: the last two, so that rank 0 is ever usual.

ExchangeKind = Literal["gather", "reduce", "pair"]


@dataclass(frozen=True, slots=True)
class TrialWorld:
    """All peers' machines and lines."""

    peers: int
    step_seconds: float = 1.0  # of one inner step
    rate: float = float("inf")  # bytes a second, up and down each
    latency: float = 0.0  # seconds one way
    scale: float = 1.0  # bytes of the real model for one of the small one
    slow: float = 1.0  # times as long that the slow peer's steps take
    thin: float = 1.0  # times as long that bytes take on the thin peer's line

    def seconds_of_step(self, rank: int) -> float:
        """Return the seconds of one inner step of this peer."""
        return self.step_seconds * (self.slow if rank == self.peers - 1 else 1.0)

    def sent(self, nbytes: float, kind: ExchangeKind, taking_part: int) -> float:
        """Return the bytes that one peer sends in a round, as often as its body of ``nbytes`` goes out."""
        others = max(0, taking_part - 1)
        times = {"gather": float(others), "reduce": 2 * others / max(1, taking_part), "pair": min(1.0, others)}
        return nbytes * self.scale * times[kind]

    def seconds_of_round(self, rank: int, nbytes: float, kind: ExchangeKind, taking_part: int) -> float:
        """Return the seconds from a contribution to the moment at which everybody has it; a gather takes in what it
        sends out.
        """
        if taking_part < 2:
            return 0.0
        line = self.rate / (self.thin if rank == max(0, self.peers - 2) else 1.0)
        trips = 2 if kind == "reduce" else 1
        return self.sent(nbytes, kind, taking_part) / line + trips * self.latency
