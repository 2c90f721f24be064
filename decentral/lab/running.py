"""The run of a cell, from its terms to what it found: the one function that workers run.

What goes wrong inside is a finding, too.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from decentral.errors import DecentralError, NonFiniteError
from decentral.lab.cells import Cell, Curve, Flips, Looks, Point
from decentral.lab.lockstep import lockstep_of
from decentral.lab.own import Brought, OwnWork, is_own, version_of_task
from decentral.lab.work import Digits, Language, Work, corpus_of
from decentral.manifest import Manifest
from decentral.manifest.terms import Outer
from decentral.optimizers import OuterMethod, RoundInfo, make_outer
from decentral.optimizers.base import State
from decentral.parameters import parameters_of, scatter, schema_of
from decentral.training.copies import Averages
from decentral.training.inner import build_inner, inner_step, warm_up
from decentral.trial.course import Course
from decentral.trial.replicas import TrialWorld, trial_peers

__all__ = [
    "HeldOut",
    "Outcome",
    "Reader",
    "failure",
    "flip",
    "run_cell",
    "run_swarm",
    "run_together",
    "text_of",
    "work_of",
]

Status = Literal["done", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a cell."""

    status: Status  # diverged: a loss or a parameter was no number any more
    reason: str = ""  # of a failure, in one line
    curve: Curve | None = None
    seconds: float = 0.0  # of this machine
    device: str = "cpu"  # that trained: another one rounds otherwise

    @property
    def loss(self) -> float | None:
        """At the end; None where it has none."""
        return self.curve.points[-1].loss if self.curve is not None and self.status == "done" else None

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Its part of a record."""
        sent, peak = (self.curve.points[-1].nbytes, self.curve.peak_nbytes) if self.curve is not None else (0.0, 0.0)
        numel = 0 if self.curve is None else self.curve.numel
        totals = {"nbytes": sent, "peak_nbytes": peak, "numel": numel, "seconds": round(self.seconds, 3)}
        return {
            "status": self.status,
            "reason": self.reason,
            "curve": self.curve.columns() if self.curve is not None else {},
            "totals": totals,
            "made_with": _versions() | ({} if self.device == "cpu" else {"device": self.device}),
        }

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Outcome:  # Any: JSON
        """From a record."""
        totals = told["totals"]
        curve = Curve.of(told["curve"], totals["peak_nbytes"], totals["numel"]) if told["curve"] else None
        device = told.get("made_with", {}).get("device", "cpu")
        return cls(told["status"], told["reason"], curve, totals["seconds"], device)


def failure(reason: str) -> Outcome:
    """Return the outcome of a cell that could not be run to its end."""
    return Outcome("failed", " ".join(reason.split())[:300])


def run_cell(cell: Cell, device: str = "cpu", brought: Brought | None = None) -> Outcome:
    """Run it, here and now; ``device`` as torch spells it. Digits are trained on the processor.

    ``brought``: what a researcher's process was given, where this is another one.
    """
    began = time.monotonic()
    if brought is not None:
        brought.use()
    try:
        curve = _curve(cell, device)
    except NonFiniteError as error:
        return Outcome("diverged", " ".join(str(error).split()), None, time.monotonic() - began, device)
    except DecentralError as error:
        return failure(str(error))
    except Exception as error:  # noqa: BLE001  one cell of many: the others have their own
        return failure(f"{type(error).__name__}: {error}")
    return Outcome("diverged" if curve.has_diverged else "done", "", curve, time.monotonic() - began, device)


def _curve(cell: Cell, device: str) -> Curve:
    work = work_of(cell, device)
    return run_swarm(cell, work) if cell.kind == "swarm" else run_together(cell, work)


def work_of(cell: Cell, device: str = "cpu") -> Work:
    """Return the task that its replicas learn, on this device."""
    if cell.task == "digits":
        assert cell.alpha is not None, "studies of digits have one"
        return Digits(cell.manifest, cell.peers, cell.alpha)
    if is_own(cell.task):
        return OwnWork(cell.task, cell.manifest, cell.peers, device)
    uneven = cell.task == "language-uneven"
    corpus = corpus_of(None, cell.manifest.data.held_out)
    return Language(cell.manifest, corpus, cell.peers, uneven=uneven, windows=cell.windows, device=device)


def text_of(task: str) -> str:
    """Return the text that is trained on, by name and version: another version is another text."""
    if task == "digits":
        return f"digits of scikit-learn {version('scikit-learn')}"
    if is_own(task):
        return version_of_task(task)
    return f"standard library of Python {platform.python_version()}"


def _versions() -> dict[str, str]:
    return {"decentral": version("decentral"), "torch": version("torch")}


# ---- a method of ours, in a swarm ----
#
# Its peers as the laboratory's swarm has them, looked at now and then.


def run_swarm(cell: Cell, work: Work) -> Curve:
    """The whole run, or up to where it gives no number any more."""
    manifest = cell.manifest
    apart = make_outer(manifest.outer.method, manifest.outer.hyper).begins_apart
    modules = [work.model(rank if apart else 0) for rank in range(cell.peers)]
    peers = trial_peers(manifest, modules)
    if cell.flips is not None:
        for peer in peers:
            peer.replica.method = flip(peer.replica.method, cell.flips)
    numel = peers[0].live.schema.numel
    world = TrialWorld(cell.peers) if cell.line is None else cell.line.world(cell.peers, numel)
    trained = work.trained(modules)
    course = Course(work, peers, trained, world, lockstep_of(peers, trained))
    return _Looking(course, work, cell).curve()


class _Looking:
    """Goes along with a course."""

    def __init__(self, course: Course, work: Work, cell: Cell) -> None:
        self._course, self._reader = course, Reader(work, course.manifest.outer)
        self._tokens, self._steps = work.tokens_of_step, cell.steps
        self._looks = Looks(cell.steps, cell.points)
        self._nbytes = self._peak = 0.0

    def curve(self) -> Curve:
        found = [self._point(0)]
        for reached in self._course.go():
            self._nbytes += reached.nbytes
            self._peak = max(self._peak, reached.nbytes)
            step = reached.inner_steps / len(self._course.peers)
            if self._looks.due(step):
                found.append(self._point(reached.outer_step))
                if found[-1].loss is None:
                    break
            if step >= self._steps:
                break
        return Curve(tuple(found), self._peak, self._course.peers[0].live.schema.numel)

    def _point(self, rounds: int) -> Point:
        peers = self._course.peers
        step = sum(peer.steps for peer in peers) / len(peers)
        held = self._reader.held_out(self._replicas())
        loss, of_mean = (None if one is None or not math.isfinite(one) else one for one in (held.loss, held.of_mean))
        return Point(step, step * self._tokens, rounds, self._nbytes, self._course.now, loss, of_mean)

    def _replicas(self) -> list[Sequence[Tensor]]:
        replicas = [peer.replica for peer in self._course.peers]
        return [one.anchors for one in (replicas[:1] if replicas[0].agrees else replicas)]


# ---- the held-out loss of replicas ----
#
# They are read into one module that nobody trains.

Fragments = Sequence[Tensor]  # flat float32, as the replica has them


@dataclass(frozen=True, slots=True)
class HeldOut:
    """In the task's own unit."""

    loss: float  # the mean of the losses of the peers' models: what somebody gets who takes one of them
    of_mean: float | None = None  # of the mean of the peers' models, where they are not all alike


