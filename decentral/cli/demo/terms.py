"""What a demo trains, and for how many rounds: as many as fit the asked minutes on this machine, measured
first.
"""

import math
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from decentral.cli.job.measuring import WINDOWS
from decentral.manifest import Manifest, fresh_salt, preset_manifest
from decentral.replica.codec import codec_of
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig, demo_tables
from decentral.tensors.threads import on_threads
from decentral.training.inner import build_inner, inner_step

SLACK = 1.25  # of the asked time, for a machine that others keep busy: then the run ends with fewer rounds
MIN_ROUNDS = 6  # a third, a half and an end need to be different rounds
_TIMED_STEPS = 10
_START_SECONDS = 6.0  # of one core, per process: importing torch and transformers, building the model
_ROUND_SECONDS = 0.5  # waiting for one another at a round, measured with four peers on two cores

# On loopback a peer that is gone is gone: seconds, not the minute an ocean needs.
LOOPBACK_SWARM = {"deadline_floor": 2.0, "deadline_ceiling": 20.0, "lease": 12.0, "shrink_after": 20.0}
PAIR_CEILING = 8.0  # seconds: a pair has nobody else to go on with while a dead partner's lease runs out


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The manifest of a demo and where its model starts."""

    algorithm: str
    manifest: Manifest
    rounds: int
    loss_first: float  # nats per byte, held out
    bits_first: float
    step_seconds: float  # one inner step with a core to itself
    expected_seconds: float
    limit: float  # seconds after which the run ends with fewer rounds

    @property
    def sentence(self) -> str:
        """What is about to happen, for people."""
        steps = self.rounds * self.manifest.inner.steps // self.manifest.outer.fragments
        return (
            f"{self.algorithm}: {self.rounds} rounds, {steps} inner steps per peer, "
            f"{1000 * self.step_seconds:.0f} ms each alone, about {self.expected_seconds / 60:.1f} minutes"
        )


def make_plan(algorithm: str, *, num_peers: int, minutes: float, seed: int) -> DemoPlan:
    """Choose the number of rounds. Raises DataError when this Python carries no source to train on."""
    manifest = demo_manifest(algorithm, seed=seed)
    corpus = load_corpus(None, held_out=manifest.data.held_out)
    bits, step_seconds = _measure(manifest, corpus)
    codec_of(manifest).warm_up()  # once here, instead of in every peer at a time
    interval = manifest.inner.steps // manifest.outer.fragments
    crowd = max(1.0, (num_peers + 1) / num_cores())  # processes that share a core; the solo peer is one of them
    start = _START_SECONDS * crowd
    per_round = interval * step_seconds * crowd + _ROUND_SECONDS
    rounds = max(MIN_ROUNDS, math.floor((60 * minutes - start) / per_round))
    expected = start + rounds * per_round
    limit = max(60 * minutes, expected) * SLACK
    return DemoPlan(
        algorithm,
        manifest.changed(run={"rounds": rounds, "minutes": round(limit / 60, 2)}),
        rounds,
        bits * math.log(2),
        bits,
        step_seconds,
        expected,
        limit,
    )


def demo_manifest(algorithm: str, *, seed: int) -> Manifest:
    """The preset with the demo's model and the outer settings that were tuned for some hundred inner steps."""
    manifest = preset_manifest(
        algorithm,
        run={"name": f"demo-{algorithm}", "salt": fresh_salt(), "seed": seed},
        swarm=LOOPBACK_SWARM,
        **demo_tables(algorithm),
    )
    return manifest.changed(swarm={"deadline_ceiling": PAIR_CEILING}) if manifest.exchange.kind == "pair" else manifest


def _measure(manifest: Manifest, corpus: Corpus) -> tuple[float, float]:
    """Held-out bits per byte of the untrained model, and seconds of one inner step on one thread."""
    with on_threads(1):  # as the peers will run
        config = LanguageModelConfig.of(manifest.model)
        model: Any = build_language_model(config, seed=manifest.run.seed)
        bits = bits_per_byte(model, corpus.held_out, context=config.context, num_windows=WINDOWS)
        optimizers = build_inner(manifest.inner, model)
        seconds = []
        for step in range(_TIMED_STEPS):
            batch = batch_at(
                corpus.train,
                seed=0,
                peer=b"calibration",
                step=step,
                batch_size=manifest.data.batch_size,
                context=config.context,
            )
            began = time.perf_counter()
            inner_step(manifest.inner, optimizers, partial(_loss, model, batch))
            model.zero_grad()
            seconds.append(time.perf_counter() - began)
    return bits, sorted(seconds)[_TIMED_STEPS // 2]


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
