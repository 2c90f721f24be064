"""The front door of this package: simulate one scenario and judge it, or forecast a run or a replica of stages."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import anyio
import torch

from decentral.consensus.chain import contributions
from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.parameters import schema_of
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.cut import MOST_FRAGMENTS, Machine, cut_for
from decentral.pipeline.group import Wanted, choose_rounding
from decentral.pipeline.lines import Form
from decentral.pipeline.stage import segments_of, work_of
from decentral.pipeline.turns import FAR, NEAR, StageSpeed, count_micro_batches
from decentral.pipeline.turns import step_seconds as replica_seconds
from decentral.simulate import lessons
from decentral.simulate.by_rounds.forecast import check_by_rounds, forecast_by_rounds
from decentral.simulate.checker import check
from decentral.simulate.lessons import LessonName, stand_in_for
from decentral.simulate.scenario import Scenario, on_lines, profile_named
from decentral.simulate.trace import Entry, Trace, Verdict
from decentral.simulate.troubles import Afflict, Troubles
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.simulate.world import Progress, World, in_memory_folder
from decentral.tasks.language_model import LanguageModel
from decentral.tasks.sizing import LanguageModelConfig, parameters_of
from decentral.tensors.device import PROCESSOR
from decentral.tensors.threads import on_threads
from decentral.training.part import Needs
from decentral.training.round_time import LATENCY

__all__ = ["By", "Outcome", "forecast", "forecast_replica", "simulate"]

GARBAGE_EVERY = 100_000  # objects more than were freed; Python's own is 700


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a simulated run; ``to_dict`` is the JSON of ``decentral simulate``."""

    scenario: Scenario
    trace: Trace
    verdict: Verdict
    hangs: tuple[str, ...]
    rounds: int  # outer steps of the chain when the faults ended
    seconds: float  # of virtual time until then

    @property
    def sound(self) -> bool:
        """Return whether every guarantee held and nothing hung."""
        return self.verdict.sound and not self.hangs

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: figures of the rounds that were asked for, and problems of these and of the calm after them."""
        written = {entry.fields["hash"] for entry in self._until_the_calm("logged")}
        records = [commit.record for name, commit in self.trace.commits.items() if name in written]
        named = [len(contributions(record)) for record in records if record.frames]
        spent = [entry.fields for entry in self.trace.of("spent")]
        return {
            "rounds": self.rounds,
            "commits": len(named),
            "contributors": round(statistics.fmean(named), 2) if named else 0.0,
            **self._count_pairs(),
            **self._count_unmoved(),
            "divergence": self.verdict.divergence,
            "lost_updates": self.verdict.lost_updates,
            "duplicated_updates": self.verdict.duplicated_updates,
            "hangs": len(self.hangs),
            "trace_hash": self.trace.hash,
            "bytes_per_peer": max((fields["sent"] for fields in spent), default=0),
            "utilisation": round(statistics.fmean(_busy(fields) for fields in spent), 4) if spent else 0.0,
            "seconds": round(self.seconds, 3),
            "seconds_per_round": self.seconds_per_round,
            **self._learnt(),
            "problems": [*self.verdict.problems, *self.hangs],
        }

    @property
    def seconds_per_round(self) -> float | None:
        """Median virtual seconds from one outer step to the next, each when the first peer has made it; None of one.

        The median, since the first rounds know no uplink yet, and a swarm that newcomers catch up with is slower.
        """
        pairs = self.scenario.manifest.exchange.kind == "pair"
        made: dict[int, float] = {}
        for entry in self._until_the_calm("swapped" if pairs else "logged"):
            if pairs or self.trace.commits[entry.fields["hash"]].record.frames:
                made.setdefault(entry.fields["round"], entry.time)
        took = [after - before for before, after in pairwise(sorted(made.values()))]
        return round(statistics.median(took), 3) if took else None

    @property
    def join_seconds(self) -> float:
        """Median virtual seconds from the start of a process to its first training step; 0 when none started late."""
        began, took = {}, []
        for entry in self.trace:
            if entry.time > self.seconds:
                break
            if entry.event == "started":
                began[entry.host, entry.life] = entry.time
            elif entry.event == "resumed" and entry.host:
                took.append(entry.time - began[entry.host, entry.life])
        return round(statistics.median(took), 3) if took else 0.0

    def _learnt(self) -> dict[str, Any]:
        """The loss of the anchor over time, and of one median peer that trained alone as long, with the inner steps of
        both; {} if nobody learnt. Alone, a peer waits for nobody and is never down: it makes more steps in that time.

        Gossip has no anchor: there it is the model of the first peer that has made a step.
        """
        curve: dict[int, list[float]] = {}
        kind = self.scenario.manifest.exchange.kind
        for entry in self._until_the_calm("swapped" if kind == "pair" else "applied"):
            if entry.fields.get("loss") is not None:
                curve.setdefault(entry.fields["round"], [entry.time, round(entry.fields["loss"], 5)])
        if not curve:
            return {}
        fragments = self.scenario.manifest.outer.fragments
        points = [[0.0, round(lessons.alone(fragments, 0), 5)], *(curve[number] for number in sorted(curve))]
        steps, alone = self._steps_per_peer(points[-1][0]), int(points[-1][0] / self.scenario.step_seconds)
        lost = lessons.alone(fragments, alone, self.scenario.manifest.inner)
        lone = {"loss_alone": round(lost, 5), "steps_alone": alone}
        return {"loss": points[-1][1], "steps": steps, **lone, "loss_curve": points}

    def _count_pairs(self) -> dict[str, int]:
        """Gossip only, which commits no round: pairs that were merged, and steps that a peer took alone."""
        if self.scenario.manifest.exchange.kind != "pair":
            return {}
        partners = [entry.fields["partner"] for entry in self._until_the_calm("swapped")]
        alone = partners.count(None)
        return {"pairs": (len(partners) - alone + 1) // 2, "unpaired": alone}  # both of a pair tell of it

    def _count_unmoved(self) -> dict[str, Any]:
        """The rounds that moved nothing, by any peer's word, and why the first did; {} if all moved."""
        told = [entry.fields for entry in self._until_the_calm("node_unmoved")]
        return {"unmoved": len({one["round"] for one in told}), "why_unmoved": told[0]["why"]} if told else {}

    def _steps_per_peer(self, until: float) -> int:
        """Inner steps that a peer made by then, on average."""
        return round(sum(entry.time <= until for entry in self.trace.of("stepped")) / self.scenario.hosts)

    def _until_the_calm(self, event: str) -> Iterator[Entry]:
        return (entry for entry in self.trace.of(event) if entry.time <= self.seconds)


