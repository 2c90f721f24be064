"""What a training loop works with, built from the manifest: corpus, model, optimizer, schedule, a judge."""

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from accelerate import Accelerator

from decentral.cli.files import make_directory
from decentral.cli.job.measuring import AnchorJudge, Stopwatch
from decentral.manifest import Manifest
from decentral.observe.metrics import MetricsLog
from decentral.parameters import schema_of
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.language_model import LanguageModelConfig, build_language_model
from decentral.tasks.presets import DEMO_BETAS
from decentral.tasks.schedule import warm_up


@dataclass(slots=True)
class TrainingContext:
    """One training loop's tools and counters. ``Any`` where accelerate and transformers ship no types."""

    manifest: Manifest
    out: Path
    accelerator: Any
    model: Any  # wrapped by accelerate
    optimizer: Any  # wrapped by accelerate
    scheduler: Any  # torch's own: it counts inner steps, however many processes this peer has
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


def set_up(manifest: Manifest, out: Path, data: Path | None) -> TrainingContext:
    """Build everything. Raises DataError, ConfigError, DeviceError, DiskError; nothing is trained then."""
    config, inner, seed = model_config(manifest), manifest.inner, manifest.run.seed
    corpus = load_corpus(data, held_out=manifest.data.held_out)
    accelerator = Accelerator()
    bare = build_language_model(config, seed=seed)
    raw = torch.optim.AdamW(
        bare.parameters(), lr=inner.learning_rate, betas=DEMO_BETAS, weight_decay=inner.weight_decay
    )
    scheduler = warm_up(raw, inner.warmup)
    watch = Stopwatch(raw)  # before the swarm's hook, so that waiting for a round is not counted as training
    model, optimizer = accelerator.prepare(bare, raw)
    twin = build_language_model(config, seed=seed).to(accelerator.device)
    schema = schema_of(twin, manifest.outer.fragments)
    context = TrainingContext(
        manifest=manifest,
        out=make_directory(out),
        accelerator=accelerator,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        corpus=corpus,
        judge=AnchorJudge(twin, schema, corpus.held_out, context=config.context),
        watch=watch,
        metrics=MetricsLog(out),
        num_parameters=sum(fragment.numel for fragment in schema.fragments),
    )
    context.running.set()
    return context


def model_config(manifest: Manifest) -> LanguageModelConfig:
    """Size of the model that the manifest describes."""
    model = manifest.model
    return LanguageModelConfig(hidden=model.hidden, layers=model.layers, heads=model.heads, context=model.context)
