"""A stage of a replica: the segments of a model that a machine trains, run forward and back by micro-batches.

A model says of itself in which segments it runs (`segments_of`). A stage does to its segments what a whole replica
does that adds up the gradients of the same micro-batches, in the same order: where values cross as they are, every
stage has its bits, after any number of steps.

    G = sum over micro-batches m of d(loss_m / M) ;  clip by the norm of all stages' G ;  one inner step
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.parameters import Fragment, parameters_of
from decentral.pipeline.turns import NEAR, Turn, Turns
from decentral.tensors.device import PROCESSOR

__all__ = ["Done", "Loss", "Neighbours", "Segment", "Stage", "segments_of", "work_of"]

# Shape suffixes: B = samples of a micro-batch; what follows is the model's own. P = parameters, each a tensor.

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets: their mean, one value


# ---- a model in segments ----


class Segment(NamedTuple):
    """A piece of a model that takes what the one before gives."""

    run: Callable[[Tensor], Tensor]
    modules: Sequence[nn.Module]  # with its parameters


def segments_of(model: nn.Module, fragments: Sequence[Fragment]) -> list[list[Segment]]:
    """Return the segments of each fragment, in the order in which they run.

    A ``torch.nn.Sequential`` has its children; any other model says by a method ``segments()``, of pairs as `Segment`
    is. ConfigError where it does not, or where fragments are not made of whole segments one after the other.
    """
    named = {id(parameter): name for name, parameter in parameters_of(model).items()}
    place = {name: fragment.index for fragment in fragments for name in fragment.names}
    found: list[list[Segment]] = [[] for _ in fragments]
    at, missing = 0, dict(place)
    for segment in _read_segments(model):
        names = [named[id(p)] for module in segment.modules for p in module.parameters() if id(p) in named]
        held = {place[name] for name in names if name in place}
        if len(held) > 1 or min(held, default=at) < at:
            raise ConfigError(
                "share: a segment of the model lies in fragments that do not follow each other; embeddings that are "
                'tied to the head do so, and layout = "strided": found a run with [outer] layout = "stages", untied'
            )
        at = max(held, default=at)
        found[at].append(segment)
        for module in segment.modules:
            for parameter in module.parameters():
                missing.pop(named.get(id(parameter), ""), None)
    if missing:
        raise ConfigError(f"share: {next(iter(missing))} is in none of the segments that the model says it runs in")
    return found


def _read_segments(model: nn.Module) -> list[Segment]:
    if isinstance(model, nn.Sequential):
        return [Segment(child, (child,)) for child in model]
    say: Any = getattr(model, "segments", None)
    if say is None:
        raise ConfigError(
            f"share: nobody knows where a {type(model).__name__} can be cut; make it a torch.nn.Sequential, or give it "
            "a method segments() that returns a function and its modules for each piece, in order"
        )
    return [Segment(run, tuple(modules)) for run, modules in say()]


def work_of(fragment: Fragment, segments: Sequence[Segment]) -> int:
    """Count the parameters that a token is multiplied with: an embedding is looked up."""
    modules = [inner for one in segments for module in one.modules for inner in module.modules()]
    looked_up = sum(module.weight.numel() for module in modules if isinstance(module, nn.Embedding))
    return fragment.numel - looked_up


# ---- a step of one stage ----


class Done(NamedTuple):
    """The word of a stage to all others when it has made its gradients: all of them step then, or none."""

    norms_P: Tensor  # of the gradient of each of its parameters, float32
    loss: float = 0.0  # of the step, from the last stage

    def to_bytes(self) -> bytes:
        """Return it as it crosses the wire: the loss as float64, then the norms, little-endian."""
        return struct.pack("<d", self.loss) + self.norms_P.numpy().astype("<f4").tobytes()

    @classmethod
    def read(cls, data: bytes | memoryview) -> Done:
        """Read what ``to_bytes`` wrote, whose length was checked."""
        norms_P = torch.from_numpy(np.frombuffer(data, "<f4", offset=8).copy())  # torch's own takes no empty one
        return cls(norms_P, float(struct.unpack_from("<d", data)[0]))


class Neighbours(Protocol):
    """The other stages, for one stage in one step. On a training thread what is awaited blocks.

    What is received may raise `decentral.errors.GroupBroken`.
    """

    async def send_on(self, micro: int, states: Tensor) -> None:
        """Send what the next stage goes on with."""
        ...

    async def send_back(self, micro: int, gradient: Tensor) -> None:
        """Send the gradient of what came from the stage before."""
        ...

    async def send_targets(self, micro: int, targets: Tensor) -> None:
        """Send what the last stage measures the loss by."""
        ...

    async def first_here(self, turns: Sequence[Turn]) -> Turn:
        """Wait until what one of these turns takes is here; return the first that it is here for."""
        ...

    async def receive_states(self, micro: int) -> Tensor:
        """Wait for what the stage before sent on."""
        ...

    async def receive_gradient(self, micro: int) -> Tensor:
        """Wait for what the next stage sent back."""
        ...

    async def receive_targets(self, micro: int) -> Tensor:
        """Wait for what the first stage sent."""
        ...

    async def exchange(self, done: Done) -> list[Done]:
        """Tell all others, and return what every stage told, first to last."""
        ...


@dataclass(slots=True)
class _Held:
    """A micro-batch between its forward and its backward turn."""

    came: Tensor
    made: Tensor


class Stage:
    """Stage ``place`` of ``stages``. It makes gradients; optimizers, rounds and writes are others' business."""

    def __init__(self, segments: Sequence[Segment], place: int, stages: int, lead: int = NEAR) -> None:
        """``lead``: see `decentral.pipeline.turns`."""
        self._segments, self.place, self.stages, self._lead = segments, place, stages, lead
        self._device = PROCESSOR
        self.parameters = list(dict.fromkeys(p for one in segments for m in one.modules for p in m.parameters()))
        if self.parameters:
            self._device = self.parameters[0].device

    @property
    def is_first(self) -> bool:
        """True where the data is."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """True where the loss is."""
        return self.place == self.stages - 1

    async def step(
        self,
        lines: Neighbours | None,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss: Loss,
        clip: float | None = None,
    ) -> float:
        """Add the gradients of one step to what parameters have, clipped; return the loss, the mean of all samples.

        ``lines``: None of a replica of one stage, which is all of it. ``inputs`` and ``targets``: one tensor a
        micro-batch, of which the first stage's count. Where a neighbour fails
        gradients are left half made: clear them.
        """
        count, held, total = len(inputs), dict[int, _Held](), 0.0
        if lines is not None and self.is_first:
            for micro, wanted in enumerate(targets):
                await lines.send_targets(micro, wanted)
        turns = Turns(self.place, self.stages, count, self._lead)
        while able := turns.next():
            turn = able[0] if lines is None else await lines.first_here(able)
            turns.take(turn)
            if turn.forward:
                held[turn.micro] = await self._go_forward(lines, turn, inputs)
            else:
                total += await self._go_back(lines, turn, held.pop(turn.micro), targets, loss, count)
        norms = [torch.linalg.vector_norm(p.grad) for p in self.parameters if p.grad is not None]
        norms_P = torch.stack(norms).float().cpu() if norms else torch.empty(0, dtype=torch.float32, device="cpu")
        done = Done(norms_P, total / count)
        every = [done] if lines is None else await lines.exchange(done)
        if clip is not None:
            norm = torch.linalg.vector_norm(torch.cat([one.norms_P for one in every]))
            torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, norm)
        return every[-1].loss

    async def _go_forward(self, lines: Neighbours | None, turn: Turn, inputs: Sequence[Tensor]) -> _Held:
        if lines is None or self.is_first:
            came = inputs[turn.micro]
        else:
            came = (await lines.receive_states(turn.micro)).to(self._device).requires_grad_()
        made = came
        for segment in self._segments:
            made = segment.run(made)
        if lines is not None and not self.is_last:
            await lines.send_on(turn.micro, made.detach())
        return _Held(came, made)

    async def _go_back(
        self, lines: Neighbours | None, turn: Turn, held: _Held, targets: Sequence[Tensor], loss: Loss, count: int
    ) -> float:
        value = 0.0
        if lines is not None and not self.is_last:
            torch.autograd.backward(held.made, (await lines.receive_gradient(turn.micro)).to(held.made.device))
        else:
            wanted = targets[turn.micro] if lines is None else await lines.receive_targets(turn.micro)
            mean = loss(held.made, wanted.to(held.made.device))
            torch.autograd.backward(mean / count)
            value = mean.item()
        if lines is not None and not self.is_first:
            assert held.came.grad is not None, "it was gone through"
            await lines.send_back(turn.micro, held.came.grad)
        return value