class Reader:
    """Evaluates what replicas hold."""

    def __init__(self, work: Work, outer: Outer) -> None:
        self._work, self._module = work, work.model()
        self._schema = schema_of(self._module, outer.fragments, layout=outer.fragment_layout)
        self._parameters = parameters_of(self._module)

    def loss(self, anchors: Fragments) -> float:
        """Return the loss of one model."""
        for fragment, flat_N in zip(self._schema.fragments, anchors, strict=True):
            scatter(flat_N, fragment, self._parameters)
        return self._work.held_out(self._module)

    def held_out(self, replicas: Sequence[Fragments]) -> HeldOut:
        """Return the loss of peers that agree, of which one is given, or of all those that do not."""
        losses = [self.loss(anchors) for anchors in replicas]
        mean = sum(losses) / len(losses)
        if len(replicas) == 1:
            return HeldOut(mean)
        means = [sum(parts[1:], start=parts[0]) / len(parts) for parts in zip(*replicas, strict=True)]
        return HeldOut(mean, self.loss(means))


# ---- controls: one sign wrong ----
#
# An outer method in which one thing has the wrong sign must come out worse.
#
# "update": the outer step goes as far the other way. "momentum": what the method's state adds to the step counts with
# the other sign; for Nesterov momentum x <- x - lr*(g + mu*g - mu^2*m), m itself as ever. A laboratory that finds no
# difference between a method and its control could not find any.