def _busy(spent: Mapping[str, float]) -> float:
    """The share of a peer's time in inner steps."""
    return spent["busy"] / spent["awake"] if spent["awake"] else 0.0


def simulate(scenario: Scenario, afflict: Afflict = Troubles, on_progress: Progress = lambda share: None) -> Outcome:
    """Run ``scenario`` under virtual time and judge it. A pure function of its first two arguments.

    ``afflict``: what befalls the machines; what the scenario's profile has in store unless told otherwise.
    ``on_progress``: is told now and then which share of the outer steps is made.
    """
    with in_memory_folder() as folder, _few_collections():
        return run_in_virtual_time(lambda: _run(scenario, Path(folder), afflict, on_progress), scenario.seed)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage seldom: what happened stays to the end, and to go through it took a third of the time."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_EVERY, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _run(scenario: Scenario, folder: Path, afflict: Afflict, on_progress: Progress) -> Outcome:
    trace = Trace(anyio.current_time)
    world = World(scenario, folder, trace, afflict, on_progress)
    await world.run()
    verdict = check(trace, scenario.manifest, scenario.lesson, scenario.seats)
    calm = next(trace.of("calm")).time
    return Outcome(scenario, trace, verdict, tuple(world.hangs), world.reached, calm)


# ---- a forecast of somebody's own run ----
#
# A scenario is made of its manifest, on such machines and links.

By = Literal["messages", "rounds"]


