"""Replicas of somebody's own model in one process, by the shipped codec, method and schedule.

A function that the user writes builds one peer's training: its model, its optimizer, one inner step and an evaluation.
It is called once for every replica, with the number of the peer whose data it shall read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from decentral.errors import ConfigError, NonFiniteError
from decentral.manifest import Manifest
from decentral.optimizers import make_outer
from decentral.parameters import buffers_of, parameters_of, scatter, schema_of
from decentral.training.inner_states import Together
from decentral.trial.course import Course
from decentral.trial.replicas import TrialPeer, TrialWorld, trial_peer, trial_signers

__all__ = ["Build", "OwnCourse", "OwnTraining", "TrainsAlone", "training_of"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
# (model, optimizer or several, one inner step, the loss on data that nobody trains on)
Build = Callable[[int], tuple[nn.Module, Optimizers, Callable[[], object], Callable[[], float]]]


@dataclass(frozen=True, slots=True)
class OwnTraining:
    """The parts that the user's function gave for one replica."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    step: Callable[[], object]
    evaluate: Callable[[], float]

    def held_out(self) -> float:
        """Return the loss as the user's evaluation has it, NaN where it is infinite; the model's mode is as it was
        before.

        Raises ConfigError for anything but a number.
        """
        training = self.model.training
        with torch.no_grad():
            found = self.evaluate()
        self.model.train(training)
        try:
            loss = float(found)
            return loss if math.isfinite(loss) else math.nan
        except (TypeError, ValueError):
            raise ConfigError(f"the evaluation gave a {type(found).__name__}; it must give the held-out loss") from None


def training_of(build: Build, number: int) -> OwnTraining:
    """Build the peer of this number; ConfigError for anything but a model, an optimizer and two functions."""
    made = build(number)
    wanted = "a model, its optimizer, a function that makes one inner step, and one that gives the held-out loss"
    if not isinstance(made, tuple) or len(made) != 4:
        raise ConfigError(f"the function that builds gave a {type(made).__name__}; it must give four: {wanted}")
    model, optimizer, step, evaluate = made
    if not isinstance(model, nn.Module) or not callable(step) or not callable(evaluate):
        raise ConfigError(
            f"the function that builds gave {', '.join(type(one).__name__ for one in made)}; it must give {wanted}"
        )
    return OwnTraining(model, Together.of(optimizer, "optimizer").parts, step, evaluate)


# ---- a peer alone ----


class TrainsAlone:
    """A replica that shares nothing: what training together has to beat."""

    def __init__(self, build: Build, number: int) -> None:
        self._training, self._steps = _build_seeded(build, [number])[0], 0

    def go(self, steps: int) -> float:
        """Train until so many inner steps are made; the held-out loss then."""
        while self._steps < steps:
            self._training.step()
            self._steps += 1
        return self._training.held_out()


# ---- several, with rounds ----


@dataclass
class _OwnPeer(TrialPeer):
    """A peer whose inner steps are the user's."""

    own_step: Callable[[], object] = field(default=lambda: None)
    _made: int = 0  # steps of the first optimizer

    def __post_init__(self) -> None:
        """Leave out the warm-up: the learning rates are the user's."""
        self._parameters = list(self.module.parameters())

    def begin(self, training: OwnTraining) -> None:
        """Step by this; the method is asked before the first optimizer steps, when the gradients are there."""
        self.own_step = training.step
        training.optimizers[0].register_step_pre_hook(lambda *_: self.stepping())
        training.optimizers[0].register_step_post_hook(lambda *_: self._count())

    def _count(self) -> None:
        self._made += 1

    def step(self, loss: Callable[[], Tensor], backward: Callable[[Tensor], object], seconds: float) -> None:
        """Make one inner step. ConfigError unless the user's function stepped its optimizer once."""
        before = self._made
        self.own_step()
        if self._made != before + 1:
            raise ConfigError(
                f"the function that makes an inner step stepped its optimizer {self._made - before} times; once is "
                "one inner step"
            )
        self.stepped(seconds)


class _OwnWork:
    """The part of a task that a course asks for, where each peer makes its own steps."""

    def backward(self, steps: Mapping[int, int]) -> dict[int, Tensor]:
        """Prepare nothing: steps are whole."""
        return {}


class OwnCourse:
    """Peers 0 to ``peers`` - 1 under one manifest, with a round whenever all have made their inner steps.

    All begin with the weights of the first, but where the method is for replicas that begin apart. ``first``: the
    number of the first peer, so that others' data is another seed. The learning rates, clipping and optimizers are the
    user's: of ``[inner]`` only ``steps`` counts.
    """

    def __init__(self, build: Build, manifest: Manifest, peers: int, first: int = 0) -> None:
        alike = not make_outer(manifest.outer.method, manifest.outer.hyper).begins_apart
        *trainings, self._reading = _build_seeded(build, [*range(first, first + peers), first], alike=alike)
        manifest = manifest.changed(model={"buffers": "own"})  # their mean is made where the anchor is evaluated
        self._peers = [
            trial_peer(manifest, rank, signer, one.model, one.optimizers, _OwnPeer)
            for rank, (signer, one) in enumerate(zip(trial_signers(peers), trainings, strict=True))
        ]
        for peer, training in zip(self._peers, trainings, strict=True):
            peer.begin(training)
        work: Any = _OwnWork()
        self._course = Course(work, list(self._peers), work, TrialWorld(peers)).go()
        self._schema = schema_of(self._reading.model, manifest.outer.fragments, layout=manifest.outer.fragment_layout)
        self._parameters = parameters_of(self._reading.model)
        self._fragments = manifest.outer.fragments

    def go(self, steps: int) -> float:
        """Train until every peer has made so many inner steps, or the run is over; the held-out loss of the anchor.

        Of gossip that of the first peer's. NaN once a loss or a parameter is no number.
        """
        try:
            while self._peers[0].steps < steps:
                if next(self._course, None) is None:
                    break
        except NonFiniteError:
            return math.nan
        return self._held_out()

    @torch.no_grad()
    def _held_out(self) -> float:
        anchors = self._peers[0].replica.anchors
        for fragment, flat_N in zip(self._schema.fragments, anchors, strict=True):
            scatter(flat_N, fragment, self._parameters)
        theirs = [buffers_of(peer.module) for peer in self._peers]
        for name, buffer in buffers_of(self._reading.model).items():
            each = [one[name] for one in theirs]
            buffer.copy_(torch.stack(each).mean(0) if buffer.is_floating_point() else each[0])
        return self._reading.held_out()


def _build_seeded(build: Build, numbers: Sequence[int], *, alike: bool = True) -> list[OwnTraining]:
    """Build so many, whose draws from torch are the same at every call; ``alike``: with the first one's weights and
    buffers.
    """
    made = []
    for number in numbers:
        torch.manual_seed(number)
        made.append(training_of(build, number))
    first = made[0].model.state_dict()
    for one in made[1:] if alike else ():
        try:
            one.model.load_state_dict(first)
        except RuntimeError as error:
            raise ConfigError(f"two peers' models differ: {' '.join(str(error).split())[:300]}") from None
    return made
