"""Seconds of a step with a flush and without one: python -m experiments.piped.times

Without a flush the turns of a stage go on over the steps in the same order: so many steps are one long one. Its filling
and emptying fall out of the difference of two such. An optimizer's step takes no time here, with a flush or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decentral.pipeline.turns import FAR, NEAR, StageSpeed, step_seconds

STEPS = 40  # two and four steps are the same to the last digit shown
STAGE = StageSpeed(forward=0.04, backward=0.08)  # 120 ms a micro-batch, as one of experiments/stages
# Uplink of a stage in the middle, which sends on and back for every micro-batch: 0, half and one and a half of a stage.
LINES = {
    "near": (NEAR, STAGE),
    "far, half as slow as a stage": (FAR, replace(STAGE, send=0.03, latency=0.025)),
    "far, slower than a stage": (FAR, replace(STAGE, send=0.09, latency=0.025)),
}


def seconds_without_flush(stages: Sequence[StageSpeed], micro_batches: int, lead: int) -> float:
    """Return the seconds from one step to the next, once the stages are full."""
    longer, shorter = (step_seconds(stages, steps * micro_batches, lead) for steps in (2 * STEPS, STEPS))
    return (longer - shorter) / STEPS


def halved(speed: StageSpeed) -> StageSpeed:
    """Return the speed with half as much in a micro-batch."""
    return StageSpeed(speed.forward / 2, speed.backward / 2, speed.send / 2, speed.latency)


def main() -> None:
    """Print the table."""
    print(
        "| line | stages | micro-batches | flush | no flush | times as quick | flush, twice as many of half the size |"
    )
    print("|---|---|---|---|---|---|---|")
    for line, (lead, speed) in LINES.items():
        for count in (2, 3, 4):
            for micro_batches in (12, 24):
                flush = step_seconds([speed] * count, micro_batches, lead)
                none = seconds_without_flush([speed] * count, micro_batches, lead)
                twice = step_seconds([halved(speed)] * count, 2 * micro_batches, lead)
                ends = f"{flush:.2f} s | {none:.2f} s | {flush / none:.2f} | {twice:.2f} s, {flush / twice:.2f}"
                print(f"| {line} | {count} | {micro_batches} | {ends} |")


if __name__ == "__main__":
    main()
