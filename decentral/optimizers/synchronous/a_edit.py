"""A-EDiT: EDiT whose peers train for a time and not for a number of steps, so that no fast one waits for a slow one.

A contribution is due after ``seconds`` of training, or after ``inner.steps`` steps if those are made sooner, and never
before ``least`` steps. All else is `edit`: softmax weights over norms, outliers left out, a clipped mean, Nesterov.

Peers of different speed then come to a round at one time with different numbers of steps behind their changes. A fast
peer's change is longer for it, and the softmax over norms counts it less; ``[outer] weighting = "tokens"`` counts it by
the tokens behind it. ``seconds`` is the time of inner steps: waiting for a round is not counted.

What differs from the paper. There time alone decides; here inner.steps bounds it, so that the bounds on what a peer
brings back from an absence, which count in steps, hold: choose it for the fastest peer. Time is each peer's own, where
the authors' code looks at the clock of one rank. Its option to mix step counts into the weights is the run's weighting.
What else differs stands in `edit`.

Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models", 2024,
arXiv:2412.07210 (A-EDiT); 600 s and at least 100 steps as in intelligent-machine-learning/atorch.
"""

from dataclasses import dataclass
from typing import ClassVar

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, key
from decentral.optimizers.synchronous.guarded_mean import (
    check_guard,
    clipped_step,
    nothing_usual,
    own_norm,
    relearnt,
    softmax_of_norms,
)

__all__ = ["AEDiT"]


@dataclass(frozen=True, slots=True)
class AEDiT(OuterMethod):
    """EDiT's step and state, due by time."""

    name: ClassVar[str] = "a_edit"
    equation: ClassVar[str] = "edit, due after so many seconds of training, or inner.steps if those are sooner"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8, "seconds": 600.0},
        compressor="int8(block=4096)",
        exchange="reduce",
        demo={"outer": {"seconds": 5.0}},
    )
    measures: ClassVar[bool] = True
    lr: float = 0.7
    momentum: float = key(0.8, "of the outer step; 0 is none")
    temperature: float = key(1.0, "T of the softmax over norms: large counts all alike")
    clip: float = key(10.0, "largest norm of the mean of a fragment's changes")
    warmup: int = key(100, "norms that are learnt from before any is called an outlier")
    relearn_after: int = key(5, "rounds in a row of outliers alone, after which norms are learnt anew")
    seconds: float = key(600.0, "of training after which a contribution is due; inner.steps at the latest")
    least: int = key(1, "inner steps that a contribution has at least, whatever the time; 100 is the authors'")

    def __post_init__(self) -> None:
        check_guard(self)
        if not 0 < self.seconds <= 86400:
            raise ConfigError(f"{self}: seconds of training must be above 0, and a day at most; 600 is usual")
        if self.least < 1:
            raise ConfigError(f"{self}: least, of the inner steps of a contribution, must be at least 1")

    init = nothing_usual
    summary = own_norm
    weights = softmax_of_norms
    outer_step = clipped_step
    nobody_counts = relearnt

    def is_due(self, steps: int, seconds: float, most: int) -> bool:
        """After the time, or the steps; never with fewer than ``least``."""
        return steps >= most or (seconds >= self.seconds and steps >= self.least)
