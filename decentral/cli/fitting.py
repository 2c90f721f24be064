"""Terms chosen for a line, and two sentences that say why, with what is expected of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from accelerate import Accelerator

from decentral.cli.terms import Sizes, terms_of
from decentral.errors import UsageError
from decentral.manifest import Manifest
from decentral.manifest.presets import class_of
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import VOCAB, LanguageModelConfig, parameters_of
from decentral.training.inner import build_inner, inner_step
from decentral.training.round_time import TARGET, Circumstances, Fit, fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request for terms."""

    rate: float  # bytes/s, each way
    peers: int
    step_seconds: float | None  # None: to be measured
    model_size: int | None  # parameters; None: the model of the terms
    preset: str | None  # None: what is justified


@dataclass(frozen=True, slots=True)
class Fitted:
    """Terms with what they were chosen by."""

    fit: Fit
    given: Circumstances
    measured: bool  # the step time

    @property
    def manifest(self) -> Manifest:
        """The terms."""
        return self.fit.manifest

    def to_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return what ``init --json`` prints of it."""
        fit, a_round, given, known = self.fit, self.fit.time, self.given, self.fit.known
        return {
            "link_class": fit.link.up_to,
            "why": _reason(fit, given.rate),
            "evidence": None if known is None else known.evidence,
            "seeds": 0 if known is None else known.seeds,
            "peers": given.peers,
            "parameters": given.num_parameters,
            "step_seconds": given.step_seconds,
            "step_time_measured": self.measured,
            "inner_steps": a_round.steps,
            "seconds_per_round": round(a_round.seconds, 3),
            "bytes_per_peer_per_round": round(a_round.nbytes),
            "share_computing": round(a_round.share, 4),
            "enough_computing": fit.reaches,
            "inner_steps_shown": fit.is_shown,
        }

    def sentences(self) -> str:
        """Why, and what is expected."""
        fit, a_round, given, known = self.fit, self.fit.time, self.given, self.fit.known
        measured = ", measured on this machine" if self.measured else ""
        expected = (
            f"With H = {a_round.steps} inner steps of {given.step_seconds:.3g} s{measured}, {given.peers} peers with "
            f"{_many(given.num_parameters)} parameters need {a_round.seconds:.4g} s per round, in which each sends "
            f"{_size(a_round.nbytes)} and computes {100 * a_round.share:.1f} % of the time"
        )
        if not fit.reaches:
            expected += f", which is the best that is possible and less than {TARGET:.0%}"
        if known is not None and not fit.is_shown:
            expected += f"; that it trains as well with more than {known.shown} inner steps has not been shown"
        if known is not None and not fit.lasts:
            expected += (
                f"; a run of {fit.rounds:.0f} rounds is short for it, of which {known.rounds} reach every value once"
            )
        return f"{fit.preset}: {_reason(fit, given.rate)}.\n{expected}."


def fit_terms(wish: Wish, overrides: Mapping[str, object], sizes: Sizes) -> Fitted:
    """The terms for the line that was asked for. Raises ConfigError, UsageError."""
    steps = overrides.get("inner_steps")
    assert steps is None or isinstance(steps, int)

    first = terms_of(wish.preset or class_of(wish.rate).preset, overrides, sizes)
    seconds = wish.step_seconds or _measure(first)
    given = Circumstances(
        rate=wish.rate,
        peers=wish.peers,
        num_parameters=_parameters(wish, first),
        step_seconds=seconds,
        own_optimizer=first.model.task == "custom",
    )

    def make(preset: str, inner_steps: int | None) -> Manifest:
        return terms_of(preset, {**overrides, "inner_steps": inner_steps}, sizes, scale=given.scale)

    fit = fitting(make, given, preset=wish.preset, steps=steps)
    whole = {**overrides, "inner_steps": fit.time.steps}
    fit = replace(fit, manifest=terms_of(fit.preset, whole, sizes, rounds=fit.rounds, scale=given.scale))
    return Fitted(fit, given, measured=wish.step_seconds is None)


def _parameters(wish: Wish, manifest: Manifest) -> int:
    if manifest.model.task == "causal-lm":
        return parameters_of(LanguageModelConfig.of(manifest.model))
    if wish.model_size is None:
        raise UsageError("--link with --task custom: nothing says how large your model is; add --model-size, as 30M")
    return wish.model_size


def _measure(manifest: Manifest) -> float:
    if manifest.model.task != "causal-lm":
        raise UsageError("--link with --task custom: your script's step cannot be timed here; add --step-time, as 0.4s")

    click.echo("timing a few inner steps on this machine (--step-time says what they take elsewhere) ...", err=True)
    return measure_step_seconds(manifest)


def _reason(fit: Fit, rate: float) -> str:
    link = fit.link
    lines = f"lines of {link.up_to} and {'less' if rate <= link.rate else 'more'}"
    evidence = "" if fit.known is None else f" ({fit.known.evidence})"
    if fit.own_optimizer and fit.preset == "diloco" and not fit.asked:
        return f"for {lines}, with an inner optimizer that is your script's own, dense frames learn most{evidence}"
    if (other := fit.instead_of) is not None and other.lasts and fit.known is not None:
        return (
            f"{other.preset} is what is justified for {lines}, but a round of so small a model takes little there, and "
            f"{fit.known.unhindered}{evidence}"
        )
    if other is not None and other.known is not None:
        return (
            f"{other.preset} is what is justified for {lines}, and a run of {other.rounds:.0f} rounds is too short for "
            f"it, of which {other.known.rounds} reach every value once; this sends more{evidence}"
        )
    if fit.asked and fit.preset != link.preset:
        return f"it was asked for, and {link.preset} is what is justified for {lines}{evidence}"
    if fit.preset != link.preset:
        return f"it sends less than {link.preset}, which leaves too little time to compute on {lines}{evidence}"
    return f"for {lines}, {link.why}{evidence}"


def _many(count: int) -> str:
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count:,}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3g} MB" if nbytes < 1e9 else f"{nbytes / 1e9:.3g} GB"


# ---- how long an inner step takes ----
#
# The manifest's model is built on this machine, and makes a few.

WARM_UP_STEPS, TIMED_STEPS = 2, 5  # steps; the first ones allocate the optimizer's state and choose kernels
Clock = Callable[[], float]


def measure_step_seconds(manifest: Manifest, clock: Clock = time.perf_counter) -> float:
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

    for _ in range(WARM_UP_STEPS):
        step()
    return statistics.median(_time(step, clock) for _ in range(TIMED_STEPS))


def _time(work: Callable[[], None], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began
