"""The trial of terms before a run is founded by them: on a quadratic, what ruins a run shows within 150 rounds.

Two peers descend loss(x) = 0.5 * sum(c * (x - best)^2), c from 1e-3 to 1, from 1 towards an optimum of their own near
0, by plain inner steps that solve the stiffest coordinates by 0.72 in a round. What a compressor loses there, a
feedback repeats and an outer step multiplies, so that terms of which each alone is sound may diverge together: a debt
is learnt again in every round in which it waits, and momentum carries it on besides. The shipped codec, method and
schedule run; no rule is copied here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from decentral.compressors import parse_compressor, parse_feedback
from decentral.compressors.base import relative_error
from decentral.errors import ConfigError
from decentral.manifest import Manifest, preset_manifest
from decentral.manifest.presets import find_justification
from decentral.manifest.table import canonical
from decentral.manifest.terms import INNER_OPTIMIZERS
from decentral.optimizers import Contributor, RoundInfo, make_outer, presets
from decentral.tensors.memory import fresh_zeros
from decentral.trial.own_model import Build, OwnCourse

__all__ = ["check_learns", "outer_gain", "quadratic", "trial"]

PEERS = 2
ROUNDS = 150
STEPS = 12  # H of each fragment
RATE = 0.1  # of the inner steps
SIDE = 64  # coordinates are a matrix: compressors see a tile of 4,096 values
SPREAD = 0.1  # of the peers' optima
NOISE = 0.1  # of gradients
LOST = 100.0  # times the start: no need to look further
SETTLED = 0.25  # of the start, and still falling after half of the rounds: neither
MOMENTUM = 2.0  # gain of an outer step above which an inner optimizer that averages is too late

# ---- the quadratic ----

_PLAIN: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the script that founds a run has made the default


def quadratic(fragments: int = 1) -> Build:
    """Return the function that builds one peer's descent; its loss is 1 at the start, 0 at the mean of all optima."""
    order = torch.Generator().manual_seed(0)
    places = [torch.randperm(SIDE * SIDE, generator=order, dtype=torch.int64, device="cpu") for _ in range(fragments)]
    curvature = [torch.logspace(-3, 0, SIDE * SIDE, **_PLAIN)[place].view(SIDE, SIDE) for place in places]
    at_start = sum(float(0.5 * c.sum()) for c in curvature)

    def build(number: int) -> tuple[nn.Module, Any, Any, Any]:
        generator = torch.Generator().manual_seed(number + 1)
        model = nn.ParameterList([nn.Parameter(torch.ones(SIDE, SIDE, **_PLAIN)) for _ in range(fragments)])
        best = [SPREAD * torch.randn(SIDE, SIDE, generator=generator, **_PLAIN) for _ in range(fragments)]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step() -> None:
            for parameter, c, optimum in zip(model, curvature, best, strict=True):
                noise = NOISE * c.sqrt() * torch.randn(SIDE, SIDE, generator=generator, **_PLAIN)
                parameter.grad = c * (parameter.detach() - optimum) + noise
            optimizer.step()

        def evaluate() -> Tensor:
            losses = [0.5 * (c * one.square()).sum() for c, one in zip(curvature, model, strict=True)]
            return torch.stack(losses).sum() / at_start

        return model, optimizer, step, evaluate

    return build


def trial(manifest: Manifest, rounds: int = ROUNDS) -> float:
    """Return the loss after so many rounds of the quadratic by these terms, where the start has 1; infinite once
    diverged.
    """
    terms = Manifest.of(json.loads(_essence(manifest)), "trial")
    fragments, steps = terms.outer.fragments, terms.inner.steps
    terms = terms.changed(run={"rounds": rounds * fragments})
    with torch.random.fork_rng(devices=[]):
        course = OwnCourse(quadratic(fragments), terms, PEERS)
        quarter, half = (course.go(round(share * rounds) * steps) for share in (0.25, 0.5))
        if half < SETTLED and half <= quarter:  # what diverges rises from early on
            return half
        loss = course.go(rounds * steps) if half < LOST else math.inf
        return loss if loss < LOST else math.inf


# ---- the check ----


def check_learns(manifest: Manifest) -> None:
    """Raise ConfigError for terms that ruin a run, with the reason and the nearest terms that do not.

    Those of a preset are known to learn, whatever the model, the inner steps and the run's length are.
    """
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    if method.begins_apart:
        raise ConfigError(
            f"outer.method {method.name} is for replicas that begin apart, and all peers of a run begin with the "
            'weights of its first one; use outer.method = "ad_psgd", and this one in a study (docs/lab.md)'
        )
    if _essence(manifest) in _known() or method.summary.rebuilds:
        return  # what is made of derivatives along directions has no change that a compressor or a feedback could ruin
    if INNER_OPTIMIZERS[manifest.inner.optimizer_name].averages:
        _check_averages(manifest)
    loss = _try(_essence(manifest))
    if loss < 1.0:
        return
    terms = manifest.compressor
    ends = "diverge" if math.isinf(loss) else f"end at {loss:.3g} times the loss that they begin with"
    raise ConfigError(
        f"outer.method {method.name}, compressor.chain {terms.chain} and compressor.feedback {terms.feedback} {ends} "
        f"on a quadratic: {_reason(manifest)}; {_way_out(manifest)}"
    )


