"""What inner steps do to the parameters of a simulated peer: leave marks, make noise, or learn.

``marks``: step n subtracts 840 from one parameter. 840 is divisible by 1 to 8, so with that many contributors means,
debts and carried progress stay integers below 2**24 and float32 sums of them are exact: no tolerance hides anything.
``noise``: steps are random, so that an order of summation shows in the digests. ``tiles``: noise on as many values as a
compressor takes at once, whose bytes stand for a large model's. ``learn``: a small model is trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from decentral.manifest.terms import Inner
from decentral.optimizers import InnerOptimizer
from decentral.parameters import Fragment, ParameterSpec, Schema
from decentral.simulate.learning.moments import Descent
from decentral.simulate.learning.student import WIDTH, Student, beginning, weight_name

__all__ = ["UNIT", "VALUES", "Lesson", "LessonName", "first_anchors", "lesson_named", "toy_schema"]

UNIT = 840.0  # lcm(1..8)
TILES = 128  # rows and columns of what stands for a large model: slices of eight peers that are longer than a header
NUM_DRAWN = 64  # steps that there are; sums of some of them are as Gaussian as sums of others
VALUES = 96  # parameters of one fragment: more than any peer makes inner steps between two commits of its own
Begins = Callable[[], None]
LessonName = Literal["marks", "noise", "tiles", "learn"]

_SHAPES: dict[LessonName, tuple[int, int]] = {
    "marks": (8, VALUES // 8),
    "noise": (8, VALUES // 8),
    "tiles": (TILES, TILES),
    "learn": (WIDTH, WIDTH),
}

# Shape suffix: N = elements of one fragment, flat float32.


class Lesson(Protocol):
    """What one peer's inner steps do."""

    inner: InnerOptimizer  # what stands for one

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """What inner step ``number`` of this peer subtracts from each fragment; ``begins``: once gradients are made."""
        ...

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """How much is left to learn; None where nothing is learnt."""
        ...


class Marks:
    """See the module."""

    def __init__(self) -> None:
        self._descent = Descent()
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """See Lesson."""
        marks = [torch.zeros_like(live_N) for live_N in live]
        for fragment, mark_N in enumerate(marks):
            mark_N[(number - 1 + fragment) % len(mark_N)] = UNIT
        return self._descent.step(marks, begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """See Lesson."""
        return None


class Noise:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._descent = Descent()
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """See Lesson."""
        steps = [0.01 * torch.randn(live_N.shape, generator=self._generator) for live_N in live]
        return self._descent.step(steps, begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """See Lesson."""
        return None


class Tiles:
    """See the module. Noise is drawn once for all peers: a peer's step is one of ``NUM_DRAWN`` tensors, by its seed."""

    def __init__(self, seed: int, num_fragments: int, *, averages: bool) -> None:
        self._choice, self._drawn = random.Random(seed), _drawn(num_fragments)
        self._descent = Descent(averages=averages)
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """See Lesson."""
        return self._descent.step(list(self._choice.choice(self._drawn)), begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """See Lesson."""
        return None


@lru_cache(maxsize=4)
def _drawn(num_fragments: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [0.01 * torch.randn(TILES * TILES, generator=generator) for _ in range(num_fragments)] for _ in range(NUM_DRAWN)
    ]


def lesson_named(
    name: LessonName, num_fragments: int, generator: random.Random, inner: Inner, *, averages: bool = True
) -> Lesson:
    """The lesson of one process of one peer; ``inner``: how it learns; ``averages``: whether moments are asked for."""
    if name == "marks":
        return Marks()
    seed = generator.randrange(1 << 30)
    if name == "tiles":
        return Tiles(seed, num_fragments, averages=averages)
    return Student(num_fragments, seed, inner) if name == "learn" else Noise(seed)


def first_anchors(name: LessonName, num_fragments: int) -> list[Tensor]:
    """The parameters that every run starts from."""
    if name == "learn":
        return beginning(num_fragments)
    return [torch.zeros(fragment.numel) for fragment in toy_schema(name, num_fragments).fragments]


def toy_schema(name: LessonName, num_fragments: int) -> Schema:
    """A model of one small matrix per fragment."""
    shape = _SHAPES[name]
    return Schema(
        tuple(Fragment(f, (ParameterSpec(weight_name(f), shape),)) for f in range(num_fragments)),
    )
