"""Lessons of a simulated peer: its inner steps leave marks in the parameters, make noise, or learn."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from decentral.dissemination import broadcast
from decentral.manifest import Manifest
from decentral.manifest.terms import INNER_OPTIMIZERS, Inner
from decentral.optimizers import InnerOptimizer
from decentral.optimizers.base import Derivative
from decentral.parameters import Fragment, ParameterSpec, Schema
from decentral.replica.codec import Codec, codec_of
from decentral.rounds.reduce import Grain, partition
from decentral.rounds.snapshots import ANY_FORM, PACKED
from decentral.training.copies import Averages
from decentral.training.inner import built, forward_only, inner_step
from decentral.training.round_time import body_nbytes
from decentral.transport.memory import Weight
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.pieces import PIECE_HEAD_NBYTES

__all__ = [
    "UNIT",
    "USUAL",
    "VALUES",
    "WIDTH",
    "Descent",
    "Lesson",
    "LessonName",
    "StandIn",
    "Student",
    "alone",
    "beginning",
    "first_anchors",
    "lesson_named",
    "stand_in_for",
    "toy_schema",
    "weight_name",
]

# ---- a small model that learns ----
#
# Small enough to be trained by every peer of a simulated swarm, and large enough to show what a run costs it.
#
# A student learns the function of a teacher of its own shape: residual layers ``h + tanh(h W)``, one fragment each,
# from Gaussian inputs that no two peers share and noisy answers, by the manifest's optimizer at a rate of its own:
# more peers see more, and average the noise away. A fragment is one 64x64 tile, so that a compressor keeps the share
# of it that it keeps of a large model.

WIDTH = 64
BATCH = 32
LEARNING_RATE = 1e-3
NOISE = 1.0  # standard deviation of what is added to the answers
HELD_OUT = 1024
USUAL = Inner()

# Shape suffixes: B = examples, D = WIDTH, F = fragments, N = D * D.


class Student:
    """A lesson: one life of one peer's inner optimizer."""

    def __init__(self, num_fragments: int, seed: int, inner: Inner = USUAL) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.zeros(WIDTH, WIDTH, requires_grad=True) for _ in range(num_fragments)]
        self._terms = _terms(inner)
        self._optimizers = _optimizers(self._terms, self.weights, seed)
        self._averages = Averages(self._optimizers)
        self.inner: InnerOptimizer = _InnerMoments(self.weights, self._optimizers)

    def step(self, live: Sequence[Tensor], number: int, begins: Callable[[], None] = lambda: None) -> list[Tensor]:
        """Make one step from the live parameters; return what it subtracts from each fragment."""
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
    if INNER_OPTIMIZERS[inner.optimizer_name].forward_only:
        return [forward_only(inner, [(weight_name(f), weight) for f, weight in enumerate(weights)], seed)]
    return built(inner, weights, [])


class _InnerMoments:
    """The moments of one life, as a decentral.optimizers.InnerOptimizer."""

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


# ---- lessons ----
#
# ``marks``: step n subtracts 840 from one parameter. 840 is divisible by 1 to 8, so with that many contributors means,
# debts and carried progress stay integers below 2**24 and float32 sums of them are exact: no tolerance hides anything.
# ``noise``: steps are random, so that an order of summation shows in the digests. ``tiles``: noise on as many values
# as a compressor takes at once, whose bytes stand for a large model's. ``learn``: a small model is trained.

# Shape suffix: N = elements of a fragment, flat float32.

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


class Lesson(Protocol):
    """A peer's inner steps."""

    inner: InnerOptimizer  # what stands for one

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """Return what inner step ``number`` of this peer subtracts from each fragment; ``begins``: called once
        gradients are made.
        """
        ...

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """How much is left to learn; None where nothing is learnt."""
        ...


class Marks:
    """``marks``: every step can be told from the others in a sum."""

    def __init__(self) -> None:
        self._descent = Descent()
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """Do what ``Lesson.step`` says."""
        marks = [torch.zeros_like(live_N) for live_N in live]
        for fragment, mark_N in enumerate(marks):
            mark_N[(number - 1 + fragment) % len(mark_N)] = UNIT
        return self._descent.step(marks, begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """Do what ``Lesson.loss`` says."""
        return None


class Noise:
    """``noise``: another tensor in every step."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._descent = Descent()
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """Do what ``Lesson.step`` says."""
        steps = [0.01 * torch.randn(live_N.shape, generator=self._generator) for live_N in live]
        return self._descent.step(steps, begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """Do what ``Lesson.loss`` says."""
        return None


class Tiles:
    """``tiles``: noise that is drawn once for all peers; a peer's step is one of ``NUM_DRAWN`` tensors, by its seed."""

    def __init__(self, seed: int, num_fragments: int, *, averages: bool) -> None:
        self._choice, self._drawn = random.Random(seed), _drawn_tiles(num_fragments)
        self._descent = Descent(averages=averages)
        self.inner: InnerOptimizer = self._descent

    def step(self, live: Sequence[Tensor], number: int, begins: Begins = lambda: None) -> list[Tensor]:
        """Do what ``Lesson.step`` says."""
        return self._descent.step(list(self._choice.choice(self._drawn)), begins)

    def loss(self, anchors: Sequence[Tensor]) -> float | None:
        """Do what ``Lesson.loss`` says."""
        return None


@lru_cache(maxsize=4)
def _drawn_tiles(num_fragments: int) -> list[list[Tensor]]:
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


# ---- plain descent, with moments ----
#
# A simulated peer's inner optimizer; moments are for the methods that average them.

BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.95}  # by torch's names; decays of tens of steps show within a few rounds


