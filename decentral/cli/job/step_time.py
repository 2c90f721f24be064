"""How long one inner step of a manifest's model takes on this machine: it is built, and makes a few."""

import statistics
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator

from decentral.manifest import Manifest
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import VOCAB, LanguageModelConfig
from decentral.training.inner import build_inner, inner_step

WARM_UP, MEASURED = 2, 5  # steps; the first ones allocate the optimizer's state and choose kernels
Clock = Callable[[], float]


def measured_step_seconds(manifest: Manifest, clock: Clock = time.perf_counter) -> float:
    """Median seconds of an inner step on bytes drawn at random, by the manifest's batch, context and optimizer.

    The model is float32 on the device that training would use. Raises DeviceError as training does.
    """
    accelerator = Accelerator()
    bare = build_language_model(LanguageModelConfig.of(manifest.model), seed=0)
    model, *optimizers = accelerator.prepare(bare, *build_inner(manifest.inner, bare))
    shape = (manifest.data.batch_size, manifest.model.context)
    bytes_BT = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0)).to(accelerator.device)

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        if manifest.inner.clip is not None:
            accelerator.clip_grad_norm_(model.parameters(), manifest.inner.clip)

    def step() -> None:
        loss = inner_step(
            manifest.inner,
            optimizers,
            lambda: model(input_ids=bytes_BT, labels=bytes_BT).loss,
            backward=backward,
            begins=lambda: None,
        )
        model.zero_grad()
        loss.item()  # the device is done with it

    for _ in range(WARM_UP):
        step()
    return statistics.median(_timed(step, clock) for _ in range(MEASURED))


def _timed(work: Callable[[], None], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began
