"""The tools of a training loop, built from the manifest: corpus, model, optimizer, schedule, a judge."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from decentral.cli.preflight import make_directory
from decentral.manifest import Manifest
from decentral.observe.events import printable
from decentral.observe.metrics import MetricsLog
from decentral.parameters import Schema, scatter, schema_of
from decentral.tasks.corpus import Corpus, load_corpus
from decentral.tasks.evaluate import bits_per_byte, continue_text, words_before
from decentral.tasks.language_model import begin_from, build_language_model
from decentral.tasks.sizing import LanguageModelConfig
from decentral.tasks.trained_model import Bytes
from decentral.tensors.memory import give_back
from decentral.training.copies import Averages
from decentral.training.inner import build_inner, warm_up
from decentral.training.part import Borrowed


@dataclass(slots=True)
class TrainingContext:
    """The tools and counters of a training loop. ``Any`` where accelerate ships no types."""

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
    sample: Mapping[str, object] = field(default_factory=dict)  # what the model says, as the status has it
    num_steps: int = 0  # inner steps done, those of an earlier process included
    running: Event = field(default_factory=Event)  # cleared while paused

    @property
    def is_main(self) -> bool:
        """True where this process of the peer talks to the swarm and to people."""
        return bool(self.accelerator.is_main_process)

    @property
    def tokens_per_step(self) -> int:
        """Tokens this peer trains on in one inner step, all its processes together."""
        num_windows = self.manifest.data.batch_size * self.accelerator.num_processes
        return int(num_windows * self.manifest.model.context)

    def wait_while_paused(self) -> None:
        """Wait until training goes on; meanwhile the machine has the memory of its steps."""
        if not self.running.is_set():
            give_back()
            self.running.wait()


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
    schema = schema_of(twin, manifest.outer.fragments, layout=manifest.outer.fragment_layout)
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


# ---- what a job measures of itself ----
#
# How much of the time is training, and how good the shared model is.

EVALUATION_SHARE = 0.05  # of the time since the start: a small model on a slow core must not mostly evaluate
# Windows of context bytes, the same after every round and at the end: 16 KB at the demo's size, 0.3 s of one core. With
# 32 of them for rounds and 512 at the end the figure ended at 2.27 bits where the table said 2.13.
WINDOWS = 128
# What the model says is for people alone, so it takes a fifth of that: 64 bytes of the demo's are 0.1 s of a core.
SAMPLE_SHARE, SAMPLE_BYTES, _TEMPERATURE = 0.01, 64, 0.8


class Stopwatch:
    """Time inside inner steps, from before the forward pass to the end of the inner optimizer's own step.

    The hook is registered before the swarm's, so waiting for a round inside ``optimizer.step`` is not counted.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._step_began = 0.0
        self.busy = 0.0  # seconds
        optimizer.register_step_post_hook(self._count_busy)

    def step_begins(self) -> None:
        """Call before the forward pass."""
        self._step_began = self._clock()
        if self._began is None:
            self._began = self._step_began

    def _count_busy(self, *_: object) -> None:
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
    """Evaluates an anchor on the held-out slice with a model of its own; neither the training model nor any global
    generator is touched.
    """

    def __init__(
        self,
        model: nn.Module,
        schema: Schema,
        held_out: Tensor,
        *,
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model, self._schema = model, schema
        self._parameters = dict(model.named_parameters())
        self._borrowed = Borrowed(self._parameters, schema.fragments)  # an anchor is there, and nothing changes it here
        self._held_out, self._context = held_out, context
        self._spent, self._clock = 0.0, clock  # seconds
        self._prompt = words_before(held_out)
        self._spent_on_samples = self._sample_takes = 0.0  # seconds; the latter: of one, as the last told

    def affordable(self, seconds: float) -> bool:
        """Tell whether evaluating has taken less than its share of the ``seconds`` so far."""
        return self._spent <= EVALUATION_SHARE * seconds

    def bits_per_byte(self, anchor: Sequence[Tensor]) -> float:
        """Held-out bits per byte of an anchor given fragment by fragment, flat float32."""
        began = self._clock()
        self._put(anchor)
        held_out: Any = self._held_out
        found = bits_per_byte(self._model, held_out, context=self._context, num_windows=WINDOWS)
        self._spent += self._clock() - began
        return found

    def _put(self, anchor: Sequence[Tensor]) -> None:
        for fragment, flat_N in zip(self._schema.fragments, anchor, strict=True):
            if fragment.index in self._borrowed:
                self._borrowed.lend(fragment.index, flat_N)
            else:
                scatter(flat_N, fragment, self._parameters)

    def sample(self, anchor: Sequence[Tensor], seconds: float) -> dict[str, object]:
        """Return what an anchor says after a few held-out words; empty when that would take more than its share of the
        ``seconds`` so far: then it breaks off, and waits until a whole one has its time.
        """
        left = SAMPLE_SHARE * seconds - self._spent_on_samples
        if left < self._sample_takes:
            return {}
        began, drawn = self._clock(), list[int]()
        self._put(anchor)
        put = took = self._clock() - began
        generator, training = torch.Generator().manual_seed(0), self._model.training
        prompt_T = torch.tensor(list(self._prompt.encode()), device=next(iter(self._parameters.values())).device)
        self._model.eval()
        with suppress(RuntimeError):  # nothing can be drawn where numbers are none: training goes on, and sees to them
            for token in continue_text(
                self._model,
                prompt_T,
                num_tokens=SAMPLE_BYTES,
                context=self._context,
                temperature=_TEMPERATURE,
                generator=generator,
            ):
                drawn.append(token)
                if (took := self._clock() - began) > left:
                    break
        self._model.train(training)
        self._spent_on_samples += took
        self._sample_takes = put + (took - put) * SAMPLE_BYTES / max(1, len(drawn))
        if len(drawn) < SAMPLE_BYTES:
            return {}
        said = Bytes().text_of(drawn).rstrip("\N{REPLACEMENT CHARACTER}")  # the last character may be cut
        return {"prompt": _in_a_line(self._prompt), "text": _in_a_line(self._prompt + said)}


def _in_a_line(text: str) -> str:
    """Return text for any screen: a model may say what a terminal would obey."""
    return printable(" ".join(text.split()))