def forecast(
    manifest: Manifest,
    *,
    peers: int,
    profile: str,
    link: float | None = None,
    seed: int,
    rounds: int,
    step_seconds: float,
    parameters: int | None = None,
    learn: bool = False,
    by: By = "messages",
    on_progress: Progress = lambda share: None,
) -> dict[str, Any]:
    """Simulate ``rounds`` outer steps of the run with ``peers`` peers; plain JSON, as ``decentral simulate`` prints it.

    ``by`` messages: the real protocol, which is judged; by rounds: reckoned in seconds, where that is known to agree.

    ``link``: bytes per second, each way, of the line that every peer has instead of the profile's own lines.
    ``parameters`` is needed for a model that the manifest does not describe; with ``learn`` a small one is trained, and
    its loss is told. ``on_progress`` hears which share of the rounds is made. Raises ConfigError.
    """
    if by == "rounds":
        check_by_rounds(manifest, profile, learn=learn)
    numel = parameters or _num_parameters(manifest)
    lesson: LessonName = "learn" if learn else "tiles"
    endless = manifest.changed(run={"rounds": 1_000_000})
    training, ceiling = step_seconds * manifest.inner.steps, manifest.swarm.deadline_ceiling
    scenario = Scenario(
        endless,
        on_lines(profile_named(profile), link),
        seed,
        peers,
        rounds,
        step_seconds,
        lesson=lesson,
        patience=2.0 * (training + ceiling),
        settle=20.0 * training + 40.0 * ceiling,
    )
    if by == "rounds":
        return {"by": by, "asked": rounds, **forecast_by_rounds(scenario, numel, on_progress)}
    scenario = replace(scenario, stand_in=stand_in_for(manifest, numel, peers, lesson))
    with on_threads(1):  # its tensors are small: a second thread costs more than it does
        outcome = simulate(scenario, on_progress=on_progress)
    return {"by": by, "asked": rounds, **outcome.to_dict(), "join_seconds": outcome.join_seconds, "parameters": numel}


def _num_parameters(manifest: Manifest) -> int:
    if manifest.model.task != "causal-lm":
        raise ConfigError("simulate: the manifest does not say how large the model is; give --parameters")
    return parameters_of(LanguageModelConfig.of(manifest.model))


# ---- a replica of several machines ----


def forecast_replica(manifest: Manifest, machines: int, *, link: float | None, step_seconds: float) -> dict[str, Any]:
    """Reckon the steps of so many machines that are one replica; plain JSON.

    ``link``: bytes per second of each one's uplink; None: of one home, whose lines are taken for no limit.
    ``step_seconds``: of an inner step of the whole model on one of them. Raises ConfigError.
    """
    fragments, config = manifest.outer.fragments, LanguageModelConfig.of(manifest.model)
    if manifest.model.task != "causal-lm":
        raise ConfigError("simulate --share: only the built-in language model is known here; the manifest names custom")
    if manifest.outer.fragment_layout != "stages" or not machines <= fragments <= MOST_FRAGMENTS:
        raise ConfigError(
            f"simulate --share {machines}: the run has no {machines} to {MOST_FRAGMENTS} stages; "
            f"found one with decentral init --stages {max(machines, 4)}"
        )
    with torch.device("meta"):
        model = LanguageModel(config)
    model = model.to_empty(device=PROCESSOR)  # whose values nobody reads: they take no memory
    schema, needs = schema_of(model, fragments, layout="stages"), Needs()
    segments = segments_of(model, schema.fragments)
    work = [work_of(*one) for one in zip(schema.fragments, segments, strict=True)]
    batch, micro_batches = manifest.data.batch_size, count_micro_batches(manifest.data.batch_size, machines)
    tokens = batch * config.context
    home = frozenset({"here"}) if link is None else frozenset[str]()
    machine = Machine(needs.in_memory(schema.sizes), sum(work) * tokens / step_seconds, link, home)
    wanted = Wanted(
        machine,
        work,
        needs=lambda part: needs.in_files(schema.sizes, part),
        nbytes=4.0 * config.hidden,
        micro_batches=lambda stages: count_micro_batches(batch, stages),
    )
    cut = cut_for([machine] * machines, work, wanted.needs, wanted.nbytes / 2)
    assert cut is not None, "each has memory for the whole model"
    rounding = choose_rounding([machine] * machines, cut, wanted)
    crosses = Form((batch // micro_batches, config.context, config.hidden), torch.float32, ROUNDINGS[rounding]).nbytes
    each = [sum(work[part.start : part.stop]) / sum(work) * step_seconds / micro_batches for part in cut.parts]
    line = (0.0, 0.0) if link is None else (crosses / link, LATENCY)
    speeds = [StageSpeed(seconds / 3, 2 * seconds / 3, *line) for seconds in each]  # back takes twice as long
    seconds = replica_seconds(speeds, micro_batches, NEAR if rounding == 0 else FAR)
    return {
        "share": machines,
        "parts": [[part.start, part.stop] for part in cut.parts],
        "memory_per_machine": max(map(wanted.needs, cut.parts)),
        "micro_batches": micro_batches,
        "rounding": type(ROUNDINGS[rounding]).__name__.lower(),
        "step_seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "whole_step_seconds": step_seconds,
        "whole_tokens_per_second": round(tokens / step_seconds, 1),
        "utilisation": round(step_seconds / machines / seconds, 4),
        "parameters": sum(schema.sizes),
    }