def flip(method: OuterMethod, what: Flips) -> OuterMethod:
    """A method that is ``method`` but for one sign."""
    kind = type(method)

    def outer_step(
        self: OuterMethod, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        after, kept = kind.outer_step(self, anchor, received, state, info)
        if what == "update":
            return 2 * anchor - after, kept
        without = kind.outer_step(self, anchor, received, self.init(anchor), info)[0]
        return 2 * without - after, kept

    turned = type(f"Flipped{kind.__name__}", (kind,), {"outer_step": outer_step, "__slots__": ()})
    made: OuterMethod = turned(**{one.name: getattr(method, one.name) for one in fields(method)})  # type: ignore[arg-type]
    return made


# ---- references: training without an outer method ----
#
# One model, every peer's gradient averaged in every inner step, one inner optimizer; or a peer alone.
#
# Data-parallel training is what outer methods try to reach with fewer bytes: it sends float32 gradients in a reduce, so
# that a peer sends 2*(P - 1)/P of the model in each step. A peer alone is what they have to beat: it is data-parallel
# training of one.

_FLOAT32 = 4


def run_together(cell: Cell, work: Work) -> Curve:
    """The whole run, or up to where it gives no number any more. A round is an inner step."""
    manifest = cell.manifest
    ranks = 1 if cell.kind == "alone" else cell.peers
    trainer = _Trainer(manifest, work, ranks)
    world, tokens, looks = TrialWorld(ranks), work.tokens_of_step, Looks(cell.steps, cell.points)
    each = world.sent(_FLOAT32 * trainer.numel, "reduce", ranks)
    found = [Point(0, 0, 0, 0.0, 0.0, trainer.held_out())]
    for step in range(1, cell.steps + 1):
        trainer.step()
        if looks.due(step):
            spent = (step, step * tokens, step if ranks > 1 else 0, step * each, float(step))
            found.append(Point(*spent, trainer.held_out()))
            if found[-1].loss is None:
                break
    return Curve(tuple(found), each, trainer.numel)


class _Trainer:
    """The model of rank 0, and copies of it that only make gradients."""

    def __init__(self, manifest: Manifest, work: Work, ranks: int) -> None:
        self._manifest, self._work = manifest, work
        self._modules = [work.model() for _ in range(ranks)]
        self._trained = work.trained(self._modules)
        self._held = [[p for p in module.parameters() if p.requires_grad] for module in self._modules]
        self._optimizers = build_inner(manifest.inner, self._modules[0])
        self._schedulers = [warm_up(optimizer, manifest.inner.warmup) for optimizer in self._optimizers]
        self._averages = Averages(self._optimizers)
        self._steps = 0

    @property
    def numel(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel() for parameter in self._held[0])

    def step(self) -> None:
        """Make one inner step of all."""
        inner_step(self._manifest.inner, self._optimizers, self._losses, backward=self._backward)
        for scheduler in self._schedulers:
            scheduler.step()
        self._steps += 1
        self._hand_out()

    def held_out(self) -> float | None:
        """Return the loss of what is learnt, where the inner optimizer trains at something else; None: no number."""
        self._averages.show()
        loss = self._work.held_out(self._modules[0])
        self._averages.resume()
        return loss if math.isfinite(loss) else None

    def _losses(self) -> Tensor:
        steps = dict.fromkeys(range(len(self._modules)), self._steps)
        return torch.stack(list(self._trained.backward(steps).values())).mean()

    def _backward(self, loss: Tensor) -> None:
        """The gradients are there: their mean goes to rank 0, in the order of ranks."""
        for same in zip(*self._held, strict=True):
            same[0].grad = _mean([_gradient(parameter) for parameter in same])
        if self._manifest.inner.clip is not None:
            nn.utils.clip_grad_norm_(self._held[0], self._manifest.inner.clip)

    @torch.no_grad()
    def _hand_out(self) -> None:
        for module in self._modules:
            module.zero_grad()
        for same in zip(*self._held, strict=True):
            for copy in same[1:]:
                copy.copy_(same[0])


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    return gradients[0] if len(gradients) == 1 else torch.stack(tuple(gradients)).mean(0)
