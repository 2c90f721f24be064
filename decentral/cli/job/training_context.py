"""What a training loop works with, built from the manifest: corpus, model, optimizer, schedule, a judge."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from accelerate import Accelerator

from decentral.cli.files import make_directory
from decentral.cli.job.measuring import AnchorJudge, Stopwatch
from decentral.manifest import Manifest
from decentral.observe.metrics import MetricsLog
from decentral.parameters import schema_of
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.language_model import begin_from, build_language_model
from decentral.tasks.sizing import LanguageModelConfig, warm_up
from decentral.training.inner import Averages, build_inner


@dataclass(slots=True)
class TrainingContext:
    """One training loop's tools and counters. ``Any`` where accelerate and transformers ship no types."""

    manifest: Manifest
    out: Path
    accelerator: Any
    model: Any  # wrapped by accelerate
    optimizers: list[Any]  # wrapped by accelerate; an inner step is a step of each
    schedulers: list[Any]  # torch's own: they count inner steps, however many processes this peer has
    averages: Averages  # of the optimizers: what they learn, where they train at other parameters
    corpus: Corpus
    judge: AnchorJudge
    watch: Stopwatch
    metrics: MetricsLog
    num_parameters: int
    loss: float | None = None  # of the last inner step that was read, nats per token
    held_out_loss: float | None = None  # of the last anchor that was evaluated, nats per token
    num_steps: int = 0  # inner steps done, those of an earlier process included
    running: Event = field(default_factory=Event)  # cleared while paused

    @property
    def is_main(self) -> bool:
        """Whether this process of the peer talks to the swarm and to people."""
        return bool(self.accelerator.is_main_process)

    @property
    def tokens_per_step(self) -> int:
        """Tokens this peer trains on in one inner step, all its processes together."""
        num_windows = self.manifest.data.batch_size * self.accelerator.num_processes
        return int(num_windows * self.manifest.model.context)


def set_up(manifest: Manifest, out: Path, data: Path | None, begins_from: Path | None = None) -> TrainingContext:
    """Build everything; ``begins_from``: a model folder whose weights are the first ones, but for a run that goes on.

    Raises DataError, UsageError, ConfigError, DeviceError, DiskError; nothing is trained then.
    """
    config, inner, seed = LanguageModelConfig.of(manifest.model), manifest.inner, manifest.run.seed
    corpus = load_corpus(data, held_out=manifest.data.held_out)
    accelerator = Accelerator()
    bare = build_language_model(config, seed=seed)
    if begins_from is not None and not (out / "checkpoints").exists():
        begin_from(begins_from, bare)
    raw = build_inner(inner, bare)
    schedulers = [warm_up(one, inner.warmup) for one in raw]
    watch = Stopwatch(raw[-1])  # before the swarm's hook, so that waiting for a round is not counted as training
    model, *optimizers = accelerator.prepare(bare, *raw)
    twin = build_language_model(config, seed=seed).to(accelerator.device)
    schema = schema_of(twin, manifest.outer.fragments)
    context = TrainingContext(
        manifest=manifest,
        out=make_directory(out),
        accelerator=accelerator,
        model=model,
        optimizers=optimizers,
        schedulers=schedulers,
        averages=Averages(raw),
        corpus=corpus,
        judge=AnchorJudge(twin, schema, corpus.held_out, context=config.context),
        watch=watch,
        metrics=MetricsLog(out),
        num_parameters=sum(fragment.numel for fragment in schema.fragments),
    )
    context.running.set()
    return context
