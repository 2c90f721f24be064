"""Peers who descend one stiff quadratic, each with noise and an optimum of its own, and meet after every H steps.

loss(x) = 0.5 * sum(c * (x - best_i)^2), c from 1e-3 to 1; H steps of SGD leave (1 - rate*c)^H of the distance to
best_i. At rate 1 the stiffest coordinates are solved within a round, and an outer step meets them with all its gain;
the flattest take hundreds of rounds, in which an instability has time to grow. Outer steps are the methods' own, in a
loop and without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.compressors import Compressor, parse_compressor, parse_feedback
from decentral.compressors.base import add_flat
from decentral.compressors.feedback import Feedback
from decentral.manifest import preset_manifest
from decentral.optimizers import Channel, Contributor, OuterMethod, RoundInfo, make_outer
from decentral.optimizers.aggregation.base import clip_scales, norm
from decentral.optimizers.mean import Adder, mean_of
from decentral.parameters import schema_of
from decentral.simulate.lessons import Descent as InnerDescent
from decentral.simulate.training import FlatModel
from decentral.training.live_side import LiveSide, MethodCalls

# Shape suffixes: N = coordinates, K = peers; flat float32.

STEPS = 10  # H
SHAPES = ((8, 8),)  # of the parameters that the coordinates are: compressors see tiles
NAMES = ("matrix",)
NUMEL = 64
SCHEMA = schema_of({name: torch.zeros(*shape, requires_grad=True) for name, shape in zip(NAMES, SHAPES, strict=True)})


@dataclass(frozen=True, slots=True)
class Arrived:
    """Of one contribution: its vectors by channel, what it said, and the change, which gossip may keep at home."""

    vectors: dict[str, Tensor]
    said: bytes
    change_N: Tensor


@dataclass(frozen=True, slots=True)
class Lossy:
    """What is sent through: the preset's compressor and feedback."""

    compressor: Compressor
    feedback: Feedback

    @classmethod
    def of(cls, preset: str) -> Lossy:
        terms = preset_manifest(preset).compressor
        return cls(parse_compressor(terms.chain), parse_feedback(terms.feedback))

    def sent(self, change_N: Tensor, books: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """What arrives of a change, and the sender's books after it."""
        sending, arrived_N = self.feedback.send(self.compressor, change_N, books, SHAPES), torch.zeros(NUMEL)
        add_flat(self.compressor, arrived_N, sending.payloads)
        return arrived_N, sending.state


class Side:
    """One peer's own side, for methods with hooks around inner steps: all steps of a round are one to them."""

    def __init__(self, method: OuterMethod, anchor_N: Tensor, number: int) -> None:
        self.method, self.peer = method, bytes([number]) * 32
        self.model, self.inner = FlatModel([anchor_N]), InnerDescent()
        self.live = LiveSide(self.model, self.inner, self.peer, SCHEMA)
        self.live.begin(1, lambda fragment: STEPS)
        self.calls = MethodCalls(method, self.live, 1)

    def learnt(self, anchor_N: Tensor, trained_N: Tensor) -> Tensor:
        """Where it is after inner steps that would have brought it to ``trained_N``."""
        self.model.write(0, anchor_N)
        (taken_N,) = self.inner.step([anchor_N - trained_N], self.calls.before_step)
        self.model.write(0, anchor_N - taken_N)
        self.calls.after_step()
        self.calls.after_take(0)
        return self.model.read(0)

    def committed(self, state: Mapping[str, Tensor], peers: tuple[bytes, ...]) -> None:
        """Its contribution and those of ``peers`` made a new anchor."""
        self.method.after_commit(self.live, 0, state, dict(self.live.own(0)), peers)


@dataclass
class Descent:
    """A run: ``anchors`` has one row for all, or one for each replica of gossip."""

    method: OuterMethod
    peers: int
    lossy: Lossy | None = None
    clips: bool = False
    rate: float = 1.0  # of inner steps
    step: int = 0
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def __post_init__(self) -> None:
        self.curvature_N = torch.logspace(-3, 0, NUMEL)
        self.left_N = (1 - self.rate * self.curvature_N) ** STEPS
        self.best_KN = 0.1 * torch.randn(self.peers, NUMEL, generator=self.random)
        self.best_KN -= self.best_KN.mean(0)
        replicas = self.peers if self.method.topology == "pair" else 1
        self.anchors = [torch.ones(NUMEL) for _ in range(replicas)]
        self.states = [self.method.init(anchor_N) for anchor_N in self.anchors]
        self.books: list[dict[str, Tensor]] = [{} for _ in range(self.peers)]
        self.sides = [Side(self.method, self.anchors[0], n) for n in range(self.peers)]
        self.ahead_KN = torch.zeros(self.peers, NUMEL)  # what each learnt of parameters that were not drawn yet

    def loss(self) -> float:
        """Of the mean of all replicas, against the mean optimum, which is 0."""
        mean_N = torch.stack(self.anchors).mean(0)
        return float((0.5 * self.curvature_N * mean_N**2).double().sum())

    def spread(self) -> float:
        """The variance between replicas."""
        return float(torch.stack(self.anchors).double().var(0, unbiased=False).mean())

    def round(self) -> None:
        """Inner steps of all, and an outer step."""
        sent = [self._sent(peer, local_N) for peer, local_N in enumerate(self._trained())]
        if self.method.topology == "pair":
            order = torch.randperm(self.peers, generator=self.random).tolist()
            for first in range(0, self.peers, 2):
                self._swap(order[first : first + 2], sent)
        else:
            self._commit(sent)
        self.step += 1

    # ---- one round ----

    @property
    def _due(self) -> list[Channel]:
        return [channel for channel in self.method.channels() if channel.is_due(self.step)]

    def _trained(self) -> Tensor:
        """Where every peer is after its inner steps, (K, N)."""
        anchor_KN = torch.stack(self.anchors) + self.ahead_KN
        noise_KN = torch.randn(self.peers, NUMEL, generator=self.random) * (self.rate * self.curvature_N).sqrt()
        return self.best_KN + self.left_N * (anchor_KN - self.best_KN) + 0.01 * noise_KN

    def _sent(self, peer: int, local_N: Tensor) -> Arrived:
        """What arrives of a peer's contribution."""
        place, side = peer % len(self.anchors), self.sides[peer]
        anchor_N, (flow, *beside) = self.anchors[place], self._due
        if self.method.inner:
            local_N = side.learnt(anchor_N, local_N)
        places = self.method.drawn(self.step).places
        if places is not None:
            drawn_N = places(NUMEL)
            self.ahead_KN[peer] = torch.where(drawn_N, 0.0, local_N - anchor_N)
            local_N = torch.where(drawn_N, local_N, anchor_N)
        else:
            self.ahead_KN[peer] = 0.0
        states = self.method.states_sent(anchor_N, side.live, 0)
        told = {channel.name: states.get(channel.name, torch.zeros(NUMEL)) for channel in beside}
        change_N = self.method.contribute(anchor_N, local_N)
        said = self.method.summary.says(side.live, 0, [change_N, *told.values()])
        first_N = self.method.proposal(anchor_N, change_N, self.states[place]) if flow.is_replica else change_N
        if self.lossy is not None:
            first_N, self.books[peer] = self.lossy.sent(first_N, self.books[peer])
            told = {name: self.lossy.sent(state_N, {})[0] for name, state_N in told.items()}
        return Arrived({flow.name: first_N} | told, said, change_N)

    def _commit(self, arrived: Sequence[Arrived]) -> None:
        sent = [one.vectors for one in arrived]
        told = tuple(Contributor(bytes([n]) * 32, STEPS, STEPS, 0, one.said) for n, one in enumerate(arrived))
        weights = tuple(self.method.weights(told, (1.0,) * self.peers, self.states[0]))
        if not any(weights):
            return
        received = {channel.name: self._combined(channel, sent, weights) for channel in self._due}
        info = RoundInfo(self.step, told, weights, SHAPES, NAMES, self.peers)
        self.anchors[0], self.states[0] = self.method.outer_step(self.anchors[0], received, self.states[0], info)
        for side in self.sides if self.method.inner else ():
            side.committed(self.states[0], tuple(one.peer for one in told))

    def _combined(self, channel: Channel, sent: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> Tensor:
        rows = [one[channel.name] for one in sent]
        if channel.combine == "each":
            return torch.stack(rows)
        flow = channel.name == self.method.channels()[0].name
        if self.clips and flow:
            scales = clip_scales([norm(row_N) for row_N in rows])
            rows = [row_N * scale for row_N, scale in zip(rows, scales, strict=True)]
        adders: list[Adder] = [
            (bytes([n]) * 32, _Row(row_N), weight) for n, (row_N, weight) in enumerate(zip(rows, weights, strict=True))
        ]
        return mean_of(torch.zeros(NUMEL), adders)

    def _swap(self, pair: Sequence[int], sent: Sequence[Arrived]) -> None:
        for mine, others in zip(pair, (pair, pair[::-1]), strict=False):
            met = others if self.method.meets(self.step) else [mine]
            received = {one.name: _of_pair(one, [sent[n].vectors[one.name] for n in met]) for one in self._due}
            if self._due[0].is_replica:
                received["change"] = sent[mine].change_N
            info = RoundInfo(self.step, shapes=SHAPES, names=NAMES)
            made = self.method.outer_step(self.anchors[mine], received, self.states[mine], info)
            self.anchors[mine], self.states[mine] = made


class _Row:
    def __init__(self, row_N: Tensor) -> None:
        self._row_N = row_N

    def __call__(self, total_N: Tensor, weight: float) -> None:
        total_N += self._row_N * weight


def _of_pair(channel: Channel, rows: Sequence[Tensor]) -> Tensor:
    """One that is left over comes alone."""
    if channel.combine == "each":
        return torch.stack(list(rows))
    return rows[0] if len(rows) == 1 else (rows[0] + rows[1]) * 0.5


def with_defaults(preset: str) -> OuterMethod:
    """The method as its preset has it."""
    return make_outer(preset, preset_manifest(preset).outer.hyper)
