"""A model small enough to be trained by every peer of a simulated swarm, and large enough to show what a run costs it.

A student learns the function of a teacher of its own shape: residual layers ``h + tanh(h W)``, one fragment each, from
Gaussian inputs that no two peers share and noisy answers, by the manifest's optimizer at a rate of its own: more peers
see more, and average the noise away. A fragment is one 64x64 tile, so that a compressor keeps the share of it that it
keeps of a large model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from decentral.manifest.terms import INNER_OPTIMIZERS, Inner
from decentral.optimizers import InnerOptimizer
from decentral.optimizers.base import Derivative
from decentral.training.copies import Averages
from decentral.training.inner import built, forward_only, inner_step

__all__ = ["USUAL", "WIDTH", "Student", "alone", "beginning", "weight_name"]

WIDTH = 64
BATCH = 32
LEARNING_RATE = 1e-3
NOISE = 1.0  # standard deviation of what is added to the answers
HELD_OUT = 1024
USUAL = Inner()

# Shape suffixes: B = examples, D = WIDTH, F = fragments, N = D * D.


class Student:
    """One life of one peer's inner optimizer. See Lesson."""

    def __init__(self, num_fragments: int, seed: int, inner: Inner = USUAL) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.zeros(WIDTH, WIDTH, requires_grad=True) for _ in range(num_fragments)]
        self._terms = _terms(inner)
        self._optimizers = _optimizers(self._terms, self.weights, seed)
        self._averages = Averages(self._optimizers)
        self.inner: InnerOptimizer = _InnerMoments(self.weights, self._optimizers)

    def step(self, live: Sequence[Tensor], number: int, begins: Callable[[], None] = lambda: None) -> list[Tensor]:
        """One step from the live parameters; what it subtracts from each fragment."""
        inputs_BD = torch.randn(BATCH, WIDTH, generator=self._generator)
        self._put(live)
        noise_BD = NOISE * torch.randn(BATCH, WIDTH, generator=self._generator)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        inner_step(self._terms, self._optimizers, lambda: _loss(self.weights, inputs_BD, noise_BD), begins=begins)
        self._averages.show()
        return [live_N - weight.detach().flatten() for weight, live_N in zip(self.weights, live, strict=True)]

    def _put(self, live: Sequence[Tensor]) -> None:
        """The live parameters are what is learnt, where that is an average, too."""
        self._averages.show()
        with torch.no_grad():
            for weight, live_N in zip(self.weights, live, strict=True):
                weight.copy_(live_N.view_as(weight))
        self._averages.resume()

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """Mean squared error on inputs that nobody trains on, as a share of the variance of the targets."""
        with torch.no_grad():
            inputs_BD = torch.randn(HELD_OUT, WIDTH, generator=torch.Generator().manual_seed(0))
            return float(_loss(anchors, inputs_BD, torch.zeros(())))


def _terms(inner: Inner) -> Inner:
    """The manifest's optimizer at the student's rate; torch's own AdamW where it names none."""
    own = {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    unset = inner.optimizer is None and inner.beta2 is None
    return inner.model_copy(update=own | ({"beta2": 0.999} if unset else {}))


def weight_name(fragment: int) -> str:
    """The name of a fragment's one tensor."""
    return f"layers.{fragment}.weight"


def _optimizers(inner: Inner, weights: Sequence[Tensor], seed: int) -> list[torch.optim.Optimizer]:
    if INNER_OPTIMIZERS[inner.named].forward_only:
        return [forward_only(inner, [(weight_name(f), weight) for f, weight in enumerate(weights)], seed)]
    return built(inner, weights, [])


class _InnerMoments:
    """See decentral.optimizers.InnerOptimizer."""

    def __init__(self, weights: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.weights, self._optimizers = weights, optimizers

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        found = self._held(name, fragment)
        return None if found is None else found.flatten().clone()

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        found = self._held(name, fragment)
        if found is not None:
            found.copy_(moment_N.view_as(found))
        return found is not None

    def _held(self, name: str, fragment: int) -> Tensor | None:
        states = (optimizer.state.get(self.weights[fragment], {}) for optimizer in self._optimizers)
        return next((state[name] for state in states if name in state), None)

    @property
    def derivatives(self) -> Sequence[Derivative] | None:
        return getattr(self._optimizers[0], "derivatives", None)

    def read_gradient(self, fragment: int) -> Tensor | None:
        found = self.weights[fragment].grad
        return None if found is None else found.flatten().clone()

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        found = self.weights[fragment].grad
        if found is not None:
            found += added_N.view_as(found)


def beginning(num_fragments: int) -> list[Tensor]:
    """The parameters that every run starts from."""
    return _drawn(num_fragments, seed=2)


def alone(num_fragments: int, steps: int, inner: Inner = USUAL) -> float:
    """The loss after so many steps of one peer that nobody joins."""
    student, live = Student(num_fragments, seed=0, inner=inner), beginning(num_fragments)
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
