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
from decentral.compressors.feedback import Feedback, add_sent
from decentral.manifest import preset_manifest
from decentral.optimizers import NO_MOMENTS, Channel, Contributor, OuterMethod, RoundInfo, make_outer
from decentral.optimizers.aggregation.mean import Adder, mean_of
from decentral.optimizers.aggregation.norm_clip import clip_scales, norm

# Shape suffixes: N = coordinates, K = peers; flat float32.

STEPS = 10  # H
SHAPES = ((8, 8),)  # of the parameters that the coordinates are: compressors see tiles
NAMES = ("matrix",)
NUMEL = 64


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
        add_sent(self.compressor, arrived_N, sending.payloads)
        return arrived_N, sending.state


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
        anchor_KN = torch.stack(self.anchors)
        noise_KN = torch.randn(self.peers, NUMEL, generator=self.random) * (self.rate * self.curvature_N).sqrt()
        return self.best_KN + self.left_N * (anchor_KN - self.best_KN) + 0.01 * noise_KN

    def _sent(self, peer: int, local_N: Tensor) -> dict[str, Tensor]:
        """What arrives of a peer's contribution, by channel."""
        anchor_N = self.anchors[peer % len(self.anchors)]
        flow, *beside = self._due
        states = self.method.states_sent(anchor_N, NO_MOMENTS, 0)
        told = {channel.name: states.get(channel.name, torch.zeros(NUMEL)) for channel in beside}
        change_N = self.method.contribute(anchor_N, local_N)
        if self.lossy is not None:
            change_N, self.books[peer] = self.lossy.sent(change_N, self.books[peer])
            told = {name: self.lossy.sent(state_N, {})[0] for name, state_N in told.items()}
        return {flow.name: change_N} | told

    def _commit(self, sent: Sequence[dict[str, Tensor]]) -> None:
        told = tuple(
            Contributor(bytes([n]) * 32, STEPS, STEPS, 0, self.method.summary(list(one.values())))
            for n, one in enumerate(sent)
        )
        weights = tuple(self.method.weights(told, (1.0,) * self.peers, self.states[0]))
        if not any(weights):
            return
        received = {channel.name: self._combined(channel, sent, weights) for channel in self._due}
        info = RoundInfo(self.step, told, weights, SHAPES, NAMES)
        self.anchors[0], self.states[0] = self.method.outer_step(self.anchors[0], received, self.states[0], info)

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

    def _swap(self, pair: Sequence[int], sent: Sequence[dict[str, Tensor]]) -> None:
        for mine, others in zip(pair, (pair, pair[::-1]), strict=False):
            received = {
                channel.name: _of_pair(channel, [sent[n][channel.name] for n in others]) for channel in self._due
            }
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
