"""What a training job measures of itself: how much of the time is training, and how good the shared model
is.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decentral.parameters import Schema, scatter
from decentral.tasks.evaluate import bits_per_byte

EVALUATION_SHARE = 0.05  # of the time since the start: a small model on a slow core must not mostly evaluate
# Windows of context bytes, the same after every round and at the end: 16 KB at the demo's size, 0.3 s of one core. With
# 32 of them for rounds and 512 at the end the figure ended at 2.27 bits where the table said 2.13.
WINDOWS = 128


class Stopwatch:
    """Time inside inner steps, from before the forward pass to the end of the inner optimizer's own step.

    The hook is registered before the swarm's, so waiting for a round inside ``optimizer.step`` is not counted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._step_began = 0.0
        self.busy = 0.0  # seconds
        optimizer.register_step_post_hook(self._stepped)

    def step_begins(self) -> None:
        """Call before the forward pass."""
        self._step_began = self._clock()
        if self._began is None:
            self._began = self._step_began

    def _stepped(self, *_: object) -> None:
        self.busy += self._clock() - self._step_began

    @property
    def seconds(self) -> float:
        """Wall time since the first inner step began; waiting for the others to start is not in it."""
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def utilisation(self) -> float:
        """Share of the wall time that was training, in [0, 1]."""
        return self.busy / max(self.seconds, 1e-9)


class RecentLoss:
    """The mean loss of the last ``num_steps`` inner steps: that of one batch jumps by a third from one to the next."""

    def __init__(self, num_steps: int) -> None:
        self._losses: deque[Tensor] = deque(maxlen=num_steps)

    def add(self, loss: Tensor) -> None:
        """Remember one; its value is not read, which would wait for the device."""
        self._losses.append(loss)

    @property
    def mean(self) -> Tensor:
        """Over those that were added."""
        return torch.stack(list(self._losses)).mean()


class AnchorJudge:
    """Evaluates an anchor on the held-out slice with a model of its own; the training model is not touched."""

    def __init__(self, model: nn.Module, schema: Schema, held_out: Tensor, *, context: int) -> None:
        self._model, self._schema = model, schema
        self._parameters = dict(model.named_parameters())
        self._held_out, self._context = held_out, context
        self._spent = 0.0  # seconds

    def affordable(self, seconds: float) -> bool:
        """Whether evaluating has taken less than its share of the ``seconds`` so far."""
        return self._spent <= EVALUATION_SHARE * seconds

    def bits_per_byte(self, anchor: Sequence[Tensor]) -> float:
        """Held-out bits per byte of an anchor given fragment by fragment, flat float32."""
        began = time.perf_counter()
        for fragment, flat_N in zip(self._schema.fragments, anchor, strict=True):
            scatter(flat_N, fragment, self._parameters)
        held_out: Any = self._held_out
        found = bits_per_byte(self._model, held_out, context=self._context, num_windows=WINDOWS)
        self._spent += time.perf_counter() - began
        return found
