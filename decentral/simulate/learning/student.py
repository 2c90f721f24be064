"""A model small enough to be trained by every peer of a simulated swarm, and large enough to show what a run costs it.

A student learns the function of a teacher of its own shape: residual layers ``h + tanh(h W)``, one fragment each, from
Gaussian inputs that no two peers share and noisy answers, by AdamW: more peers see more, and average the noise away. A
fragment is one 64x64 tile, so that a compressor keeps the share of it that it keeps of a large model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentral.optimizers import InnerOptimizer

__all__ = ["WIDTH", "Student", "alone", "beginning"]

WIDTH = 64
BATCH = 32
LEARNING_RATE = 1e-3
NOISE = 1.0  # standard deviation of what is added to the answers
HELD_OUT = 1024

# Shape suffixes: B = examples, D = WIDTH, F = fragments, N = D * D.


class Student:
    """One life of one peer's inner optimizer. See Lesson."""

    def __init__(self, num_fragments: int, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = [torch.zeros(WIDTH * WIDTH, requires_grad=True) for _ in range(num_fragments)]
        self._optimizer = torch.optim.AdamW(self._weights, lr=LEARNING_RATE, weight_decay=0.0)
        self.inner: InnerOptimizer = _AdamMoments(self._weights, self._optimizer)

    def step(self, live: Sequence[Tensor], number: int, begins: Callable[[], None] = lambda: None) -> list[Tensor]:
        """One step from the live parameters; what it subtracts from each fragment."""
        inputs_BD = torch.randn(BATCH, WIDTH, generator=self._generator)
        with torch.no_grad():
            for weight_N, live_N in zip(self._weights, live, strict=True):
                weight_N.copy_(live_N)
        self._optimizer.zero_grad()
        noise_BD = NOISE * torch.randn(BATCH, WIDTH, generator=self._generator)
        _loss(self._weights, inputs_BD, noise_BD).backward()  # type: ignore[no-untyped-call]  # torch's
        begins()
        self._optimizer.step()
        return [live_N - weight_N.detach() for weight_N, live_N in zip(self._weights, live, strict=True)]

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """Mean squared error on inputs that nobody trains on, as a share of the variance of the targets."""
        with torch.no_grad():
            inputs_BD = torch.randn(HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(0))
            return float(_loss(anchors, inputs_BD, torch.zeros(())))


class _AdamMoments:
    """See decentral.optimizers.InnerOptimizer."""

    learning_rate = LEARNING_RATE

    def __init__(self, weights: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._weights, self._optimizer = weights, optimizer

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        found: Tensor | None = self._optimizer.state[self._weights[fragment]].get(name)
        return None if found is None else found.clone()

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        found: Tensor | None = self._optimizer.state[self._weights[fragment]].get(name)
        if found is not None:
            found.copy_(moment_N)
        return found is not None

    def read_gradient(self, fragment: int) -> Tensor | None:
        found = self._weights[fragment].grad
        return None if found is None else found.clone()

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        found = self._weights[fragment].grad
        if found is not None:
            found += added_N


def beginning(num_fragments: int) -> list[Tensor]:
    """The parameters that every run starts from."""
    return _drawn(num_fragments, seed=2)


def alone(num_fragments: int, steps: int) -> float:
    """The loss after so many steps of one peer that nobody joins."""
    student, live = Student(num_fragments, seed=0), beginning(num_fragments)
    for number in range(1, steps + 1):
        live = [live_N - step_N for live_N, step_N in zip(live, student.step(live, number), strict=True)]
    return student.loss(live) or 0.0


def _loss(weights: Sequence[Tensor], inputs_BD: Tensor, noise_BD: Tensor) -> Tensor:
    targets_BD = _forward(_teacher(len(weights)), inputs_BD)
    scale = (targets_BD - inputs_BD).square().mean()
    return (_forward(weights, inputs_BD) - targets_BD - noise_BD).square().mean() / scale


def _forward(weights: Sequence[Tensor], inputs_BD: Tensor) -> Tensor:
    hidden_BD = inputs_BD
    for weight_N in weights:
        hidden_BD = hidden_BD + torch.tanh(hidden_BD @ weight_N.view(WIDTH, WIDTH))
    return hidden_BD


@functools.cache
def _teacher(num_fragments: int) -> list[Tensor]:
    return _drawn(num_fragments, seed=1)


def _drawn(num_fragments: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(WIDTH * WIDTH, generator=generator) / WIDTH**0.5 for _ in range(num_fragments)]