def _check_averages(manifest: Manifest) -> None:
    """Raise ConfigError for an inner optimizer that learns an average, under an outer step that goes on by its
    momentum.
    """
    named, gain = manifest.inner.optimizer_name, outer_gain(manifest)
    if gain > MOMENTUM:
        raise ConfigError(
            f'inner.optimizer = "{named}" does not fit outer.method {manifest.outer.method}: it learns an average, '
            f"which follows late, and outer momentum carries each step on to {gain:.2g} times its length, past where "
            'the average is by then; use inner.optimizer = "adamw", or outer.method = "local_sgd"'
        )


def outer_gain(manifest: Manifest) -> float:
    """Return how many times its length a contribution moves the anchor in the end; 1 for a plain mean at rate 1.

    Measured on a contribution of 1 that comes once in many rounds. Of gossip, and where peers train parts, it is 1.
    """
    method = make_outer(manifest.outer.method, manifest.outer.hyper)
    channels = method.channels()
    if method.topology == "pair" or method.summary.rebuilds or method.summary.divides or channels[0].combine == "each":
        return 1.0
    two = tuple(Contributor(bytes([n]) * 32, STEPS, STEPS, 0) for n in range(PEERS))
    anchor = fresh_zeros(1)
    state: Mapping[str, Tensor] = method.init(anchor)
    for step in range(100):
        received = {channel.name: fresh_zeros(1) for channel in channels if channel.is_due(step)}
        received[channels[0].name] = fresh_zeros(1) + float(step == 0)
        info = RoundInfo(step, two, (1.0, 1.0), ((1,),), ("x",), PEERS)
        anchor, state = method.outer_step(anchor, received, state, info)
    return abs(float(anchor))


def _reason(manifest: Manifest) -> str:
    terms, gain = manifest.compressor, outer_gain(manifest)
    lost = relative_error(parse_compressor(terms.chain))
    feedback = parse_feedback(terms.feedback)
    if feedback.sender:
        return (
            f"{lost:.0%} of a contribution is left to be sent later, and is learnt again meanwhile, which the outer "
            f"step multiplies by {gain:.2g}"
        )
    return f"{lost:.0%} of a contribution is lost for good, and the outer step multiplies what is left by {gain:.2g}"


def _way_out(manifest: Manifest) -> str:
    """Return the nearest terms that learn."""
    for told, tables in _changes(manifest):
        try:
            if _try(_essence(manifest.changed(**tables))) < 1.0:
                return f"use {told}"
        except ConfigError:  # they do not fit for another reason
            continue
    return "use a preset's terms: decentral optimizers lists them"


def _changes(manifest: Manifest) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    preset = presets().get(manifest.outer.method)
    for feedback in dict.fromkeys([preset.feedback if preset is not None else "none", "none"]):
        if manifest.compressor.feedback != feedback:
            yield f'compressor.feedback = "{feedback}"', {"compressor": {"feedback": feedback}}
    if "momentum" in manifest.outer.hyper or outer_gain(manifest) > MOMENTUM:
        yield "outer.momentum = 0 and outer.learning_rate = 1", {"outer": {"momentum": 0.0, "learning_rate": 1.0}}
    dense = {"chain": "int8(block=4096)", "feedback": "none"}
    yield 'compressor.chain = "int8(block=4096)" without feedback', {"compressor": dense}


# ---- what is known, and what was tried ----


def _essence(manifest: Manifest) -> bytes:
    """Return the terms without what the trial does not depend on."""
    whole, inner, outer = manifest.model_dump(), manifest.inner, manifest.outer
    kept = {key: getattr(inner, key) for key in ("optimizer", "momentum", "mixing", "averaging")}
    # Where training waits for rounds, fragments go on each by itself: one with as many inner steps shows what all do.
    fragments = outer.fragments if outer.overlap else 1
    steps = fragments * max(-(-STEPS // fragments), outer.overlap + 1)
    tables = {"run": {"name": "trial"}, "inner": {**kept, "steps": steps, "weight_decay": 0.0, "clip": None}}
    tables |= {name: whole[name] for name in ("outer", "compressor", "exchange")}
    tables["outer"] = tables["outer"] | {"fragments": fragments, "layout": None, "skip": None}
    return canonical(Manifest.of({**tables, "model": {"task": "custom"}}, "trial"))


@cache
def _known() -> frozenset[bytes]:
    return frozenset(_essence(one) for name in presets(ours=True) for one in _variants(name))


def _variants(preset: str) -> list[Manifest]:
    """Return its own terms, and those as ``decentral init`` suits them to a run's length and a line."""
    whole, known = preset_manifest(preset), find_justification(preset)
    suited = [whole]
    if known is not None:
        suited += [whole.changed(outer=known.outer(row["rounds"], row.get("parameters", 0))) for row in known.rates]
        suited += [one.changed(exchange={"kind": "gather"}) for one in suited if known.gathers]
    return suited


@cache
def _try(essence: bytes) -> float:
    return trial(Manifest.of(json.loads(essence), "trial"))
