"""What a run would do on such machines and links: a scenario made of somebody's own manifest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.simulate.by_rounds.forecast import check_by_rounds, forecast_by_rounds
from decentral.simulate.learning.lessons import LessonName
from decentral.simulate.learning.stand_in import stand_in_for
from decentral.simulate.profiles import on_lines, profile_named
from decentral.simulate.scenario import Scenario
from decentral.simulate.simulation import simulate
from decentral.simulate.world import Progress
from decentral.tasks.sizing import LanguageModelConfig, parameters_of
from decentral.tensors.threads import on_threads

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