class Descent:
    """Steps at rate 1, so that gradient and step are one. See decentral.optimizers.InnerOptimizer.

    The moments are means of steps and of their squares, as Adam keeps them of gradients.
    """

    derivatives = None

    def __init__(self, *, averages: bool = True) -> None:
        """``averages``: whether anybody asks for moments."""
        self._averages = averages
        self._held: dict[str, list[Tensor]] = {}
        self._gradients: list[Tensor] = []

    def step(self, gradients: Sequence[Tensor], begins: Callable[[], None]) -> list[Tensor]:
        """Return what one inner step subtracts; ``begins`` may change the gradients."""
        self._gradients = list(gradients)
        begins()
        if self._averages:
            self._follow(self._gradients)
        return self._gradients

    def _follow(self, steps: Sequence[Tensor]) -> None:
        """The first step finds zeros."""
        for name, beta in BETAS.items():
            powers = [step_N if name == "exp_avg" else step_N.square() for step_N in steps]
            before = self._held.get(name) or [power_N * 0.0 for power_N in powers]
            self._held[name] = [old_N * beta + new_N * (1 - beta) for old_N, new_N in zip(before, powers, strict=True)]

    def read_moment(self, name: str, fragment: int) -> Tensor | None:
        """Do what ``InnerOptimizer.read_moment`` says."""
        return self._held[name][fragment].clone() if name in self._held else None

    def write_moment(self, name: str, fragment: int, moment_N: Tensor) -> bool:
        """Do what ``InnerOptimizer.write_moment`` says."""
        if name not in self._held:
            return False
        self._held[name][fragment] = moment_N.clone()
        return True

    def read_gradient(self, fragment: int) -> Tensor | None:
        """Do what ``InnerOptimizer.read_gradient`` says."""
        return self._gradients[fragment].clone()

    def add_to_gradient(self, fragment: int, added_N: Tensor) -> None:
        """Do what ``InnerOptimizer.add_to_gradient`` says."""
        self._gradients[fragment] = self._gradients[fragment] + added_N


# ---- small tensors for a real model ----
#
# Bytes and seconds of the real one, arithmetic of a few hundred values.
#
# One byte of a bulk protocol takes the time of as many bytes as the real frame is larger than the small one. The real
# size is what the run's own codec makes of Gaussian values, entropy coding included; control messages are as they are.
# A reduce sends slices, so it is slices that are compared: of few values the scale and the kind of coding are a third
# of the bytes, of a real slice they are nothing.

DRAWS = 16  # small bodies that are made: one alone is up to a tenth longer or shorter than most
WHOLE = Grain(align=1, piece=1 << 30)  # of a reduce of small tensors: as many parts as owners


@dataclass(frozen=True, slots=True)
class StandIn:
    """How much the small model's bytes stand for."""

    protocols: Mapping[str, Weight]
    body: float  # bytes of a real frame's body for one of a small one
    offer: float  # the same of what an offer names, which is what a peer's rate is compared with
    grain: Grain


def stand_in_for(manifest: Manifest, num_parameters: int, peers: int, lesson: LessonName = "tiles") -> StandIn:
    """Return what the small model of a forecast with ``peers`` peers stands for. Lengths and headers stay."""
    codec, numel = codec_of(manifest), max(1, num_parameters // manifest.outer.fragments)
    toy = toy_schema(lesson, manifest.outer.fragments).fragments
    cuts = max(1, peers) if manifest.exchange.kind == "reduce" else 1
    real = body_nbytes(codec, max(1, numel // cuts))
    small = _small_nbytes(codec, toy[0], cuts)
    body = real / small if small else 1.0  # frames without a body stand for themselves
    state = Weight(num_parameters / sum(fragment.numel for fragment in toy), PREFIX_NBYTES + ANY_FORM.size)
    frame = Weight(body, PREFIX_NBYTES + HEADER_NBYTES)
    piece = Weight(body, PREFIX_NBYTES + PIECE_HEAD_NBYTES)
    protocols = {broadcast.PUSH: frame, broadcast.FETCH: frame, broadcast.PIECE: piece, PACKED: state}
    whole = (HEADER_NBYTES + real) / (HEADER_NBYTES + small)
    offer = numel / toy[0].numel if manifest.exchange.kind == "reduce" else whole  # a reduce's: all bodies at most
    return StandIn(protocols, body, offer, WHOLE)


def _small_nbytes(codec: Codec, toy: Fragment, cuts: int) -> float:
    """Bytes of a small body: of the whole fragment, or of one of ``cuts`` slices of it, on average."""
    generator = torch.Generator().manual_seed(0)
    if cuts == 1:
        shapes = [toy.shapes]
    else:
        owners = [number.to_bytes(4, "big") for number in range(cuts)]
        shapes = [((stop - start,),) for _, start, stop in partition(toy.numel, owners, grain=WHOLE)]
    draws = [torch.randn(toy.numel, generator=generator) for _ in range(DRAWS)]
    sizes = [len(codec.encode(one_N[: _numel(cut)], {}, cut).body) for one_N in draws for cut in shapes]
    return statistics.fmean(sizes)


def _numel(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
